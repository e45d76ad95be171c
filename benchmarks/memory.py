"""Peak memory of training one model in five ways, each in its own process.

The ordinary optimizer with its defaults, with ``foreach=False`` and with ``fused=True``; the bare recipe that
gives each parameter an optimizer and a hook; and `fused_optim.BackwardFusedOptimizer`. For each: the peak
that the operating system (or the CUDA allocator) sees over what the process held before it built the model,
the time of an iteration, and, from a run of its own, the split by `fused_optim.memory.record`.

Example:
    python benchmarks/memory.py --model vit_l_16 --optimizer Adam --batch 1
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
# A checkout can be measured without being installed.
sys.path.insert(0, str(_ROOT))

VARIANTS = ("default", "foreach=False", "fused=True", "recipe", "BackwardFusedOptimizer")
# With this, glibc returns every block of 128 KiB or more to the system when it is freed. By default it raises
# the limit as blocks are freed, and resident memory then is more than live memory.
_RETURNING = {"MALLOC_MMAP_THRESHOLD_": "131072"}
_COLUMNS = ("parameters", "gradients", "optimizer_state", "activations", "temporaries")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        arguments: what follows the program's name; by default what the process was started with.

    Returns:
        The exit code: 0, or 1 where a way to train failed.
    """
    options = _parser().parse_args(arguments)
    if options.child:
        print(json.dumps(_child(options)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = _measure(options, Path(folder))
        if results is None:
            return 1
        print(_table(results))
        _save(options, results, Path(folder))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Peak memory of training one model in five ways.")
    parser.add_argument("--model", default="vit_l_16", help="a model of torchvision.models, by default %(default)s")
    parser.add_argument("--optimizer", default="Adam", help="a class of torch.optim, by default %(default)s")
    parser.add_argument("--batch", type=int, default=1, help="images in a batch, by default %(default)s")
    parser.add_argument("--size", type=int, default=224, help="edge of an image in pixels, by default %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="by default %(default)s")
    parser.add_argument("--iterations", type=int, default=3, help="by default %(default)s, at least 2")
    parser.add_argument("--output", type=Path, default=_ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--recording", type=Path, help=argparse.SUPPRESS)
    return parser


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]] | None:
    environments = {"resident": {}, "resident_returning": _RETURNING} if options.device == "cpu" else {"allocated": {}}
    results: dict[str, dict[str, Any]] = {variant: {} for variant in VARIANTS}
    runs = len(VARIANTS) * (len(environments) + 1)
    done = 0
    for variant in VARIANTS:
        for key, environment in environments.items():
            done += 1
            measured = _run(options, variant, environment, None, f"[{done}/{runs}] {variant}: {key.replace('_', ' ')}")
            if measured is None:
                return None
            results[variant].setdefault("seconds", measured["seconds"])
            results[variant][key] = measured["peak"]
        done += 1
        recording = folder / f"{VARIANTS.index(variant)}.pickle"
        recorded = _run(options, variant, {}, recording, f"[{done}/{runs}] {variant}: recording")
        if recorded is None:
            return None
        results[variant].update(live=recorded["live"], peak_in=recorded["peak_in"])
    return results


def _run(
    options: argparse.Namespace, variant: str, environment: dict[str, str], recording: Path | None, title: str
) -> dict[str, Any] | None:
    command = [sys.executable, str(Path(__file__).resolve()), *_arguments(options), "--child", variant]
    command += [] if recording is None else ["--recording", str(recording)]
    began = time.perf_counter()
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=1)
                break
            except subprocess.TimeoutExpired:
                _progress(f"{title}, {time.perf_counter() - began:.0f} s")
    _progress("")
    if process.returncode == 0:
        loaded: dict[str, Any] = json.loads(output.splitlines()[-1])
        return loaded
    reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    print(f"error: {variant}: {reason}", file=sys.stderr)
    return None


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text.endswith(", 1 s"):
        print(text.removesuffix(", 1 s"), file=sys.stderr, flush=True)


def _arguments(options: argparse.Namespace) -> list[str]:
    names = ("model", "optimizer", "batch", "size", "device", "iterations")
    return list(chain.from_iterable((f"--{name}", str(getattr(options, name))) for name in names))


def _child(options: argparse.Namespace) -> dict[str, Any]:
    """Trains in one way, in this process, and says what it took; bytes and seconds."""
    import torch
    import torchvision

    # Held now, whoever first imports it, so that it belongs to the baseline of all ways to train.
    import fused_optim.memory

    torch.manual_seed(0)
    images = torch.randn(options.batch, 3, options.size, options.size, device=options.device)
    baseline = _held(options.device)
    model = getattr(torchvision.models, options.model)(weights=None).to(options.device)
    optimizer = _optimizer(options.child, getattr(torch.optim, options.optimizer), model)
    seconds: list[float] = []
    if options.recording is None:
        _train(model, optimizer, images, options.iterations, seconds)
        return {"peak": _most_held(options.device) - baseline, "seconds": seconds}
    with fused_optim.memory.record(model, optimizer) as recording:
        _train(model, optimizer, images, options.iterations, seconds)
    options.recording.write_bytes(pickle.dumps(recording))
    return {"live": recording.peak.to_dict(), "peak_in": str(recording.peak_moment), "seconds": seconds}


def _train(model: Any, optimizer: Any, images: Any, iterations: int, seconds: list[float]) -> None:
    import torch

    for _ in range(iterations):
        began = time.perf_counter()
        model(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)


def _optimizer(variant: str, optimizer_class: Any, model: Any) -> Any:
    from fused_optim import BackwardFusedOptimizer

    makers: dict[str, Callable[[], Any]] = {
        "default": lambda: optimizer_class(model.parameters()),
        "foreach=False": lambda: optimizer_class(model.parameters(), foreach=False),
        "fused=True": lambda: optimizer_class(model.parameters(), fused=True),
        "recipe": lambda: _Recipe(optimizer_class, model),
        "BackwardFusedOptimizer": lambda: BackwardFusedOptimizer(optimizer_class, model.parameters()),
    }
    return makers[variant]()


class _Recipe:
    """The bare recipe: an optimizer and a hook for each parameter, with the face that a recorder looks at."""

    def __init__(self, optimizer_class: Any, model: Any) -> None:
        self._optimizers = {parameter: optimizer_class([parameter]) for parameter in model.parameters()}
        for parameter in self._optimizers:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Any) -> None:
        self._optimizers[parameter].step()
        self._optimizers[parameter].zero_grad()

    @property
    def param_groups(self) -> list[Any]:
        return [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for one in self._optimizers.values() for key, value in one.state.items()}

    def step(self) -> None:
        """Nothing is left to do."""

    def zero_grad(self) -> None:
        """Nothing is left to do."""


