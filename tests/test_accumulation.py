"""Announced gradient accumulation: bit for bit what the ordinary optimizer makes of the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from twins import Twins, assert_equal, assert_no_gradients, loss_of

from fused_optim import BackwardFusedOptimizer


class Counting(Optimizer):
    """Outside of torch.optim: divides its rate by a counter in the group, and moves what has no gradient, too."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                param.mul_(0.99)
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])


CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    (torch.optim.Adagrad, {}),
    (Counting, {}),
]
FULL = range(4)
Window = Sequence[Iterable[int]]
WINDOWS: dict[str, list[Window]] = {
    "all used in every micro-batch": [[FULL] * 3] * 4,
    "last window shorter": [[FULL] * 3, [FULL] * 3, [FULL]],
    "windows of one": [[FULL], [FULL], [FULL]],
    "some unused in some micro-batches": [[(0, 1), (2,), (0, 3)], [(3,), (1, 2), (1,)], [(0,), (1,), (2,)]],
    "some used in the first micro-batch only": [[FULL, (0,), (0,)], [FULL, (1,)], [FULL, (3,), (1, 2)]],
    "first used in a micro-batch that is not the last": [[(3,), (1,)], [(0,), (1,)], [(2,), (1,)], [(1,), (0,)]],
    "one never used": [[(0, 1), (0, 2)], [(1, 2), (0, 1, 2)], [(0,), (2,)]],
}


def accumulating(optimizer: Optimizer) -> AbstractContextManager[None]:
    return optimizer.accumulate() if isinstance(optimizer, BackwardFusedOptimizer) else nullcontext()


def run_window(params: Sequence[Tensor], optimizer: Optimizer, window: Window, seed: int) -> None:
    """Backward passes of one window, the loss of each divided by their number; all but the last announced."""
    for number, used in enumerate(window):
        last = number == len(window) - 1
        with nullcontext() if last else accumulating(optimizer):
            (loss_of(params, used, 10 * seed + number) / len(window)).backward()


def gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in params]


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zeros"])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize(("optimizer_class", "kwargs"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_windows_are_exact(
    optimizer_class: type[Optimizer], kwargs: dict[str, Any], windows: list[Window], set_to_none: bool
) -> None:
    twins = Twins(optimizer_class, **kwargs)
    for seed, window in enumerate(windows):
        for params, optimizer in twins.each():
            run_window(params, optimizer, window, seed)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        twins.check(f"window {seed}")


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zeros"])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize(("optimizer_class", "kwargs"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_windows_are_exact_without_calling_step(
    optimizer_class: type[Optimizer], kwargs: dict[str, Any], windows: list[Window], set_to_none: bool
) -> None:
    twins = Twins(optimizer_class, **kwargs)
    for seed, window in enumerate(windows):
        for params, optimizer in twins.each():
            optimizer.zero_grad(set_to_none=set_to_none)
            run_window(params, optimizer, window, seed)
        twins.plain.step()
        twins.check(f"window {seed}")
        assert_no_gradients(twins.fused)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS.keys())
