"""``opt.clip_grad_norm_`` against ``torch.nn.utils.clip_grad_norm_`` and an ordinary step: the same bits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from twins import Twins, assert_equal, assert_no_gradients, assert_twins, loss_of

from fused_optim import BackwardFusedOptimizer

ORDERS = [1.0, 2.0, 3.0, 0.5, float("inf")]


class Net(nn.Module):
    """Dropout, a checkpointed block, several shapes, a tied weight."""

    def __init__(self, reentrant: bool | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.head = nn.Linear(8, 6, dtype=dtype)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.dropout(torch.tanh(self.stem(x)), 0.2, True)
        run: Callable[..., Tensor] = self.block
        x = run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        x = self.head(x.to(self.head.weight.dtype)).float()
        return (x @ self.stem.weight.t()).square().mean()


Pair = list[tuple[nn.Module, Optimizer]]


def pair(
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    model: nn.Module | None = None,
    group_by: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Pair:
    plain = Net() if model is None else model
    fused = copy.deepcopy(plain)
    kwargs = kwargs or {"lr": 0.02}
    return [
        (plain, optimizer_class(group_by(plain), **kwargs)),
        (fused, BackwardFusedOptimizer(optimizer_class, group_by(fused), **(options or {}), **kwargs)),
    ]


def loss_on(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(torch.randn(4, 6) * (1 + 5 * (seed % 2)))
    return loss


def clipped(optimizer: Optimizer, model: nn.Module, loss: Tensor, max_norm: float, **how: Any) -> Tensor:
    """Clips and runs backward, in the order that each kind of optimizer wants."""
    if isinstance(optimizer, BackwardFusedOptimizer):
        norm = optimizer.clip_grad_norm_(loss, max_norm, **how)
        loss.backward()
        return norm
    loss.backward()
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, **how)


def total_norm(params: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(params, float("inf"))


def check(twins: Pair, norms: list[Tensor]) -> None:
    assert_equal(*norms)
    assert_twins(twins[0][1], twins[1][1])
    assert_no_gradients(twins[1][1])


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["stored", "checkpoint", "reentrant"])
@pytest.mark.parametrize("norm_type", ORDERS)
def test_norm_and_weights_are_exact(norm_type: float, reentrant: bool | None, calls_step: bool) -> None:
    twins = pair(model=Net(reentrant))
    for seed in range(4):
        norms = []
        for model, optimizer in twins:
            loss = loss_on(model, seed)
            norms.append(clipped(optimizer, model, loss, 0.1, norm_type=norm_type))
            if calls_step or optimizer is twins[0][1]:
                optimizer.step()
            optimizer.zero_grad()
        check(twins, norms)


def test_a_large_limit_clips_nothing_and_infinity_is_allowed() -> None:
    twins = pair(torch.optim.SGD, lr=0.1, momentum=0.9)
    for seed, max_norm in enumerate([1e6, float("inf"), 1e-3]):
        norms = []
        for model, optimizer in twins:
            norms.append(clipped(optimizer, model, loss_on(model, seed), max_norm))
            optimizer.step()
            optimizer.zero_grad()
        check(twins, norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm_type", ORDERS)
def test_mixed_dtypes(norm_type: float, dtype: torch.dtype) -> None:
    twins = pair(torch.optim.SGD, Net(dtype=dtype), lr=0.1)
    for seed in range(3):
        norms = []
        for model, optimizer in twins:
            norms.append(clipped(optimizer, model, loss_on(model, seed), 0.1, norm_type=norm_type))
            optimizer.step()
            optimizer.zero_grad()
        check(twins, norms)


def weights_and_the_rest(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1][::-1]},
        {"params": [param for param in params if param.ndim <= 1], "lr": 0.005},
    ]


def test_several_groups_add_up_in_the_order_that_is_given() -> None:
    twins = pair(group_by=weights_and_the_rest)
    for seed in range(4):
        norms = []
        for model, optimizer in twins:
            how = {"parameters": model.parameters()} if optimizer is twins[1][1] else {}
            norms.append(clipped(optimizer, model, loss_on(model, seed), 0.1, **how))
            optimizer.step()
            optimizer.zero_grad()
        check(twins, norms)


def test_parameters_must_be_those_of_the_optimizer() -> None:
    (_, _), (model, optimizer) = pair()
    with pytest.raises(ValueError, match="must be the 8 parameters of this optimizer"):
        optimizer.clip_grad_norm_(loss_on(model, 0), 1.0, parameters=[model.stem.weight])
    with pytest.raises(TypeError, match="loss must be a tensor"):
        optimizer.clip_grad_norm_(1.0, 1.0)


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("last_used", [(0, 1, 2, 3), (1, 2)], ids=["all", "some"])
def test_the_sum_of_accumulated_gradients_is_clipped(last_used: tuple[int, ...], calls_step: bool) -> None:
    twins = Twins(torch.optim.AdamW, lr=0.02)
    for seed in range(4):
        plain, fused = twins.models
        for number, used in enumerate([(0, 1, 3), (0, 2)]):
            loss_of(plain, used, 10 * seed + number).backward()
            with twins.fused.accumulate():
                loss_of(fused, used, 10 * seed + number).backward()
        loss_of(plain, last_used, seed).backward()
        expected = nn.utils.clip_grad_norm_(plain, 0.5)
        loss = loss_of(fused, last_used, seed)
        assert_equal(expected, twins.fused.clip_grad_norm_(loss, 0.5))
        loss.backward()
        twins.plain.step()
        twins.plain.zero_grad()
        if calls_step:
            twins.fused.step()
            twins.fused.zero_grad()
        twins.check(f"window {seed}")
        assert_no_gradients(twins.fused)


def test_zeros_of_zero_grad_are_clipped_as_well() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1, momentum=0.9)
    for seed in range(6):
        used = range(4) if seed == 0 else (seed % 4, (seed + 1) % 4)
        norms = []
        for params, optimizer in twins.each():
            loss = loss_of(params, used, seed)
            if optimizer is twins.fused:
                norms.append(optimizer.clip_grad_norm_(loss, 0.5))
            loss.backward()
            if optimizer is twins.plain:
                norms.append(nn.utils.clip_grad_norm_(params, 0.5))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert_equal(*norms)
        twins.check(f"iteration {seed}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_error_if_nonfinite_raises_before_anything_is_changed(value: float) -> None:
    twins = Twins(torch.optim.AdamW, lr=0.02)
    twins.iterate(0)
    loss = loss_of(twins.models[1], range(4), 1) * value
    with pytest.raises(RuntimeError, match="total norm of order 2.0.*error_if_nonfinite=False"):
        twins.fused.clip_grad_norm_(loss, 1.0, error_if_nonfinite=True)
    twins.check("after the error")
    for seed in range(3):
        twins.iterate(seed)
    twins.check("afterwards")


@pytest.mark.parametrize("norm_type", ORDERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_norm_spreads_as_it_ordinarily_does(value: float, norm_type: float) -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    norms = []
    for params, optimizer in twins.each():
        loss = loss_of(params, (0, 1, 2), 0) + loss_of(params, (3,), 0) * value
        if optimizer is twins.fused:
            norms.append(optimizer.clip_grad_norm_(loss, 1.0, norm_type))
        loss.backward()
        if optimizer is twins.plain:
            norms.append(nn.utils.clip_grad_norm_(params, 1.0, norm_type))
        optimizer.step()
    assert_equal(*norms)
    twins.check()


def test_parameters_without_gradient_do_not_count() -> None:
    twins = Twins(torch.optim.AdamW, lr=0.02)
    for seed in range(3):
        norms = []
        for params, optimizer in twins.each():
            loss = loss_of(params, (seed, 3), seed)
            if optimizer is twins.fused:
                norms.append(optimizer.clip_grad_norm_(loss, 0.3))
            loss.backward()
            if optimizer is twins.plain:
                norms.append(nn.utils.clip_grad_norm_(params, 0.3))
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(*norms)
        twins.check(f"iteration {seed}")


def test_the_clip_holds_for_one_round_only() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    for seed in range(4):
        for params, optimizer in twins.each():
            loss = loss_of(params, range(4), seed)
            if optimizer is twins.fused and seed % 2:
                optimizer.clip_grad_norm_(loss, 0.3)
            loss.backward()
            if optimizer is twins.plain and seed % 2:
                nn.utils.clip_grad_norm_(params, 0.3)
            optimizer.step()
            optimizer.zero_grad()
        twins.check(f"iteration {seed}")


def test_measuring_without_backward_is_an_error_and_changes_nothing() -> None:
    twins = Twins(torch.optim.AdamW, lr=0.02)
    twins.iterate(0)
    twins.fused.clip_grad_norm_(loss_of(twins.models[1], range(4), 1), 0.1)
    with pytest.raises(RuntimeError, match="only measures: call loss.backward"):
        twins.fused.step()
    assert_no_gradients(twins.fused)
    for seed in range(3):
        twins.iterate(seed)
    twins.check("afterwards")


def test_measuring_again_replaces_the_first_measure() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    loss = loss_of(twins.models[1], range(4), 0)
    twins.fused.clip_grad_norm_(loss_of(twins.models[1], range(4), 1), 1e-3)
    second = twins.fused.clip_grad_norm_(loss, 0.5)
    loss.backward()
    twins.fused.step()
    loss_of(twins.models[0], range(4), 0).backward()
    assert_equal(nn.utils.clip_grad_norm_(twins.models[0], 0.5), second)
    twins.plain.step()
    twins.check()


def test_the_graph_is_freed_by_the_backward_that_applies() -> None:
    (_, _), (model, optimizer) = pair()
    loss = loss_on(model, 0)
    optimizer.clip_grad_norm_(loss, 1.0)
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_failing_backward_while_measuring_leaves_gradients_as_they_were() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    twins.iterate(0)
    params = twins.models[1]
    with twins.fused.accumulate():
        loss_of(params, range(4), 1).backward()
    before = [param.grad.clone() for param in params]
    broken = loss_of(params, range(4), 2)
    hook = params[1].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        twins.fused.clip_grad_norm_(broken, 1.0)
    hook.remove()
    assert_equal(before, [param.grad for param in params])
    twins.fused.zero_grad()
    twins.iterate(3)
    twins.check()


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
def test_track_grad_norm_reports_the_norm_before_clipping(calls_step: bool) -> None:
    twins = pair(options={"track_grad_norm": True})
    fused = twins[1][1]
    assert fused.grad_norm is None
    for seed in range(4):
        norms = []
        for model, optimizer in twins:
            loss = loss_on(model, seed)
            if seed < 2:
                loss.backward()
                norms += [total_norm(model.parameters())] if optimizer is not fused else []
            else:
                norms.append(clipped(optimizer, model, loss, 0.1))
            if calls_step or optimizer is not fused:
                optimizer.step()
            optimizer.zero_grad()
        assert_equal(norms[0], fused.grad_norm)
        assert_twins(twins[0][1], fused)


def test_track_grad_norm_covers_accumulated_and_disjoint_gradients_of_a_round() -> None:
    """From the first round on, when it is not yet known that the loop calls step()."""
    twins = Twins(torch.optim.SGD, lr=0.1, options={"track_grad_norm": True})
    for seed in range(3):
        for params, optimizer in twins.each():
            if optimizer is twins.fused:
                with optimizer.accumulate():
                    loss_of(params, (0, 1), seed).backward()
            else:
                loss_of(params, (0, 1), seed).backward()
            loss_of(params, (1, 2), seed).backward()
            loss_of(params, (3,), seed).backward()
        expected = total_norm(twins.models[0])
        for _, optimizer in twins.each():
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(expected, twins.fused.grad_norm)


def clip_each_by_value(params: Any) -> None:
    nn.utils.clip_grad_value_(params, 0.01)


def clip_each_by_norm(params: Any) -> None:
    for param in params:
        nn.utils.clip_grad_norm_([param], 0.05)


@pytest.mark.parametrize("clip", [clip_each_by_value, clip_each_by_norm])
def test_clipping_parameter_by_parameter_in_a_hook(clip: Callable[[Any], None]) -> None:
    twins = pair()
    twins[1][1].register_param_step_pre_hook(lambda optimizer, param: clip([param]))
    for seed in range(4):
        for model, optimizer in twins:
            loss_on(model, seed).backward()
            if optimizer is twins[0][1]:
                clip(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1])


def test_sparse_gradients_are_clipped_in_a_hook() -> None:
    twins = pair(torch.optim.SGD, nn.Embedding(10, 3, sparse=True), lr=0.1)
    for model, optimizer in twins:

        def scale(optimizer: Any, param: Tensor) -> None:
            param.grad.mul_(0.5)

        if optimizer is twins[1][1]:
            optimizer.register_param_step_pre_hook(scale)
        for step in range(3):
            model(torch.tensor([step, 3, 3])).square().sum().backward()
            if optimizer is twins[0][1]:
                scale(optimizer, model.weight)
            optimizer.step()
            optimizer.zero_grad()
    assert_twins(twins[0][1], twins[1][1])


def test_sparse_gradients_get_the_norm_of_the_ordinary_clipping_or_its_error() -> None:
    twins = pair(torch.optim.SGD, nn.Embedding(10, 3, sparse=True), lr=0.1)
    outcomes: list[Any] = []
    for model, optimizer in twins:
        try:
            loss = model(torch.tensor([1, 3, 3])).square().sum()
            outcomes.append(clipped(optimizer, model, loss, 0.1))
            optimizer.step()
        except (RuntimeError, NotImplementedError) as error:
            outcomes.append(type(error).__name__)
    assert_equal(*outcomes)
    assert_twins(twins[0][1], twins[1][1])


@pytest.mark.skipif(
    "foreach" not in inspect.signature(nn.utils.clip_grad_norm_).parameters, reason="this torch has no choice"
)
def test_the_norm_is_the_same_for_both_implementations_of_torch() -> None:
    twins = pair()
    norms = []
    for foreach in (True, False):
        model, _ = twins[0]
        loss_on(model, 0).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=foreach))
        model.zero_grad()
    assert_equal(norms[0], twins[1][1].clip_grad_norm_(loss_on(twins[1][0], 0), 1e9))
    assert_equal(*norms)


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
def test_gradients_are_never_held_together(calls_step: bool) -> None:
    (_, _), (model, optimizer) = pair(options={"bucket_cap_mb": 0})
    held: list[int] = []
    for param in model.parameters():
        param.register_hook(lambda grad: held.append(sum(p.grad is not None for p in model.parameters())))
    for seed in range(2):
        loss = loss_on(model, seed)
        optimizer.clip_grad_norm_(loss, 0.1)
        loss.backward()
        if calls_step:
            optimizer.step()
    assert max(held) <= 1
