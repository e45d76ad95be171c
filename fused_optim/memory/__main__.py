"""Command line: what training a model would take, ordinary and fused.

Example:
    python -m fused_optim.memory torchvision.models:vit_l_16 --input 1,3,224,224 --optimizer torch.optim:Adam
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ._batch import LIMIT, largest_batch
from ._estimate import Estimate, estimate
from ._plot import compare
from ._simulation import Simulation

_FAILED = 2


class _WrongInput(Exception):
    """Something on the command line is wrong; the text says what in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leaves with one line where argparse would print the usage too."""
        raise _WrongInput(f"{message} (see --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: what follows the program's name; by default what the process was started with.

    Returns:
        The exit code: 0, or 2 where the input is wrong, with one line on standard error that says what.
    """
    try:
        options = _parser().parse_args(arguments)
        _report(options)
    except Exception as error:
        # A user's factory, model and optimizer can raise anything, and whoever typed the command needs the
        # reason.
        print(f"error: {_reason(error)}", file=sys.stderr)
        return _FAILED
    return 0


def _report(options: argparse.Namespace) -> None:
    factory = _frozen(_factory(options.factory), options.trainable)
    optimizer_class = _optimizer_class(options.optimizer)
    inputs = _inputs(options.input)
    kwargs = dict(_setting(text) for text in options.set)
    figures = estimate(factory, optimizer_class, inputs, device=options.device, **kwargs)
    batches = None
    if options.device_gb is not None:
        simulation = Simulation(factory, optimizer_class, inputs, None, options.device, kwargs)
        batches = _batches(simulation, inputs, options.device_gb * 1e9, figures)
    if options.plot is not None:
        _plot(figures, options.plot)
    print(_json(figures, batches) if options.json else _text(figures, batches, options.device_gb))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fused_optim.memory",
        description="Says what training a model takes, ordinary and with the step fused into backward, "
        "without allocating the model.",
    )
    parser.add_argument("factory", help="what builds the model: package.module:callable or path/to/file.py:callable")
    parser.add_argument(
        "--input", action="append", required=True, metavar="[NAME=]SHAPE[:DTYPE]",
        help="shape of an input, batch first: 1,3,224,224 or input_ids=1,128:int64; once for each input",
    )  # fmt: skip
    parser.add_argument("--optimizer", default="torch.optim:Adam", help="module:class, by default %(default)s")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the optimizer, such as lr=1e-3",
    )
    parser.add_argument("--trainable", metavar="REGEX", help="train only the parameters whose names contain a match")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="by default %(default)s")
    parser.add_argument(
        "--device-gb", type=float, metavar="GB", help="say which batch fits into so many GB (10^9 bytes)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw ordinary above fused training over time")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    return parser


def _attribute(text: str, what: str) -> Any:
    module_name, separator, name = text.rpartition(":")
    if not separator or not module_name or not name:
        raise _WrongInput(f"expected {what} as module:name or file.py:name, got {text!r}")
    module = _file(module_name) if module_name.endswith(".py") else _module(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _WrongInput(f"{module_name} has no {name!r}: check the spelling of {what}")
        found = getattr(found, part)
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _WrongInput(f"cannot import {name!r}: {error}") from error


def _file(name: str) -> Any:
    path = Path(name)
    if not path.is_file():
        raise _WrongInput(f"there is no file {name!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _WrongInput(f"cannot load {name!r} as a Python file")
    module = importlib.util.module_from_spec(spec)
    # Pickling and dataclasses look a module up by its name.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _factory(text: str) -> Callable[[], torch.nn.Module]:
    found = _attribute(text, "the factory")
    if not callable(found):
        raise _WrongInput(f"expected {text} to be callable without arguments, got {type(found).__name__}")
    factory: Callable[[], torch.nn.Module] = found
    return factory


def _optimizer_class(text: str) -> type[torch.optim.Optimizer]:
    found = _attribute(text, "the optimizer")
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    raise _WrongInput(f"expected {text} to be a subclass of torch.optim.Optimizer, got {found!r}")


def _frozen(factory: Callable[[], torch.nn.Module], pattern: str | None) -> Callable[[], torch.nn.Module]:
    if pattern is None:
        return factory
    try:
        trainable = re.compile(pattern)
    except re.error as error:
        raise _WrongInput(f"--trainable {pattern!r} is no regular expression: {error}") from error

    def build() -> torch.nn.Module:
        model = factory()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable.search(name) is not None)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise _WrongInput(f"--trainable {pattern!r} matches no parameter: names look like {name!r}")
        return model

    return build


def _inputs(texts: Sequence[str]) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
    parsed = [_input(text) for text in texts]
    named = {name: tensor for name, tensor in parsed if name}
    if not named:
        return tuple(tensor for _, tensor in parsed)
    if len(named) != len(parsed):
        raise _WrongInput("expected either all inputs with different names or none: write each as NAME=SHAPE")
    return named


def _input(text: str) -> tuple[str, torch.Tensor]:
    match = re.fullmatch(r"(?:(\w+)=)?(\d+(?:,\d+)*)(?::(\w+))?", text)
    if match is None:
        raise _WrongInput(
            f"expected --input as [NAME=]SHAPE[:DTYPE] such as 1,3,224,224 or ids=1,128:int64, got {text!r}"
        )
    name, shape, dtype_name = match.groups()
    dtype = getattr(torch, dtype_name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise _WrongInput(f"torch has no dtype {dtype_name!r}: use one such as float32, bfloat16 or int64")
    return name or "", torch.empty([int(size) for size in shape.split(",")], dtype=dtype, device="meta")


def _setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise _WrongInput(f"expected --set NAME=VALUE such as lr=1e-3, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _batches(simulation: Simulation, inputs: Any, budget: float, figures: Estimate) -> dict[str, int] | None:
    if figures.unknown:
        return None
    tensors = inputs.values() if isinstance(inputs, dict) else inputs
    begin = next(iter(tensors)).shape[0]
    known = {"plain": figures.plain.peak.total, "fused": figures.fused.peak.total}

    def peak(variant: str, batch: int) -> int | None:
        if batch == begin:
            return known[variant]
        try:
            return simulation.run(variant, batch).peak.total
        except ValueError:
            if batch > begin:
                raise
            return None

    return {variant: largest_batch(partial(peak, variant), budget, begin) for variant in known}


def _plot(figures: Estimate, path: str) -> None:
    if figures.plain.recording is None or figures.fused.recording is None:
        raise _WrongInput(f"there is no timeline to plot: {figures.unknown}")
    compare(figures.plain.recording, figures.fused.recording, path, ("ordinary", "fused"))


def _json(figures: Estimate, batches: dict[str, int] | None) -> str:
    return json.dumps({**figures.to_dict(), "largest_batch": batches}, indent=2)


def _text(figures: Estimate, batches: dict[str, int] | None, device_gb: float | None) -> str:
    if device_gb is None:
        return str(figures)
    if batches is None:
        return f"{figures}\nwhat fits into {device_gb:g} GB is unknown, since activations are"
    return f"{figures}\nlargest batch in {device_gb:g} GB of live tensors: " + ", ".join(
        f"{variant} {f'{LIMIT} or more' if batch >= LIMIT else batch or 'none'}" for variant, batch in batches.items()
    )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, _WrongInput):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
