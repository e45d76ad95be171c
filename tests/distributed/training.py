"""A small model and the training loops that plain and fused optimizers go through on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_optim import BackwardFusedOptimizer

ITERATIONS = 7
Build = Callable[..., torch.optim.Optimizer]


class Net(nn.Module):
    """Four layers, of which the third can be left out; the second can be recomputed in backward."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self._recompute = recompute

    def forward(self, x: Tensor, skip_third: bool = False) -> Tensor:
        x = self.first(x).relu()
        if self._recompute is None:
            x = self.second(x).relu()
        else:
            x = checkpoint(lambda x: self.second(x).relu(), x, use_reentrant=self._recompute)
        if not skip_third:
            x = self.third(x).relu()
        return self.last(x)  # type: ignore[no-any-return]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that differ in weight decay."""
    weights = [param for param in model.parameters() if param.ndim > 1]
    biases = [param for param in model.parameters() if param.ndim <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def plain_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, **options)


def fused_adamw(params: Any, **options: Any) -> BackwardFusedOptimizer:
    return BackwardFusedOptimizer(torch.optim.AdamW, params, lr=1e-2, **options)


def batches(rank: int, seed: int = 0, rows: int = 6) -> Iterator[Tensor]:
    """Endless batches, other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield torch.randn(rows, 8, generator=generator)


def loss_of(model: nn.Module, batch: Tensor, *args: Any) -> Tensor:
    return model(batch, *args).square().sum()  # type: ignore[no-any-return]


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    data: Iterator[Tensor],
    *,
    micro_batches: int = 1,
    not_last: Callable[[], Any] = nullcontext,
    skip_third: Callable[[int], bool] | None = None,
    calls_step: bool = True,
    before_step: Callable[[], None] = lambda: None,
    iterations: int = ITERATIONS,
) -> None:
    """The loop that users write, with a schedule; without ``step()`` if ``calls_step`` is False.

    Args:
        not_last: context of every micro-batch but the last of an iteration.
        skip_third: tells by iteration whether the third layer goes unused.
    """
    rates = [1e-2 / (1 + iteration) for iteration in range(iterations)]
    for iteration, rate in enumerate(rates):
        for group in opt.param_groups:
            group["lr"] = rate
        for micro_batch in range(micro_batches):
            with nullcontext() if micro_batch == micro_batches - 1 else not_last():
                extra = () if skip_third is None else (skip_third(iteration),)
                loss_of(model, next(data), *extra).backward()
        before_step()
        if calls_step:
            opt.step()
            opt.zero_grad()


def local(value: Any) -> Any:
    """This rank's part of a tensor, detached."""
    part = value.to_local() if hasattr(value, "to_local") else value
    return part.detach().clone()


def contents(value: Any) -> Any:
    """A copy of nested containers, with this rank's part of every tensor."""
    if isinstance(value, Tensor):
        return local(value)
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    return [contents(item) for item in value] if isinstance(value, (list, tuple)) else value


def outcome(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, gradients and optimizer state after training, on this rank."""
    gradients = [None if param.grad is None else local(param.grad) for param in model.parameters()]
    weights = [local(param) for param in model.parameters()]
    return {"weights": weights, "gradients": gradients, "optimizer": contents(opt.state_dict())}


def equal(first: Any, second: Any) -> bool:
    """Whether two outcomes are the same bits."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def ranks_agree(weights: list[Tensor]) -> bool:
    """Whether all ranks hold the same weights."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, weights)
    return all(equal(everywhere[0], other) for other in everywhere)


@contextmanager
def accumulating(opt: torch.optim.Optimizer) -> Iterator[None]:
    """``opt.accumulate()`` for both kinds of optimizer."""
    with opt.accumulate() if isinstance(opt, BackwardFusedOptimizer) else nullcontext():
        yield
