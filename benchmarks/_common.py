"""What the benchmark programs share: results and what they say about the machine, the bare recipe, models."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
# A checkout can be measured without being installed.
sys.path.insert(0, str(ROOT))


def about(arguments: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to repeat a measurement: command, date, versions, processor."""
    program = Path(sys.argv[0]).name
    return {
        "command": " ".join(["python", f"benchmarks/{program}", *arguments]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """The model of the processor, without the name of the machine it is in."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines up cells: the first column to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )


def save(stem: str, data: dict[str, Any], draw: Callable[[Any], None] | None = None) -> None:
    """Writes ``results/<stem>.json``, and ``.png`` where matplotlib is installed.

    Args:
        stem: name of the files.
        data: what the JSON file holds.
        draw: draws the picture, given ``matplotlib.pyplot``.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{stem}.json").write_text(json.dumps(data, indent=2) + "\n")
    if draw is None:
        return
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw(pyplot)
    pyplot.tight_layout()
    pyplot.savefig(RESULTS / f"{stem}.png", dpi=120)
    pyplot.close("all")


def progress(text: str) -> None:
    """Says on the terminal what is being done; says nothing where the output is kept."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Recipe:
    """The bare recipe: an optimizer and a hook for each parameter."""

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], params: Iterable[Tensor], **kwargs: Any) -> None:
        self._handles = [
            param.register_post_accumulate_grad_hook(self._hook(optimizer_class([param], **kwargs))) for param in params
        ]

    def remove(self) -> None:
        """Takes the hooks off: they hold optimizers that hold parameters, where no garbage collector looks."""
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _hook(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def update(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update

    def step(self) -> None:
        """Nothing is left to do after backward."""

    def zero_grad(self) -> None:
        """Nothing is left to drop after backward."""


class GPT2(nn.Module):
    """A decoder of GPT-2's layout (pre-norm blocks, tied embedding), of the width and depth that are asked for."""

    def __init__(self, layers: int = 8, width: int = 512, heads: int = 8, vocabulary: int = 50257) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token at every position."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.linear(self.norm(hidden), self.tokens.weight)


def classifier(name: str, device: str = "cpu") -> nn.Module:
    """An untrained torchvision model, always the same weights."""
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.get_model(name, weights=None).to(device)


def loss_of(name: str, model: nn.Module, batch: int, device: str = "cpu") -> Callable[[], Tensor]:
    """A function that computes the loss of ``model`` on ``batch`` random inputs, always the same."""
    generator = torch.Generator().manual_seed(1)
    if name == "gpt2":
        tokens = torch.randint(50257, (batch, 129), generator=generator).to(device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    else:
        inputs = torch.randn(batch, 3, 224, 224, generator=generator).to(device)
        targets = torch.randint(1000, (batch,), generator=generator).to(device)
    return lambda: nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets)
