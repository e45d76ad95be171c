"""DistributedDataParallel: the same bits as the ordinary optimizer on every rank, however it is set up."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from training import (
    ITERATIONS,
    Net,
    accumulating,
    batches,
    equal,
    fused_adamw,
    groups_of,
    loss_of,
    outcome,
    plain_adamw,
    ranks_agree,
    train,
)
from world import World

from fused_optim import BackwardFusedOptimizer, distributed

SMALL_BUCKETS = {"bucket_cap_mb": 0.001}
ORDERS = ["wrapped first", "optimizer first"]


def build(order: str, fused: bool, recompute: bool | None = None, **options: Any) -> tuple[Any, Any]:
    make = fused_adamw if fused else plain_adamw
    model = Net(recompute)
    if order == "optimizer first":
        opt = make(groups_of(model))
        return DistributedDataParallel(model, **{**SMALL_BUCKETS, **options}), opt
    wrapped = DistributedDataParallel(model, **{**SMALL_BUCKETS, **options})
    return wrapped, make(groups_of(model))


def compare(rank: int, order: str, options: dict[str, Any], loop: dict[str, Any], **extra: Any) -> None:
    no_sync = loop.pop("no_sync", False)
    outcomes = []
    for fused in (False, True):
        wrapped, opt = build(order, fused, **options)
        for hook in extra.get("comm_hooks", ()):
            wrapped.register_comm_hook(None, hook)
        calls_step = not fused or extra.get("calls_step", True)
        not_last = wrapped.no_sync if no_sync else lambda opt=opt: accumulating(opt)
        train(wrapped, opt, batches(rank), not_last=not_last, calls_step=calls_step, **loop)
        outcomes.append(outcome(wrapped, opt))
    plain, other = outcomes
    assert all(grad is None for grad in other["gradients"])
    assert equal(plain, other), "the fused optimizer took another path than the ordinary one"
    assert ranks_agree(other["weights"])


def skip_alternately(iteration: int) -> bool:
    return iteration % 3 == 1


def skip_on_first_rank(iteration: int) -> bool:
    return iteration % 3 == 1 or (iteration % 3 == 2 and dist.get_rank() == 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({}, {}),
        ({}, {"micro_batches": 3, "no_sync": True}),
        ({}, {"micro_batches": 3}),
        ({"static_graph": True}, {}),
        ({"static_graph": True, "find_unused_parameters": True}, {}),
        ({"find_unused_parameters": True}, {"skip_third": skip_alternately}),
        ({"find_unused_parameters": True}, {"skip_third": skip_on_first_rank}),
        (
            {"find_unused_parameters": True},
            {"skip_third": skip_on_first_rank, "micro_batches": 2, "no_sync": True},
        ),
        ({"recompute": True}, {}),
        ({"recompute": True, "static_graph": True}, {}),
        ({"recompute": False}, {}),
    ],
)
def test_same_bits(world: World, order: str, view: bool, options: dict[str, Any], loop: dict[str, Any]) -> None:
    world.run(compare, order, {**options, "gradient_as_bucket_view": view}, loop)


def without_step(rank: int, order: str, loop: dict[str, Any]) -> None:
    compare(rank, order, {"find_unused_parameters": True}, loop, calls_step=False)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "loop",
    [{"skip_third": skip_on_first_rank}, {"micro_batches": 3, "no_sync": True}, {"micro_batches": 2}],
)
def test_same_bits_in_a_loop_that_never_calls_step(world: World, order: str, loop: dict[str, Any]) -> None:
    world.run(without_step, order, loop)


def with_comm_hook(rank: int, order: str, view: bool) -> None:
    compare(rank, order, {"gradient_as_bucket_view": view}, {}, comm_hooks=[fp16_compress_hook])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("view", [False, True])
def test_a_users_communication_hook_is_kept(world: World, order: str, view: bool) -> None:
    world.run(with_comm_hook, order, view)


def unreduced(rank: int, order: str) -> bool:
    with mock.patch.object(distributed.Reducers, "around", return_value={}):
        wrapped, opt = build(order, fused=True)
        train(wrapped, opt, batches(rank), calls_step=False)
        weights = outcome(wrapped, opt)["weights"]
        wrapped, opt = build(order, fused=True)
        with pytest.raises(RuntimeError, match="second gradient"):
            train(wrapped, opt, batches(rank))
    twin, plain = build(order, fused=False)
    train(twin, plain, batches(rank))
    return equal(outcome(twin, plain)["weights"], weights)


@pytest.mark.parametrize("order", ORDERS)
def test_without_looking_for_reducers_training_differs(world: World, order: str) -> None:
    assert world.run(unreduced, order) == [False, False]


def stepped_with_the_reducer(rank: int, too_early: bool) -> bool:
    at_once = mock.patch.object(distributed, "after_reducers", lambda callback: callback)
    with at_once if too_early else nullcontext():
        wrapped, opt = build("wrapped first", fused=True)
        train(wrapped, opt, batches(rank), iterations=1, calls_step=False)
        return ranks_agree(outcome(wrapped, opt)["weights"])


def test_a_callback_of_a_callback_comes_after_the_reducers(world: World) -> None:
    assert world.run(stepped_with_the_reducer, True) == [False, False]
    assert world.run(stepped_with_the_reducer, False) == [True, True]


class Pair(nn.Module):
    """Two wrapped models, one after the other, in one backward pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.front = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), **options)
        self.back = DistributedDataParallel(Net(), find_unused_parameters=True)
        self.alone = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, skip_third: bool = False) -> torch.Tensor:
        return self.alone(self.back(self.front(x), skip_third))  # type: ignore[no-any-return]