def _held(device: str) -> int:
    """Bytes that the process holds now."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else _most_held(device)


def _most_held(device: str) -> int:
    """Bytes that the process has held at most."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss would also count what the process held before it became this program.
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _table(results: dict[str, dict[str, Any]]) -> str:
    measured = [key for key in ("resident", "resident_returning", "allocated") if key in results["default"]]
    titles = ["GB", *(key.replace("_", ", ") for key in measured), "live", *_COLUMNS, "s/iteration"]
    rows = [[title.replace("optimizer_state", "state") for title in titles], *_rows(results, measured)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )


def _rows(results: dict[str, dict[str, Any]], measured: list[str]) -> Iterator[list[str]]:
    for variant, result in results.items():
        sizes = [result[key] for key in measured] + [result["live"][name] for name in ("total", *_COLUMNS)]
        yield [variant, *(f"{size / 1e9:.2f}" for size in sizes), f"{_seconds(result):.2f}"]


def _seconds(result: dict[str, Any]) -> float:
    # The first iteration creates the optimizer's state.
    later = result["seconds"][1:]
    return sum(later) / len(later)


def _save(options: argparse.Namespace, results: dict[str, dict[str, Any]], recordings: Path) -> None:
    from fused_optim import memory

    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"memory_{options.model}_{options.optimizer.lower()}_batch{options.batch}_{options.device}"
    (options.output / f"{stem}.json").write_text(json.dumps({**_about(options), "results": results}, indent=2) + "\n")
    first, last = (
        pickle.loads((recordings / f"{VARIANTS.index(name)}.pickle").read_bytes())
        for name in (VARIANTS[0], VARIANTS[-1])
    )
    name = f"{options.model}, batch {options.batch}"
    titles = (f"{name}: {options.optimizer}", f"{name}: {VARIANTS[-1]}")
    try:
        memory.compare(first, last, options.output / f"{stem}.png", titles)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)


def _about(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torchvision

    import fused_optim

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "fused_optim": fused_optim.__version__,
    }
    return {
        "command": " ".join(["python benchmarks/memory.py", *_arguments(options)]),
        "date": datetime.date.today().isoformat(),
        "device": _device_name(options.device),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "units": "bytes over what the process held before it built the model; seconds for each iteration",
        "resident": "peak resident memory of the process",
        "resident_returning": "the same with MALLOC_MMAP_THRESHOLD_=131072: freed memory goes back at once",
    }


def _device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
