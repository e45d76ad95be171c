"""Runs one and the same training program with an ordinary optimizer and with a fused one, and compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from twins import assert_equal

from fused_optim import BackwardFusedOptimizer

Make = Callable[..., Optimizer]
"""An optimizer class, or what stands in for one."""
Program = Callable[[Make], Iterator[Any]]
"""Trains with an optimizer from ``Make`` and yields what must be equal: models, optimizers, tensors."""


class CountsInTheGroup(Optimizer):
    """SGD in the style of optimizers published elsewhere: its counter lives in the group, decay grows with it."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.mul_(1 - 1 / (1 + group["step"])).add_(param.grad)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean, alpha=group["lr"])
        return loss


OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.05),
    "counter": partial(CountsInTheGroup, lr=0.05),
}
"""One without state at first, one with a step in its state, one with a step in its group."""


def fused(make: Make, **options: Any) -> Make:
    """What stands in for ``make``, an optimizer class or a partial of one."""
    if isinstance(make, partial):
        return partial(BackwardFusedOptimizer, make.func, *make.args, **make.keywords, **options)
    return partial(BackwardFusedOptimizer, make, **options)


def record(program: Program, make: Make) -> list[Any]:
    """Everything that ``program`` yields, as it was at that moment."""
    torch.manual_seed(0)
    return [copy.deepcopy(_plain_values(item)) for item in program(make)]


def assert_same_run(program: Program, make: Make, **options: Any) -> None:
    """The program gives the same bits with an ordinary and with a fused optimizer."""
    ordinary, ours = record(program, make), record(program, fused(make, **options))
    assert len(ordinary) == len(ours) > 0
    for number, (expected, found) in enumerate(zip(ordinary, ours)):
        assert_equal(expected, found, f"yielded {number}")


def _plain_values(item: Any) -> Any:
    if isinstance(item, Optimizer):
        params = [param for group in item.param_groups for param in group["params"]]
        return [_plain_values(params), item.state_dict()]
    if isinstance(item, torch.nn.Module):
        return dict(item.state_dict())
    if isinstance(item, torch.Tensor):
        return item.detach()
    return [_plain_values(each) for each in item] if isinstance(item, (list, tuple)) else item