def several_modules(rank: int, static: bool) -> None:
    results = []
    for make in (plain_adamw, fused_adamw):
        torch.manual_seed(1)
        pair = Pair(static_graph=static)
        opt = make(pair.parameters())
        train(pair, opt, batches(rank), skip_third=skip_on_first_rank)
        results.append(outcome(pair, opt))
    assert equal(*results)


@pytest.mark.parametrize("static", [False, True])
def test_several_wrapped_models_and_a_bare_one(world: World, static: bool) -> None:
    world.run(several_modules, static)


def two_optimizers(rank: int) -> None:
    results = []
    for make in (plain_adamw, fused_adamw):
        wrapped = DistributedDataParallel(Net(), find_unused_parameters=True)
        thirds = list(wrapped.module.third.parameters())
        others = [param for param in wrapped.parameters() if not any(param is third for third in thirds)]
        opts = [make(others), make(thirds)]
        data = batches(rank)
        for iteration in range(ITERATIONS):
            loss_of(wrapped, next(data), skip_on_first_rank(iteration)).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        results.append([outcome(wrapped, opt) for opt in opts])
    assert equal(*results)


def test_two_optimizers_share_a_wrapped_model(world: World) -> None:
    world.run(two_optimizers)


def rank_without_hooks(rank: int, calls_step: bool) -> bool:
    wrapped = DistributedDataParallel(Net(), find_unused_parameters=True)
    opt = fused_adamw(wrapped.module.third.parameters())
    data = batches(rank)
    for _ in range(3):
        loss_of(wrapped, next(data), rank == 0 and calls_step).backward()
        if calls_step:
            opt.step()
            opt.zero_grad()
    return ranks_agree(outcome(wrapped, opt)["weights"])


def refused_without_step(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"Call opt.step\(\)"):
        rank_without_hooks(rank, False)


def test_a_rank_that_uses_none_of_the_parameters_needs_step(world: World) -> None:
    assert world.run(rank_without_hooks, True) == [True, True]
    world.run(refused_without_step)


def wrapped_late(rank: int) -> None:
    results = []
    for make in (plain_adamw, fused_adamw):
        model = Net()
        opt = make(model.parameters())
        train(model, opt, batches(rank, seed=1), iterations=2)
        wrapped = DistributedDataParallel(model)
        train(wrapped, opt, batches(rank), iterations=3)
        del wrapped
        gc.collect()
        train(model, opt, batches(rank, seed=2), iterations=2)
        results.append(outcome(model, opt))
        assert fused_steps_in_hooks(model, opt, next(batches(rank))) == isinstance(opt, BackwardFusedOptimizer)
    assert equal(*results)


def fused_steps_in_hooks(model: nn.Module, opt: torch.optim.Optimizer, batch: torch.Tensor) -> bool:
    loss_of(model, batch).backward()
    stepped = all(param.grad is None for param in model.parameters())
    opt.step()
    opt.zero_grad()
    return stepped


def test_wrapped_in_the_middle_of_training_and_unwrapped_again(world: World) -> None:
    world.run(wrapped_late)


def copied(rank: int) -> None:
    wrapped, opt = build("wrapped first", fused=True)
    train(wrapped, opt, batches(rank), iterations=2)
    opt_first, wrapped_last = copy.deepcopy((opt, wrapped))
    twin, plain = build("wrapped first", fused=False)
    train(twin, plain, batches(rank), iterations=2)
    for model, optimizer in ((wrapped, opt), (wrapped_last, opt_first), (twin, plain)):
        train(model, optimizer, batches(rank, seed=1))
    assert equal(outcome(twin, plain), outcome(wrapped, opt))
    assert equal(outcome(twin, plain), outcome(wrapped_last, opt_first))


