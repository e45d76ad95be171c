"""Loss scaling: the same bits as a scaled ordinary loop, and the scaler's own books kept as usual."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from twins import Twins, assert_equal, assert_no_gradients, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

if not hasattr(torch.amp, "GradScaler"):
    pytest.skip("before 2.3 torch has no GradScaler for CPUs", allow_module_level=True)

FULL = range(4)
SCALE = 1000.0
"""No power of two: unscaling must round as it does ordinarily."""

CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"foreach": True}),
]
FUSED_OR_NOT = pytest.mark.parametrize("kernel", [False, True], ids=["unscaled apart", "kernel unscales"])


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(f"{key}={item}" for key, item in value.items())


def make_scaler(**kwargs: Any) -> Any:
    usual = {"init_scale": SCALE, "growth_factor": 1.7, "growth_interval": 3}
    return torch.amp.GradScaler("cpu", **{**usual, **kwargs})


class ScaledTwins(Twins):
    """Twins, each with a scaler of its own."""

    def __init__(self, optimizer_class: Any, scaler: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.scalers = [make_scaler(**(scaler or {})), make_scaler(**(scaler or {}))]
        options = {"grad_scaler": self.scalers[1], **kwargs.pop("options", {})}
        super().__init__(optimizer_class, options=options, **kwargs)

    def each_scaled(self) -> list[tuple[list[Any], Any, Any]]:
        return [(*twin, scaler) for twin, scaler in zip(self.each(), self.scalers)]

    def iterate(self, seed: int, used: Iterable[int] | None = None) -> None:
        for params, optimizer, scaler in self.each_scaled():
            scaler.scale(loss_of(params, FULL if used is None else used, seed)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def check(self, where: str = "") -> None:
        super().check(where)
        self.check_books(where)

    def check_books(self, where: str = "") -> None:
        assert_equal(*(scaler.state_dict() for scaler in self.scalers), f"{where} scaler")


def clip_ordinarily(params: Sequence[Tensor], max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, max_norm)


def power_of_two(kernel: bool) -> dict[str, Any]:
    """Ordinarily, too, a kernel that unscales rounds otherwise than unscale_() does, unless by a power of two."""
    return {"init_scale": 1024.0, "growth_factor": 2.0} if kernel else {}


def explode(params: Sequence[Tensor], index: int) -> Tensor:
    """A loss whose gradient is infinite for one parameter only."""
    return params[index].sum() * math.inf


@pytest.mark.parametrize("cap", [0, 1.0], ids=["alone", "in runs"])
@pytest.mark.parametrize(("optimizer_class", "kwargs"), CLASSES, ids=name_of)
def test_exact_while_nothing_overflows_and_the_scale_grows(
    optimizer_class: type[Optimizer], kwargs: dict[str, Any], cap: float
) -> None:
    twins = ScaledTwins(optimizer_class, options={"bucket_cap_mb": cap}, **kwargs)
    for seed in range(9):
        twins.iterate(seed, FULL if seed == 0 else [index for index in FULL if (index + seed) % 4])
        twins.check(f"iteration {seed}")
        assert_no_gradients(twins.fused)
    assert twins.scalers[1].get_scale() > SCALE * 1.7


@FUSED_OR_NOT
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_parameter_that_overflows_is_not_stepped_and_the_scale_drops(value: float, kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.SGD, lr=0.1, fused=kernel, options={"bucket_cap_mb": 0})
    plain, fused = twins.models
    twins.iterate(0)
    before = [param.detach().clone() for param in fused]
    for params, optimizer, scaler in twins.each_scaled():
        loss = loss_of(params, (0, 1, 3), 1) + params[2].sum() * value
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_equal(before[2], fused[2].detach())
    assert all(not torch.equal(before[index], fused[index]) for index in (0, 1, 3))
    assert_equal(before, [param.detach() for param in plain])
    twins.check_books()
    assert_no_gradients(twins.fused)
    for old, new in zip(plain, fused):
        new.data.copy_(old.data)
    for seed in range(2, 6):
        twins.iterate(seed)
        twins.check(f"iteration {seed}")


@FUSED_OR_NOT
def test_when_everything_overflows_the_whole_step_is_skipped(kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, lr=0.01, fused=kernel)
    twins.iterate(0)
    for seed in range(1, 4):
        for params, optimizer, scaler in twins.each_scaled():
            scaler.scale(loss_of(params, FULL, seed) * (math.inf if seed == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        # The ordinary fused kernel counts its step and takes it back; both leave the same state.
        twins.check(f"iteration {seed}")


@FUSED_OR_NOT
@pytest.mark.parametrize("options", [{}, {"track_grad_norm": True}], ids=["", "tracked"])
def test_unscale_by_the_user_is_harmless(options: dict[str, Any], kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, power_of_two(kernel), lr=0.01, fused=kernel, options=options)
    for seed in range(5):
        for params, optimizer, scaler in twins.each_scaled():
            scaler.scale(loss_of(params, FULL, seed)).backward()
            scaler.unscale_(optimizer)
            if options and optimizer is twins.plain:
                norm = clip_ordinarily(params, math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if options:
            assert_equal(norm, twins.fused.grad_norm)
        twins.check(f"iteration {seed}")


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
def test_a_disabled_scaler_changes_nothing(calls_step: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, scaler={"enabled": False}, lr=0.01)
    for seed in range(3):
        for params, optimizer, scaler in twins.each_scaled():
            scaler.scale(loss_of(params, FULL, seed)).backward()
            scaler.unscale_(optimizer)
            if calls_step or optimizer is twins.plain:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        twins.check(f"iteration {seed}")


@FUSED_OR_NOT
@pytest.mark.parametrize("overflow_at", [None, 0, 2], ids=["never", "first", "later"])
def test_clipping_finds_an_overflow_before_anything_is_stepped(overflow_at: int | None, kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, lr=0.01, fused=kernel, options={"bucket_cap_mb": 0})
    for seed in range(5):
        norms = []
        for params, optimizer, scaler in twins.each_scaled():
            loss = loss_of(params, FULL, seed)
            loss = scaler.scale(loss + explode(params, 2) if seed == overflow_at else loss)
            if optimizer is twins.fused:
                norms.append(optimizer.clip_grad_norm_(loss, 0.3))
            loss.backward()
            if optimizer is twins.plain:
                scaler.unscale_(optimizer)
                norms.append(clip_ordinarily(params, 0.3))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert_equal(*norms)
        if not (kernel and seed == overflow_at == 0):  # the ordinary kernel makes its (empty) state all the same
            twins.check(f"iteration {seed}")
        assert_no_gradients(twins.fused)


@FUSED_OR_NOT
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_accumulation(clips: bool, kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, lr=0.01, fused=kernel)
    windows = [[FULL, FULL, FULL], [(0, 1), (1, 2, 3), (0, 3)], [FULL], [FULL, (1, 2)]]
    for seed, window in enumerate(windows):
        norms = []
        for params, optimizer, scaler in twins.each_scaled():
            losses = [scaler.scale(loss_of(params, used, 9 * seed + n) / 3) for n, used in enumerate(window)]
            if optimizer is twins.plain:
                for loss in losses:
                    loss.backward()
                if clips:
                    scaler.unscale_(optimizer)
                    norms.append(clip_ordinarily(params, 0.3))
            else:
                for loss in losses[:-1]:
                    with optimizer.accumulate():
                        loss.backward()
                if clips:
                    norms.append(optimizer.clip_grad_norm_(losses[-1], 0.3))
                losses[-1].backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if clips:
            assert_equal(*norms)
        twins.check(f"window {seed}")


@FUSED_OR_NOT
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled by the user"])
def test_accumulated_to_the_end(unscales: bool, kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, lr=0.01, fused=kernel)
    for seed in range(4):
        for params, optimizer, scaler in twins.each_scaled():
            loss = scaler.scale(loss_of(params, FULL, seed) + (explode(params, 1) if seed == 2 else 0))
            if optimizer is twins.plain:
                loss.backward()
            else:
                with optimizer.accumulate():
                    loss.backward()
            if unscales:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(params, 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        twins.check(f"iteration {seed}")


@FUSED_OR_NOT
def test_some_pending_some_stepped_and_unscaled_by_the_user(kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, power_of_two(kernel), lr=0.01, fused=kernel)
    twins.iterate(0)
    for seed in range(1, 4):
        for params, optimizer, scaler in twins.each_scaled():
            first, second = (scaler.scale(loss_of(params, used, seed)) for used in ((0, 1), (2, 3)))
            if optimizer is twins.plain:
                first.backward()
            else:
                with optimizer.accumulate():
                    first.backward()
            second.backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        twins.check(f"iteration {seed}")


def test_hooks_see_unscaled_gradients() -> None:
    twins = ScaledTwins(torch.optim.AdamW, lr=0.01, fused=True)
    seen: dict[int, Tensor] = {}
    twins.fused.register_param_step_pre_hook(lambda _, param: seen.update({id(param): param.grad.clone()}))
    for params, optimizer, scaler in twins.each_scaled():
        scaler.scale(loss_of(params, FULL, 0)).backward()
        scaler.unscale_(optimizer)
    assert_equal([param.grad for param in twins.models[0]], [seen[id(param)] for param in twins.models[1]])


def test_a_scaler_state_dict_carries_over_to_another_run() -> None:
    first = ScaledTwins(torch.optim.AdamW, lr=0.01)
    for seed in range(4):
        first.iterate(seed)
    second = ScaledTwins(torch.optim.AdamW, scaler={"init_scale": 7.0}, lr=0.01)
    for old, new in zip(first.models, second.models):
        for source, target in zip(old, new):
            target.data.copy_(source.data)
    second.plain.load_state_dict(first.fused.state_dict())
    second.fused.load_state_dict(first.plain.state_dict())
    second.scalers[0].load_state_dict(first.scalers[1].state_dict())
    second.scalers[1].load_state_dict(first.scalers[0].state_dict())
    for seed in range(4, 8):
        second.iterate(seed)
        second.check(f"iteration {seed}")


@pytest.mark.parametrize("wanted", ["nothing", "unscale_", "step"])
def test_scaled_gradients_without_grad_scaler_are_an_error(wanted: str) -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    scaler = make_scaler()
    scaler.scale(loss_of(twins.models[1], FULL, 0)).backward()
    if wanted != "nothing":
        if wanted == "unscale_":
            scaler.unscale_(twins.fused)
        with pytest.raises(RuntimeError, match="BackwardFusedOptimizer\\(..., grad_scaler=scaler\\)"):
            scaler.step(twins.fused)


def test_scaled_gradients_without_grad_scaler_would_have_diverged() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1)
    scaler = make_scaler()
    for params in twins.models:
        scaler.scale(loss_of(params, FULL, 0)).backward()
    scaler.step(twins.plain)
    assert not torch.equal(twins.models[0][0], twins.models[1][0])


def test_two_optimizers_share_a_scaler() -> None:
    first = ScaledTwins(torch.optim.AdamW, lr=0.01)
    second = ScaledTwins(torch.optim.SGD, lr=0.1, options={"grad_scaler": first.scalers[1]})
    for seed in range(5):
        for which, scaler in enumerate(first.scalers):
            for twins in (first, second):
                params, optimizer = twins.each()[which]
                overflow = explode(params, 0) if seed == 2 and twins is first else 0
                loss = scaler.scale(loss_of(params, FULL, seed) + overflow)
                if optimizer is twins.fused:
                    optimizer.clip_grad_norm_(loss, 0.3)
                loss.backward()
                if optimizer is twins.plain:
                    scaler.unscale_(optimizer)
                    clip_ordinarily(params, 0.3)
            for optimizer in (twins.each()[which][1] for twins in (first, second)):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        first.check(f"iteration {seed}")
        Twins.check(second, f"iteration {seed}")


@FUSED_OR_NOT
def test_an_overflow_found_while_clipping_skips_one_backward_of_a_loop_without_step(kernel: bool) -> None:
    twins = ScaledTwins(torch.optim.AdamW, power_of_two(kernel), lr=0.01, fused=kernel)
    for seed in range(6):
        for params, optimizer, scaler in twins.each_scaled():
            loss = scaler.scale(loss_of(params, FULL, seed) + (explode(params, 2) if seed in (0, 3) else 0))
            clips = seed in (0, 3, 5)
            if clips and optimizer is twins.fused:
                optimizer.clip_grad_norm_(loss, 0.3)
            loss.backward()
            if optimizer is twins.plain:
                scaler.unscale_(optimizer)
                clip_ordinarily(params, 0.3 if clips else math.inf)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        if not (kernel and seed == 0):
            twins.check(f"iteration {seed}")


def test_the_scaler_holds_no_parameter_after_update() -> None:
    twins = ScaledTwins(torch.optim.AdamW, lr=0.01)
    twins.iterate(0)
    assert not twins.scalers[1]._per_optimizer_states


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "in backward"])
def test_scaler_calls_step_after_an_overflow_no_more_than_it_does_for_the_ordinary_optimizer(measured: bool) -> None:
    """A framework that counts the calls holds the schedule back when there was none."""
    calls: dict[str, list[int]] = {"plain": [], "fused": []}
    for kind in calls:
        params = make_params()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        options: dict[str, Any] = {"grad_scaler": scaler} if kind == "fused" else {}
        build = BackwardFusedOptimizer if kind == "fused" else lambda cls, *args, **kwargs: cls(*args, **kwargs)
        opt = build(torch.optim.SGD, params, lr=0.1, **options)
        opt.register_step_post_hook(lambda *_, kind=kind: calls[kind].append(1))
        for seed in range(4):
            opt.zero_grad()
            factor = 2.0**20 if seed % 2 else 2.0**-110
            loss = scaler.scale(loss_of(params, range(len(params)), seed).float() * factor)
            if measured and kind == "fused":
                opt.clip_grad_norm_(loss, 1.0)
            loss.backward()
            if measured and kind == "plain":
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(opt)
            scaler.update()
    assert calls["plain"] == calls["fused"]
    assert 0 < len(calls["plain"]) < 4
