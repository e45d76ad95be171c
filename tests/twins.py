"""A plain optimizer and a fused one over equal parameters, and what it means that they are equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fused_optim import BackwardFusedOptimizer

SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (5,), (3, 2, 2), (1,))


def make_params(
    shapes: Iterable[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    """Parameters with reproducible values; called twice it gives equal ones."""
    generator = torch.Generator().manual_seed(seed)
    real = dtype.to_real() if dtype.is_complex else dtype
    params = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator).to(real)
        if dtype.is_complex:
            value = torch.complex(value, torch.randn(shape, generator=generator).to(real))
        params.append(torch.nn.Parameter(value))
    return params


def loss_of(params: Sequence[Tensor], used: Iterable[int], seed: int) -> Tensor:
    """A loss over the ``used`` parameters, whose gradient depends on their values and on ``seed``."""
    total = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(params):
        data = torch.randn(param.shape, generator=generator)
        if index in set(used):
            value = torch.view_as_real(param) if param.is_complex() else param
            data = torch.stack((data, -data), -1) if param.is_complex() else data
            total = total + (value * data.to(value.dtype)).double().sum() + 0.5 * value.double().square().sum()
    return total


def assert_equal(first: Any, second: Any, where: str = "") -> None:
    """Equal bit for bit: same kinds, dtypes, shapes and values, inside containers too; NaN equals NaN."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        assert isinstance(first, Tensor), where
        assert isinstance(second, Tensor), where
        assert (first.dtype, first.layout) == (second.dtype, second.layout), where
        assert torch.equal(_bits(first), _bits(second)), f"{where}: {first} != {second}"
        return
    assert type(first) is type(second), f"{where}: {first!r} is not of the type of {second!r}"
    if isinstance(first, dict):
        assert first.keys() == second.keys(), f"{where}: {first.keys()} != {second.keys()}"
        for key in first:
            assert_equal(first[key], second[key], f"{where}[{key!r}]")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for index, (one, other) in enumerate(zip(first, second)):
            assert_equal(one, other, f"{where}[{index}]")
    else:
        assert first == second or first != first, f"{where}: {first!r} != {second!r}"


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.nan_to_num(tensor, nan=12345.0) if tensor.is_floating_point() else tensor


def assert_twins(plain: Optimizer, fused: Optimizer, where: str = "") -> None:
    """Parameters, state, groups and state dicts of both optimizers are equal."""
    plain_params = [param for group in plain.param_groups for param in group["params"]]
    fused_params = [param for group in fused.param_groups for param in group["params"]]
    assert len(plain_params) == len(fused_params)
    for index, (one, other) in enumerate(zip(plain_params, fused_params)):
        assert_equal(one.data, other.data, f"{where} parameter {index}")
    assert_equal(plain.state_dict(), fused.state_dict(), f"{where} state_dict")


def assert_no_gradients(optimizer: Optimizer) -> None:
    """Every gradient was freed."""
    assert all(param.grad is None for group in optimizer.param_groups for param in group["params"])


class Counting(Optimizer):
    """Outside of torch.optim: divides its rate by a counter in the group, so that a round too many shows."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])


class Twins:
    """A plain and a fused optimizer that are given the same things to do.

    Args:
        optimizer_class: the class of both.
        shapes: of the parameters; each model has as many.
        group_by: turns the parameters into what the optimizer is given; by default the list itself.
        **kwargs: for the optimizers; options of the fused one go into ``options``.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        shapes: Iterable[tuple[int, ...]] = SHAPES,
        group_by: Callable[[list[torch.nn.Parameter]], Any] = list,
        dtype: torch.dtype = torch.float32,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        shapes = list(shapes)
        self.models = [make_params(shapes, dtype), make_params(shapes, dtype)]
        self.plain = optimizer_class(group_by(self.models[0]), **copy.deepcopy(kwargs))
        self.fused = BackwardFusedOptimizer(
            optimizer_class, group_by(self.models[1]), **(options or {}), **copy.deepcopy(kwargs)
        )

    def each(self) -> list[tuple[list[torch.nn.Parameter], Optimizer]]:
        """The parameters and the optimizer of both twins."""
        return [(self.models[0], self.plain), (self.models[1], self.fused)]

    def iterate(self, seed: int, used: Iterable[int] | None = None) -> None:
        """One ordinary iteration: zero_grad, backward, step."""
        for params, optimizer in self.each():
            optimizer.zero_grad()
            chosen = range(len(params)) if used is None else used
            if list(chosen):
                loss_of(params, chosen, seed).backward()
            optimizer.step()

    def check(self, where: str = "") -> None:
        """Both are equal."""
        assert_twins(self.plain, self.fused, where)