def test_a_copy_of_model_and_optimizer(world: World) -> None:
    world.run(copied)


def clipped(rank: int, order: str) -> None:
    results = []
    for fused in (False, True):
        wrapped, opt = build(order, fused)
        data = batches(rank)
        for _ in range(ITERATIONS):
            with accumulating(opt):
                loss_of(wrapped, next(data)).backward()
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), max_norm=0.5)
            opt.step()
            opt.zero_grad()
        results.append(outcome(wrapped, opt))
    assert equal(*results)
    before = outcome(wrapped, opt)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel .* torch.nn.utils.clip_grad_norm_"):
        opt.clip_grad_norm_(loss_of(wrapped, next(data)), max_norm=0.5)
    assert equal(before, outcome(wrapped, opt))


@pytest.mark.parametrize("order", ORDERS)
def test_clipping_by_torch_is_exact_and_the_measuring_pass_is_refused(world: World, order: str) -> None:
    world.run(clipped, order)


def scaled(rank: int) -> None:
    results = []
    for fused in (False, True):
        wrapped, plain_or_fused = Net(), None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        extra = {"grad_scaler": scaler} if fused else {}
        plain_or_fused = (fused_adamw if fused else plain_adamw)(wrapped.parameters(), **extra)
        wrapped = DistributedDataParallel(wrapped)
        data = batches(rank)
        for _ in range(ITERATIONS):
            scaler.scale(loss_of(wrapped, next(data))).backward()
            scaler.step(plain_or_fused)
            scaler.update()
            plain_or_fused.zero_grad()
        results.append({**outcome(wrapped, plain_or_fused), "scale": scaler.get_scale()})
    assert equal(*results)


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch.amp.GradScaler came with torch 2.3")
def test_scaled_losses(world: World) -> None:
    world.run(scaled)


def reduced_seen_by_hooks(rank: int) -> list[torch.Tensor]:
    wrapped, opt = build("optimizer first", fused=True)
    seen: list[torch.Tensor] = []
    opt.register_param_step_pre_hook(lambda _, param: seen.append(param.grad.clone()))
    loss_of(wrapped, next(batches(rank))).backward()
    opt.step()
    assert len(seen) == len(list(wrapped.parameters()))
    return seen


def test_step_hooks_see_reduced_gradients(world: World) -> None:
    assert equal(*world.run(reduced_seen_by_hooks))


def one_rank(rank: int) -> None:
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    results = []
    for fused in (False, True):
        wrapped, opt = build("optimizer first", fused, process_group=groups[rank])
        train(wrapped, opt, batches(rank))
        results.append(outcome(wrapped, opt))
    assert equal(*results)


def test_a_group_of_one_rank(world: World) -> None:
    world.run(one_rank)


def composable(rank: int) -> None:
    replicate = pytest.importorskip("torch.distributed._composable.replicate").replicate
    results = []
    for make in (plain_adamw, fused_adamw):
        model = Net()
        opt = make(model.parameters())
        replicate(model)
        train(model, opt, batches(rank))
        results.append(outcome(model, opt))
    assert equal(*results)
    assert ranks_agree(results[1]["weights"])


def test_composable_replicate(world: World) -> None:
    world.run(composable)


def flat_sharded(rank: int, order: str, keeps_params: bool) -> None:
    sharding = pytest.importorskip("torch.distributed.fsdp")
    wrap = sharding.FullyShardedDataParallel
    model: nn.Module = Net()
    options = {"use_orig_params": keeps_params, "device_id": torch.device("cpu")}
    if order == "wrapped first":
        model = wrap(model, **options)
        with pytest.raises(ValueError, match=r"fully_shard\(\)"):
            fused_adamw(model.parameters())
        return
    opt = fused_adamw(model.parameters())
    model = wrap(model, **options)
    before = [param.detach().clone() for param in model.parameters()]
    loss_of(model, next(batches(rank))).backward()
    refused = pytest.raises(ValueError, match=r"fully_shard\(\)")
    with refused if keeps_params else pytest.warns(UserWarning, match="fully_shard"):
        opt.step()
    assert equal(before, [param.detach() for param in model.parameters()])


@pytest.mark.skipif(torch.__version__ < "2.6", reason="FullyShardedDataParallel came to CPUs later")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("keeps_params", [True, False])
def test_fsdp1_is_refused(world: World, order: str, keeps_params: bool) -> None:
    world.run(flat_sharded, order, keeps_params)
