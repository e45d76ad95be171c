"""What only a GPU can show, in under three minutes: exactness on CUDA, memory of ViT-L/16, time of iterations.

Without a GPU it says so and measures nothing; ``--device cpu`` runs the part on exactness there.

Example:
    python benchmarks/gpu_check.py
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

# cuBLAS gives the same bits twice only with this, and reads it when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from _common import GPT2, Recipe, about, classifier, loss_of, progress, quartiles, save, table
from torch import Tensor, nn
from torch.optim import Optimizer

from fused_optim import BackwardFusedOptimizer

STEPS = 8
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach=False": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}
REGIMES = ("side stream", "bfloat16", "fp16 scaled")
SPEED_MODELS = ("resnet18", "vit_b_16", "gpt2")
CONTENDERS = ("ordinary", "recipe", "BackwardFusedOptimizer")
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; returns 1 if a run on the device was not exact, else 0."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("NO GPU: torch finds no CUDA device here, so nothing was checked and nothing was measured.")
        return 0
    start = time.perf_counter()
    results: dict[str, Any] = {"exact": measure_exactness(options.device)}
    rows = _exactness_rows(results["exact"])
    if on_gpu:
        results["memory_mib"] = measure_memory(options.device)
        results["speed_ratio"] = measure_speed(options.device)
        rows += _figure_rows(results)
    progress("")
    width = max(map(len, rows))
    print(table([(*row, *[""] * (width - len(row))) for row in rows]))
    differing = [key for key, outcome in results["exact"].items() if outcome.startswith("DIFFERS")]
    print(f"{len(results['exact'])} cases, {len(differing)} differ; {time.perf_counter() - start:.0f} s")
    stem = "gpu_check" if on_gpu else f"gpu_check_{options.device}"
    save(stem, {**about(arguments, options.device), **results})
    return 1 if differing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Checks on a GPU: exactness, memory, speed.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for the part on exactness alone")
    return parser


# Exactness


def optimizer_classes() -> list[type[Optimizer]]:
    """The classes of torch.optim that a dense backward pass can step."""
    classes = {
        value
        for value in vars(torch.optim).values()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    unfit = {"LBFGS", "SparseAdam"}
    return sorted((found for found in classes if found.__name__ not in unfit), key=lambda found: found.__name__)


def measure_exactness(device: str) -> dict[str, str]:
    """What came of every class with every set of flags and in every regime: "class, column" to outcome."""
    outcomes: dict[str, str] = {}
    for optimizer_class in optimizer_classes():
        for column in (*FLAGS, *REGIMES):
            progress(f"{optimizer_class.__name__}, {column}")
            outcomes[f"{optimizer_class.__name__}, {column}"] = outcome(optimizer_class, column, device)
    return outcomes


def outcome(optimizer_class: type[Optimizer], column: str, device: str) -> str:
    """Trains twice and compares: "equal", "DIFFERS ...", or why the ordinary optimizer does not run this."""
    flags = FLAGS.get(column, {})
    if not flags.keys() <= inspect.signature(optimizer_class).parameters.keys():
        return "no such flag"
    if column == "side stream" and not device.startswith("cuda"):
        return "no streams"
    kwargs = {"lr": 0.01, **flags}
    with warnings.catch_warnings():
        # That `capturable=True` is of no use outside of a graph is known.
        warnings.simplefilter("ignore")
        try:
            plain = train(lambda params, _: optimizer_class(params, **kwargs), column, device)
        except Exception as error:
            return f"ordinary refuses: {_first_line(error)}"
        fused_class = partial(BackwardFusedOptimizer, optimizer_class)
        try:
            fused = train(lambda params, scaler: fused_class(params, grad_scaler=scaler, **kwargs), column, device)
        except Exception as error:
            return f"DIFFERS: {_first_line(error)}"
    unequal = [name for name, value in plain.items() if name not in fused or not torch.equal(value, fused[name])]
    missing = fused.keys() - plain.keys()
    return f"DIFFERS in {(unequal + sorted(missing))[0]}" if unequal or missing else "equal"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:60]}".splitlines()[0]


def train(make: Callable[[Any, Any], Optimizer], regime: str, device: str) -> dict[str, Tensor]:
    """Trains a small network for a few steps; returns its weights and the optimizer's state by name.

    Args:
        make: builds the optimizer, given the parameters and the gradient scaler (None but for "fp16 scaled").
        regime: one of ``REGIMES``; any other name means an ordinary loop.
        device: where.
    """
    model = _small_network().to(device, torch.bfloat16 if regime == "bfloat16" else torch.float32)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, init_scale=256.0) if regime == "fp16 scaled" else None
    optimizer = make(model.parameters(), scaler)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(16, 64, generator=generator).to(device, next(model.parameters()).dtype)
        optimizer.zero_grad()
        with _side_stream() if regime == "side stream" else nullcontext():
            with torch.autocast(kind, torch.float16) if scaler else nullcontext():
                loss = model(inputs).float().square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return _tensors(model, optimizer)


def _small_network() -> nn.Module:
    """Matrices only, for Muon takes nothing else; the large one is stepped alone, the small ones together."""
    torch.manual_seed(0)
    sizes = (64, 32, 600, 600, 24, 8)
    layers = [nn.Linear(wide, narrow, bias=False) for wide, narrow in zip(sizes, sizes[1:])]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())])


class _side_stream(AbstractContextManager[None]):
    """Runs what is inside on a stream of its own, between what comes before and after on the current one."""

    def __enter__(self) -> None:
        self._outer, self._side = torch.cuda.current_stream(), torch.cuda.Stream()
        self._side.wait_stream(self._outer)
        self._inside = torch.cuda.stream(self._side)
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        self._outer.wait_stream(self._side)


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = dict(copy.deepcopy(model.state_dict()))
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{key} of parameter {index}"] = value
    return tensors


def _exactness_rows(outcomes: dict[str, str]) -> list[list[str]]:
    columns = (*FLAGS, *REGIMES)
    rows = [["exactness", *columns]]
    for optimizer_class in optimizer_classes():
        name = optimizer_class.__name__
        rows.append([name, *(_short(outcomes[f"{name}, {column}"]) for column in columns)])
    return rows


def _short(text: str) -> str:
    if text.startswith("ordinary refuses"):
        return "refused"
    return "-" if text.startswith("no ") else text


# Memory


def _contenders(params: Any, flags: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {
        "ordinary": lambda: torch.optim.Adam(params, **flags),
        "recipe": lambda: Recipe(torch.optim.Adam, params, **flags),
        "BackwardFusedOptimizer": lambda: BackwardFusedOptimizer(torch.optim.Adam, params, **flags),
    }


def measure_memory(device: str) -> dict[str, float]:
    """Peak memory of three iterations of ViT-L/16 with Adam, in MiB over what was allocated before the model."""
    peaks: dict[str, float] = {}
    for label, flags in {key: FLAGS[key] for key in ("default", "foreach=False", "fused")}.items():
        for name in CONTENDERS:
            progress(f"memory: {name}, {label}")
            peaks[f"{name}, {label}"] = _peak(name, flags, device)
    return peaks


def _peak(name: str, flags: dict[str, Any], device: str) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = classifier("vit_l_16", device)
    optimizer = _contenders(list(model.parameters()), flags)[name]()
    loss = loss_of("vit_l_16", model, 1, device)
    for _ in range(3):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    _release(optimizer)
    return peak / MIB


def _release(optimizer: Any) -> None:
    if isinstance(optimizer, Recipe):
        optimizer.remove()


# Speed


def measure_speed(device: str, turns: int = 15) -> dict[str, tuple[float, float, float]]:
    """Time of an iteration with Adam over the ordinary optimizer's with the same flags: quartiles of the ratio."""
    ratios: dict[str, tuple[float, float, float]] = {}
    for model in SPEED_MODELS:
        for label in ("default", "fused"):
            progress(f"speed: {model}, {label}")
            seconds = _iteration_seconds(model, FLAGS[label], device, turns)
            for name in ("recipe", "BackwardFusedOptimizer"):
                pairs = zip(seconds[name], seconds["ordinary"])
                ratios[f"{model}, batch 4, {label}, {name}"] = quartiles(own / base for own, base in pairs)
    return ratios


