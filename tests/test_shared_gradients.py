"""A gradient whose memory still flows on is written only by its owner; steps run as step() would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import assert_equal

from fused_optim import BackwardFusedOptimizer

Params = list[nn.Parameter]


def params_with_position() -> Params:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (3, 8), (8, 2))]


def loss_of(params: Params) -> Tensor:
    weight, position, head = params
    inputs = torch.linspace(-1, 1, 24).view(1, 3, 8)
    return ((inputs @ weight + position.unsqueeze(0)) @ head).square().sum()


def clamps(optimizer: Any, param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("bucket_cap_mb", [0, 1.0])
def test_a_hook_that_writes_a_gradient_writes_nobody_elses(bucket_cap_mb: float) -> None:
    plain, fused = params_with_position(), params_with_position()
    ordinary = torch.optim.SGD(plain, lr=0.01)
    optimizer = BackwardFusedOptimizer(torch.optim.SGD, fused, lr=0.01, bucket_cap_mb=bucket_cap_mb)
    optimizer.register_param_step_pre_hook(clamps)
    for _ in range(3):
        ordinary.zero_grad()
        loss_of(plain).backward()
        nn.utils.clip_grad_value_(plain, 0.01)
        ordinary.step()
        optimizer.zero_grad()
        loss_of(fused).backward()
        optimizer.step()
    assert_equal(plain, fused)


@pytest.mark.parametrize("flags", [{}, {"foreach": True}])
def test_clipping_writes_nobody_elses_gradient(flags: dict[str, Any]) -> None:
    plain, fused = params_with_position(), params_with_position()
    ordinary = torch.optim.SGD(plain, lr=0.01, **flags)
    optimizer = BackwardFusedOptimizer(torch.optim.SGD, fused, lr=0.01, bucket_cap_mb=0, **flags)
    for _ in range(3):
        ordinary.zero_grad()
        loss_of(plain).backward()
        norm = nn.utils.clip_grad_norm_(plain, 0.5)
        ordinary.step()
        optimizer.zero_grad()
        loss = loss_of(fused)
        assert_equal(norm, optimizer.clip_grad_norm_(loss, 0.5))
        loss.backward()
        optimizer.step()
    assert_equal(plain, fused)


def with_autocast(backward: Callable[[], None]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward()


def with_another_dtype(backward: Callable[[], None]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        backward()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("around", [with_autocast, with_another_dtype])
def test_a_step_runs_in_the_surroundings_of_step(around: Callable[[Callable[[], None]], None]) -> None:
    plain, fused = params_with_position(), params_with_position()
    ordinary = torch.optim.Adam(plain, lr=0.01)
    optimizer = BackwardFusedOptimizer(torch.optim.Adam, fused, lr=0.01)
    for _ in range(2):
        for params, each in ((plain, ordinary), (fused, optimizer)):
            each.zero_grad()
            around(loss_of(params).backward)
            each.step()
    assert_equal(plain, fused)
    steps = [
        [each.state[param]["step"] for param in params] for params, each in ((plain, ordinary), (fused, optimizer))
    ]
    assert [step.dtype for step in steps[0]] == [step.dtype for step in steps[1]]
