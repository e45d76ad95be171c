"""What stepping inside backward costs in time, next to the ordinary optimizer and to others that do the same.

Four parts: (a) the cost of a small parameter, (b) whole iterations of real models, (c) growth with the number of
parameters and groups, and the cost of the guards. Everything that is compared runs in one process, turn by turn
in alternating order, on one thread; figures are medians, in brackets the quartiles.

Example:
    python benchmarks/speed.py --part a
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from _common import GPT2, Recipe, about, classifier, loss_of, progress, quartiles, save, table
from torch import Tensor, nn

from fused_optim import BackwardFusedOptimizer

Iteration = Callable[[], None]
Build = Callable[[list[nn.Parameter]], Iteration]
Figures = tuple[float, float, float]

PARTS = ("a", "b", "c", "guards")
ELEMENTS = 64
FLAGS: dict[str, dict[str, Any]] = {"fused=True": {"fused": True}, "foreach=False": {"foreach": False}}


class AbsentError(Exception):
    """A library that is compared is not installed, or does not run here."""


@dataclass
class Effort:
    """How much is measured.

    Attributes:
        tensors: small parameters of part a.
        rounds: turns that every contender gets in parts a and guards.
        models: models of part b, and the turns that every contender gets with each.
        batches: batch sizes of part b.
        sizes: numbers of parameters of part c.
        groups: numbers of groups of part c.
    """

    tensors: int = 1000
    rounds: int = 31
    models: tuple[tuple[str, int], ...] = (("resnet18", 21), ("vit_b_16", 9), ("gpt2", 9))
    batches: tuple[int, ...] = (1, 4)
    sizes: tuple[int, ...] = (100, 300, 1000, 3000, 10000)
    groups: tuple[int, ...] = (1, 4, 16, 64)


QUICK = Effort(200, 7, (("resnet18", 3),), (1,), (100, 1000), (1, 8))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts that are asked for; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    effort = QUICK if options.quick else Effort()
    if options.batch:
        effort = dataclasses.replace(effort, batches=tuple(options.batch))
    for part in options.part or PARTS:
        measure, show, draw, stem = _PARTS[part]
        results = measure(effort)
        progress("")
        print(show(results), end="\n\n", flush=True)
        name = f"{stem}_quick" if options.quick else stem
        picture = None if draw is None else partial(draw, results=results)
        save(name, {**about(arguments), "results": results}, picture)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time of stepping inside backward, in four parts.")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a few turns of each, to see that it works")
    parser.add_argument("--batch", action="append", type=int, help="only this batch in part b; may be repeated")
    return parser


def _turns(contenders: dict[str, Iteration], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of one iteration of each contender, ``rounds`` times, in alternating order.

    One thread's processor time is what a quiet machine's clock would show, whatever else runs on this one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for iterate in contenders.values():
        iterate()
        iterate()
    # What was built so far must not be walked by the garbage collector on a contender's time.
    gc.collect()
    gc.freeze()
    names = list(contenders)
    for turn in range(rounds):
        progress(f"turn {turn + 1} of {rounds}")
        for name in names if turn % 2 else reversed(names):
            # Untimed: none shall pay for the caches and the heap that the one before it has left.
            contenders[name]()
            start = time.process_time()
            contenders[name]()
            seconds[name].append(time.process_time() - start)
    gc.unfreeze()
    return seconds


# (a) The cost of a small parameter


def _small_params(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(ELEMENTS, generator=generator)) for _ in range(count)]


def _backward_of(params: list[nn.Parameter]) -> Iteration:
    def backward() -> None:
        total = torch.zeros(ELEMENTS)
        for param in params:
            total = total + param
        total.sum().backward()

    return backward


def _loop(optimizer: Any, params: list[nn.Parameter]) -> Iteration:
    backward = _backward_of(params)

    def iterate() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return iterate


def _dropping(params: list[nn.Parameter]) -> Iteration:
    def drop(param: Tensor) -> None:
        param.grad = None

    for param in params:
        param.register_post_accumulate_grad_hook(drop)
    return _backward_of(params)


def _plain(**flags: Any) -> Build:
    return lambda params: _loop(torch.optim.Adam(params, **flags), params)


def _recipe(**flags: Any) -> Build:
    return lambda params: _loop(Recipe(torch.optim.Adam, params, **flags), params)


def _ours(**flags: Any) -> Build:
    return lambda params: _loop(BackwardFusedOptimizer(torch.optim.Adam, params, **flags), params)


def _in_backward(**flags: Any) -> Build:
    def build(params: list[nn.Parameter]) -> Iteration:
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.Adam, params, flags)
        return _backward_of(params)

    return build


def _optimi(params: list[nn.Parameter]) -> Iteration:
    import optimi

    optimizer = optimi.Adam(params, lr=1e-3, gradient_release=True)
    optimi.prepare_for_gradient_release(nn.ParameterList(params), optimizer)
    return _loop(optimizer, params)


def _flash(params: list[nn.Parameter]) -> Iteration:
    import flashoptim

    optimizer = flashoptim.FlashAdam(params, lr=1e-3)
    flashoptim.enable_gradient_release(nn.ParameterList(params), optimizer)
    backward = _backward_of(params)
    # Its hooks call what it lacks here only when they run.
    backward()
    return backward


OURS = "BackwardFusedOptimizer"
CONTENDERS: dict[str, Build] = {
    "Adam(fused=True)": _plain(fused=True),
    "Adam(foreach=False)": _plain(foreach=False),
    "Adam()": _plain(),
    "recipe, fused=True": _recipe(fused=True),
    "recipe, foreach=False": _recipe(foreach=False),
    f"{OURS}, fused=True": _ours(fused=True),
    f"{OURS}, foreach=False": _ours(foreach=False),
    f"{OURS}": _ours(),
    f"{OURS}, fused=True, bucket_cap_mb=0": _ours(fused=True, bucket_cap_mb=0),
    f"{OURS}, foreach=False, bucket_cap_mb=0": _ours(foreach=False, bucket_cap_mb=0),
    "_apply_optimizer_in_backward, fused=True": _in_backward(fused=True),
    "torch-optimi": _optimi,
    "FlashOptim": _flash,
}


def _built(build: Build, params: list[nn.Parameter]) -> Iteration:
    try:
        return build(params)
    except Exception as error:
        raise AbsentError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error


def measure_cost(effort: Effort) -> dict[str, Any]:
    """Microseconds that each contender adds for a small parameter to a hook that only drops the gradient."""
    contenders = {"drop": _dropping(_small_params(effort.tensors))}
    absent: dict[str, str] = {}
    for name, build in CONTENDERS.items():
        try:
            contenders[name] = _built(build, _small_params(effort.tensors))
        except AbsentError as error:
            absent[name] = str(error)
    seconds = _turns(contenders, effort.rounds)
    floor = seconds.pop("drop")
    cost = {
        name: quartiles((own - base) / effort.tensors * 1e6 for own, base in zip(values, floor))
        for name, values in seconds.items()
    }
    return {"tensors": effort.tensors, "elements": ELEMENTS, "microseconds": cost, "absent": absent}


def show_cost(results: dict[str, Any]) -> str:
    """The table of part a."""
    title = f"(a) {results['tensors']} tensors of {results['elements']} elements: microseconds a parameter"
    cost = results["microseconds"]
    rows = [(name, f"{middle:.1f}", f"[{low:.1f} {high:.1f}]") for name, (low, middle, high) in cost.items()]
    left_out = [f"left out: {name} ({reason})" for name, reason in results["absent"].items()]
    return "\n".join([title, table([("", "median", "quartiles"), *rows]), *left_out])


def draw_cost(pyplot: Any, results: dict[str, Any]) -> None:
    """The picture of part a."""
    cost = dict(sorted(results["microseconds"].items(), key=lambda item: item[1][1], reverse=True))
    _, axes = pyplot.subplots(figsize=(9, 4.5))
    colors = ["tab:blue" if name.startswith(OURS) else "tab:gray" for name in cost]
    bars = axes.barh(list(cost), [median for _, median, _ in cost.values()], color=colors)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.margins(x=0.1)
    axes.set_xlabel("microseconds a small parameter")


# (b) Whole iterations


def _network(name: str) -> nn.Module:
    if name != "gpt2":
        return classifier(name)
    torch.manual_seed(0)
    return GPT2()


def _training(name: str, batch: int, optimizer: Any, model: nn.Module) -> Iteration:
    loss = loss_of(name, model, batch)

    def iterate() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iterate


def measure_iterations(effort: Effort) -> list[dict[str, Any]]:
    """Iterations of models with Adam: ours and the recipe over plain with the same flags."""
    rows = []
    for name, pairs in effort.models:
        for batch in effort.batches:
            for label, flags in FLAGS.items():
                rows.append(_compare_iterations(name, batch, label, flags, pairs))
                progress("")
                print(show_iterations(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def _compare_iterations(name: str, batch: int, label: str, flags: dict[str, Any], pairs: int) -> dict[str, Any]:
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda model: torch.optim.Adam(model.parameters(), **flags),
        "recipe": lambda model: Recipe(torch.optim.Adam, model.parameters(), **flags),
        "ours": lambda model: BackwardFusedOptimizer(torch.optim.Adam, model.parameters(), **flags),
    }
    seconds: dict[str, list[float]] = {key: [] for key in makers}
    names = list(makers)
    for _ in names:
        # Which contender the heap suits best is luck, and lasts as long as they do: each comes first once.
        names.append(names.pop(0))
        for key, values in _one_build(name, batch, {key: makers[key] for key in names}, pairs).items():
            seconds[key] += values
    plain = seconds["plain"]
    return {
        "model": name,
        "batch": batch,
        "flags": label,
        "pairs": len(plain),
        "plain_seconds": quartiles(plain),
        "recipe_ratio": quartiles(own / base for own, base in zip(seconds["recipe"], plain)),
        "ours_ratio": quartiles(own / base for own, base in zip(seconds["ours"], plain)),
    }


def _one_build(
    name: str, batch: int, makers: dict[str, Callable[[nn.Module], Any]], pairs: int
) -> dict[str, list[float]]:
    models = {key: _network(name) for key in makers}
    optimizers = {key: make(models[key]) for key, make in makers.items()}
    contenders = {key: _training(name, batch, optimizers[key], models[key]) for key in makers}
    seconds = _turns(contenders, max(2, pairs // len(makers)))
    optimizers["recipe"].remove()
    return seconds


def show_iterations(results: list[dict[str, Any]]) -> str:
    """The table of part b."""
    rows = [
        (
            f"{row['model']}, batch {row['batch']}, {row['flags']}",
            f"{row['plain_seconds'][1] * 1e3:.0f} ms",
            _ratio(row["recipe_ratio"]),
            _ratio(row["ours_ratio"]),
        )
        for row in results
    ]
    title = "(b) an iteration with Adam, over the ordinary optimizer's with the same flags"
    return "\n".join([title, table([("", "ordinary", "recipe", OURS), *rows])])


def _ratio(figures: Figures) -> str:
    low, median, high = figures
    return f"{median:.3f} [{low:.3f} {high:.3f}]"


def draw_iterations(pyplot: Any, results: list[dict[str, Any]]) -> None:
    """The picture of part b."""
    _, axes = pyplot.subplots(figsize=(9, 1 + 0.4 * len(results)))
    labels = [f"{row['model']}, batch {row['batch']}, {row['flags']}" for row in results]
    series = ((0.12, "recipe_ratio", "tab:gray", "recipe"), (-0.12, "ours_ratio", "tab:blue", OURS))
    for shift, key, color, name in series:
        low, median, high = zip(*(row[key] for row in results))
        spread = [[m - x for m, x in zip(median, low)], [x - m for m, x in zip(median, high)]]
        places = [place + shift for place in range(len(results))]
        axes.errorbar(median, places, xerr=spread, fmt="o", color=color, label=name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("iteration time over the ordinary optimizer's")
    axes.legend()


# (c) Growth


def measure_growth(effort: Effort) -> list[dict[str, Any]]:
    """Microseconds a parameter of everything whose cost could grow faster than their number."""
    shapes = [(size, 1) for size in effort.sizes] + [(effort.sizes[-1], groups) for groups in effort.groups[1:]]
    makers: dict[str, Callable[[Any], Any]] = {
        "plain": lambda groups: torch.optim.Adam(groups, fused=True),
        "ours": lambda groups: BackwardFusedOptimizer(torch.optim.Adam, groups, fused=True),
    }
    rows: list[dict[str, Any]] = []
    for size, groups in shapes:
        progress(f"{size} parameters, {groups} groups")
        for name, make in makers.items():
            rows.append({"optimizer": name, "params": size, "groups": groups, **_phases(make, size, groups)})
    return rows


PHASES = ("construct", "iteration", "state_dict", "load_state_dict")


def _phases(make: Callable[[Any], Any], size: int, groups: int, repeats: int = 5) -> dict[str, float]:
    """The least of a few tries: a cost that grows shows in the least as well, and noise does not."""
    best = dict.fromkeys(PHASES, float("inf"))
    for _ in range(repeats):
        params = _small_params(size)
        members = [{"params": params[index::groups]} for index in range(groups)]
        gc.collect()
        optimizer = _timed(best, "construct", size, lambda members=members: make(members))
        iterate = _loop(optimizer, params)
        iterate()
        _timed(best, "iteration", size, iterate)
        state = _timed(best, "state_dict", size, optimizer.state_dict)
        _timed(best, "load_state_dict", size, lambda own=optimizer, state=state: own.load_state_dict(state))
    return best


def _timed(best: dict[str, float], phase: str, size: int, action: Callable[[], Any]) -> Any:
    start = time.process_time()
    result = action()
    best[phase] = min(best[phase], (time.process_time() - start) / size * 1e6)
    return result


def show_growth(results: list[dict[str, Any]]) -> str:
    """The table of part c."""
    rows = [
        (
            f"{row['params']} parameters, {row['groups']} groups, {row['optimizer']}",
            *(f"{row[phase]:.1f}" for phase in PHASES),
        )
        for row in results
    ]
    return "\n".join(["(c) microseconds a parameter, Adam(fused=True)", table([("", *PHASES), *rows])])


def draw_growth(pyplot: Any, results: list[dict[str, Any]]) -> None:
    """The picture of part c."""
    _, panels = pyplot.subplots(1, len(PHASES), figsize=(13, 3.6))
    for axes, phase in zip(panels, PHASES):
        for name, color in (("plain", "tab:gray"), ("ours", "tab:blue")):
            rows = [row for row in results if row["optimizer"] == name and row["groups"] == 1]
            axes.plot([row["params"] for row in rows], [row[phase] for row in rows], "o-", color=color, label=name)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_title(phase)
        axes.set_xlabel("parameters")
    panels[0].set_ylabel("microseconds a parameter")
    panels[0].legend()


# The guards


def _nothing(*_: Any) -> None:
    pass


def _empty(*_: Any) -> dict[Any, Any]:
    return {}


def _true(*_: Any) -> bool:
    return True


@contextmanager
def _without_guards() -> Iterator[None]:
    """Takes the checks out, which no option does: they are not meant to be switched off.

    What is left are two comparisons a gradient, which tell whether it is the second one.
    """
    from fused_optim import _engine, _guards, _roster, _rounds, _torch

    nowhere = _torch.Surroundings(False, None)
    with (
        mock.patch.multiple(_rounds.Rounds, check=_nothing, note_values=_nothing),
        mock.patch.multiple(_engine.Engine, _enrol_newcomers=_nothing, _reduced=_empty),
        mock.patch.multiple(_engine, surroundings=lambda: nowhere),
        mock.patch.multiple(_guards, view_of=_empty),
        mock.patch.multiple(_roster.Roster, is_current=_true),
    ):
        yield


def _unguarded(iterate: Iteration) -> Iteration:
    def unguarded() -> None:
        with _without_guards():
            iterate()

    return unguarded


def measure_guards(effort: Effort) -> dict[str, Any]:
    """The time of the guards: microseconds a small parameter, and their share of an iteration of ResNet-18."""
    iterate = _ours(fused=True)(_small_params(effort.tensors))
    small = _turns({"with": iterate, "without": _unguarded(iterate)}, effort.rounds)
    model = _network("resnet18")
    network = _training("resnet18", 1, _fused_adam(model.parameters()), model)
    resnet = _turns({"with": network, "without": _unguarded(network)}, effort.rounds)
    return {
        "microseconds": quartiles(
            (own - bare) / effort.tensors * 1e6 for own, bare in zip(small["with"], small["without"])
        ),
        "resnet18_ratio": quartiles(own / bare for own, bare in zip(resnet["with"], resnet["without"])),
    }


def _fused_adam(params: Any) -> Any:
    return BackwardFusedOptimizer(torch.optim.Adam, params, fused=True)


def show_guards(results: dict[str, Any]) -> str:
    """The lines of the part about the guards."""
    low, median, high = results["microseconds"]
    rows = [("a small parameter: microseconds more than without", f"{median:.2f}", f"[{low:.2f} {high:.2f}]")]
    low, median, high = results["resnet18_ratio"]
    rows.append(("ResNet-18, batch 1: iteration over one without", f"{median:.3f}", f"[{low:.3f} {high:.3f}]"))
    return "\n".join(["what the guards cost, Adam(fused=True)", table([("", "median", "quartiles"), *rows])])


_PARTS: dict[str, tuple[Callable[[Effort], Any], Callable[[Any], str], Callable[[Any, Any], None] | None, str]] = {
    "a": (measure_cost, show_cost, draw_cost, "speed_cost"),
    "b": (measure_iterations, show_iterations, draw_iterations, "speed_iterations"),
    "c": (measure_growth, show_growth, draw_growth, "speed_growth"),
    "guards": (measure_guards, show_guards, None, "speed_guards"),
}

if __name__ == "__main__":
    sys.exit(main())