def _iteration_seconds(name: str, flags: dict[str, Any], device: str, turns: int) -> dict[str, list[float]]:
    models = {key: _network(name, device) for key in CONTENDERS}
    optimizers = {key: _contenders(list(models[key].parameters()), flags)[key]() for key in CONTENDERS}
    iterations = {key: _iteration(name, models[key], optimizers[key], device) for key in CONTENDERS}
    seconds: dict[str, list[float]] = {key: [] for key in iterations}
    for turn in range(turns):
        for key in list(iterations) if turn % 2 else reversed(list(iterations)):
            iterations[key]()
            torch.cuda.synchronize()
            start = time.perf_counter()
            iterations[key]()
            torch.cuda.synchronize()
            seconds[key].append(time.perf_counter() - start)
    _release(optimizers["recipe"])
    return seconds


def _network(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return GPT2().to(device) if name == "gpt2" else classifier(name, device)


def _iteration(name: str, model: nn.Module, optimizer: Any, device: str) -> Callable[[], None]:
    loss = loss_of(name, model, 4, device)

    def iterate() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iterate


def _figure_rows(results: dict[str, Any]) -> list[list[str]]:
    rows = [["ViT-L/16, batch 1, Adam: peak", "MiB"]]
    rows += [[name, f"{peak:.0f}"] for name, peak in results["memory_mib"].items()]
    rows.append(["an iteration over the ordinary one", "median", "lower", "upper"])
    for name, (low, median, high) in results["speed_ratio"].items():
        rows.append([name, f"{median:.3f}", f"{low:.3f}", f"{high:.3f}"])
    return rows


if __name__ == "__main__":
    sys.exit(main())