def test_accumulate_when_is_asked_once_a_backward_pass(windows: list[Window]) -> None:
    state = {"accumulating": False, "asked": 0}

    def accumulate_when() -> bool:
        state["asked"] += 1
        return state["accumulating"]

    twins = Twins(torch.optim.NAdam, options={"accumulate_when": accumulate_when, "bucket_cap_mb": 0})
    passes = 0
    for seed, window in enumerate(windows):
        for params, optimizer in twins.each():
            for number, used in enumerate(window):
                state["accumulating"] = number < len(window) - 1
                (loss_of(params, used, 10 * seed + number) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
        passes += len(window)
        twins.check(f"window {seed}")
    assert state["asked"] == passes


def test_accumulate_leaves_the_gradients_of_an_ordinary_backward() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    for seed in range(3):
        for params, optimizer in twins.each():
            with accumulating(optimizer), accumulating(optimizer):
                loss_of(params, (seed, 3), seed).backward()
        assert_equal(*map(gradients, twins.models))
        twins.check("nothing stepped")


def test_step_applies_what_was_accumulated_to_the_end() -> None:
    twins = Twins(torch.optim.AdamW, lr=0.01)
    for seed in range(3):
        for params, optimizer in twins.each():
            with accumulating(optimizer):
                for used in (FULL, (1, 2)):
                    loss_of(params, used, seed).backward()
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        twins.check(f"window {seed}")


def test_zero_grad_drops_what_was_accumulated() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1, momentum=0.9)
    for seed in range(3):
        for params, optimizer in twins.each():
            with accumulating(optimizer):
                loss_of(params, FULL, 50 + seed).backward()
            optimizer.zero_grad()
            loss_of(params, FULL, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        twins.check(f"iteration {seed}")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("backward fails here")


def fail(params: Sequence[Tensor], optimizer: Optimizer, seed: int, where: str) -> None:
    with accumulating(optimizer):
        loss_of(params, FULL, seed).backward()
        if where == "in backward":
            (loss_of(params, [3], seed) + loss_of([Failing.apply(params[0])], [0], seed)).backward()
        raise ArithmeticError


@pytest.mark.parametrize("where", ["in the loop", "in backward"])
def test_an_exception_inside_accumulate_leaves_the_gradients_and_ends_the_accumulation(where: str) -> None:
    twins = Twins(torch.optim.SGD, lr=0.1, momentum=0.9)
    for seed in range(3):
        for params, optimizer in twins.each():
            with pytest.raises(ArithmeticError):
                fail(params, optimizer, seed, where)
        assert_equal(*map(gradients, twins.models))
        for params, optimizer in twins.each():
            optimizer.zero_grad()
            loss_of(params, FULL, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        twins.check(f"iteration {seed}")


def test_gradients_are_freed_as_soon_as_the_sum_is_applied() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    run_window(twins.models[1], twins.fused, [FULL, (0, 1)], 0)
    assert [param.grad is None for param in twins.models[1]][:2] == [True, True]
    twins.fused.step()
    twins.fused.zero_grad()
    assert_no_gradients(twins.fused)


def test_accumulated_gradients_outlive_an_unfuse_and_a_fuse() -> None:
    twins = Twins(torch.optim.AdamW, lr=0.01)
    for seed in range(3):
        for params, optimizer in twins.each():
            with accumulating(optimizer):
                loss_of(params, FULL, seed).backward()
            if isinstance(optimizer, BackwardFusedOptimizer):
                optimizer.unfuse()
            loss_of(params, (0, 1), seed).backward()
            if isinstance(optimizer, BackwardFusedOptimizer):
                optimizer.fuse()
            loss_of(params, (1, 2), seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        twins.check(f"window {seed}")


def test_accumulated_and_fused_gradients_of_disjoint_parameters_make_one_round() -> None:
    twins = Twins(Counting)
    for seed in range(4):
        for params, optimizer in twins.each():
            loss_of(params, FULL if seed == 0 else (0, 1), seed).backward()
            if seed > 0:
                with accumulating(optimizer):
                    loss_of(params, (2, 3), seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        twins.check(f"window {seed}")


def test_accumulating_what_was_already_stepped_in_this_round_is_refused() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    for params, optimizer in twins.each():
        loss_of(params, (0, 1), 0).backward()
        with accumulating(optimizer):
            loss_of(params, (1, 2), 1).backward()
    with pytest.raises(RuntimeError, match="parameter 1 of group 0.*accumulate()"):
        twins.fused.step()


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
def test_what_backward_stepped_from_an_accumulation_counts_as_stepped(calls_step: bool) -> None:
    """Accumulated, applied at the end of another parameter's pass, and used again before the first step()."""
    twins = Twins(torch.optim.SGD, lr=0.1)
    params = twins.models[1]
    with twins.fused.accumulate():
        loss_of(params, (0,), 0).backward()
    loss_of(params, (1,), 1).backward()
    loss_of(params, (0,), 2).backward()
    if calls_step:
        with pytest.raises(RuntimeError, match="parameter 0 of group 0"):
            twins.fused.step()
