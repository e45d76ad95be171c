"""Trains a small vision transformer on real images twice, and shows that both runs are the same run.

Once with the ordinary optimizer, once with `fused_optim.BackwardFusedOptimizer`: the same loop, the same
schedule, each saved in the middle, dropped, and resumed from the file with everything built anew. Every loss and
every weight must be equal bit for bit, and the test accuracy over 90 %.

Example:
    python benchmarks/digits.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import about, progress, save, table
from torch import Tensor, nn

from fused_optim import BackwardFusedOptimizer

BATCH = 64
WANTED_ACCURACY = 0.9

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Split = tuple[Tensor, Tensor, Tensor, Tensor]


class SmallViT(nn.Module):
    """A vision transformer for images of 8 by 8 pixels, cut into patches of 2 by 2."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns ten logits an image."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.summary.expand(len(tokens), -1, -1), tokens], dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[:, 0]))


class Training:
    """A training run that can be saved and resumed."""

    def __init__(self, make_optimizer: MakeOptimizer, split: Split, epochs: int) -> None:
        torch.manual_seed(0)
        self.split = split
        self.model = SmallViT()
        self.optimizer = make_optimizer(self.model.parameters())
        batches = -(-len(split[0]) // BATCH)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=epochs * batches)
        self.losses: list[float] = []

    def epoch(self) -> None:
        """Goes through the training images once, in an order of its own."""
        images, labels = self.split[:2]
        self.model.train()
        for batch in torch.randperm(len(images)).split(BATCH):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())

    def accuracy(self) -> float:
        """The share of test images that are recognised."""
        images, labels = self.split[2:]
        self.model.eval()
        with torch.no_grad():
            return float((self.model(images).argmax(1) == labels).float().mean())

    def save(self, path: Path) -> None:
        """Saves what the rest of the run depends on, the state of the random numbers included."""
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "losses": self.losses,
        }
        torch.save(checkpoint, path)

    def load(self, path: Path) -> None:
        """Continues from where :meth:`save` was called."""
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["random"])
        self.losses = checkpoint["losses"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains with both optimizers; returns 0 if the runs are the same and good, else 1."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    split = load_digits()
    makers: dict[str, MakeOptimizer] = {
        "AdamW": partial(torch.optim.AdamW, fused=options.fused),
        "BackwardFusedOptimizer": partial(BackwardFusedOptimizer, torch.optim.AdamW, fused=options.fused),
    }
    runs: dict[str, Training] = {}
    seconds: dict[str, float] = {}
    for name, make in makers.items():
        start = time.perf_counter()
        runs[name] = train_and_resume(name, make, split, options.epochs)
        seconds[name] = time.perf_counter() - start
    plain, fused = runs.values()
    accuracy = {name: run.accuracy() for name, run in runs.items()}
    print(_table(runs, accuracy, seconds))
    faults = differences(plain, fused)
    faults += [f"{name}: accuracy {share:.3f}" for name, share in accuracy.items() if share <= WANTED_ACCURACY]
    results = {"losses": plain.losses, "accuracy": accuracy, "seconds": seconds, "differences": faults}
    save("digits", {**about(arguments), **results}, lambda pyplot: _draw(pyplot, runs, options.epochs))
    print("\n".join(faults) or f"{len(plain.losses)} losses, all weights and all state are equal, bit for bit")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Two training runs on handwritten digits that must be one.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fused", action="store_true", help="use the fused kernels of torch.optim in both runs")
    return parser


def load_digits() -> Split:
    """Images and labels for training, and the same for testing: 1,797 handwritten digits, a quarter to test."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 4], order[len(order) // 4 :]
    return images[train], labels[train], images[test], labels[test]


def train_and_resume(name: str, make: MakeOptimizer, split: Split, epochs: int) -> Training:
    """Trains half of the epochs, saves, starts anew from the file, and trains the other half."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        training = Training(make, split, epochs)
        for epoch in range(epochs // 2):
            progress(f"{name}: epoch {epoch + 1} of {epochs}")
            training.epoch()
        training.save(path)
        del training
        training = Training(make, split, epochs)
        training.load(path)
    for epoch in range(epochs // 2, epochs):
        progress(f"{name}: epoch {epoch + 1} of {epochs}, resumed")
        training.epoch()
    progress("")
    return training


def differences(first: Training, second: Training) -> list[str]:
    """Names everything in which two runs are not equal."""
    found = [] if first.losses == second.losses else ["the losses differ"]
    found += _unequal("", first.model.state_dict(), second.model.state_dict())
    states = second.optimizer.state_dict()["state"]
    for index, state in first.optimizer.state_dict()["state"].items():
        found += _unequal(f" of parameter {index}", state, states[index])
    return found


def _unequal(where: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [f"{key}{where} differs" for key, value in first.items() if not torch.equal(value, second[key])]


def _table(runs: dict[str, Training], accuracy: dict[str, float], seconds: dict[str, float]) -> str:
    rows = [
        (name, f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}", f"{accuracy[name]:.1%}", f"{seconds[name]:.1f}")
        for name, run in runs.items()
    ]
    return table([("", "first loss", "last loss", "test accuracy", "seconds"), *rows])


def _draw(pyplot: Any, runs: dict[str, Training], epochs: int) -> None:
    _, axes = pyplot.subplots(figsize=(8, 3.5))
    for (name, run), (width, color) in zip(runs.items(), ((4, "tab:orange"), (1, "tab:blue"))):
        axes.plot(run.losses, linewidth=width, color=color, label=name)
        axes.axvline(len(run.losses) * (epochs // 2) / epochs, color="gray", linestyle=":")
    axes.set_xlabel("iteration (dotted: saved and resumed)")
    axes.set_ylabel("training loss")
    axes.set_yscale("log")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
