"""fully_shard and replicate_with_fsdp: the same bits as the ordinary optimizer on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from training import (
    ITERATIONS,
    Net,
    accumulating,
    batches,
    equal,
    fused_adamw,
    groups_of,
    local,
    loss_of,
    outcome,
    plain_adamw,
    train,
)
from world import World

from fused_optim import BackwardFusedOptimizer

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("public fully_shard came with torch 2.6", allow_module_level=True)
replicating = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")

KINDS = ["fully_shard", "replicate"]


def shard(kind: str, model: nn.Module, **options: Any) -> Any:
    """What users do: every layer, then the model."""
    wrap = fsdp.fully_shard if kind == "fully_shard" else replicating.replicate
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model.first, model.second, model.third):
        wrap(layer, mesh=mesh, **options)
    return wrap(model, mesh=mesh, **options)


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    yield
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)


def skip_alternately(iteration: int) -> bool:
    return iteration % 3 == 1


def compare(rank: int, kind: str, options: dict[str, Any], loop: dict[str, Any], calls_step: bool = True) -> None:
    no_sync = loop.pop("no_sync", False)
    mixed = options.pop("mixed", False)
    opt_options = options.pop("opt", {})
    recompute = options.pop("recompute", None)
    if mixed:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outcomes = []
    for make in (plain_adamw, fused_adamw):
        model = shard(kind, Net(recompute), **options)
        opt = make(groups_of(model), **opt_options)
        not_last = (lambda model=model: without_sync(model)) if no_sync else (lambda opt=opt: accumulating(opt))
        train(
            model,
            opt,
            batches(rank),
            not_last=not_last,
            calls_step=calls_step or make is plain_adamw,
            **loop,
        )
        outcomes.append(outcome(model, opt))
    assert all(grad is None for grad in outcomes[1]["gradients"])
    assert equal(*outcomes), "the fused optimizer took another path than the ordinary one"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({}, {}),
        ({"mixed": True}, {}),
        ({"opt": {"fused": True}}, {}),
        ({"opt": {"foreach": True, "amsgrad": True}}, {}),
        ({}, {"micro_batches": 3}),
        ({}, {"micro_batches": 3, "no_sync": True}),
        ({"mixed": True}, {"micro_batches": 2, "no_sync": True}),
        ({}, {"skip_third": skip_alternately}),
        ({"recompute": False}, {}),
        ({"recompute": True}, {}),
    ],
)
def test_same_bits(world: World, kind: str, options: dict[str, Any], loop: dict[str, Any]) -> None:
    world.run(compare, kind, options, loop)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", [{}, {"micro_batches": 3, "no_sync": True}, {"micro_batches": 3}])
def test_same_bits_in_a_loop_that_never_calls_step(world: World, kind: str, loop: dict[str, Any]) -> None:
    world.run(compare, kind, {}, loop, False)


def frees_each_gradient(rank: int, kind: str) -> int:
    model = shard(kind, Net())
    # During backward the modules hold the gathered parameters.
    sharded = list(model.parameters())
    opt = fused_adamw(sharded, bucket_cap_mb=0)
    most = 0

    def count(_: Any, param: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(other.grad is not None for other in sharded))

    opt.register_param_step_pre_hook(count)
    train(model, opt, batches(rank), iterations=2)
    return most


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_freed_one_by_one(world: World, kind: str) -> None:
    assert world.run(frees_each_gradient, kind) == [1, 1]


def clipped(rank: int, kind: str, norm_type: float) -> None:
    plain_model, model = shard(kind, Net()), shard(kind, Net())
    plain, opt = plain_adamw(plain_model.parameters()), fused_adamw(model.parameters())
    data, same_data = batches(rank), batches(rank)
    for _ in range(ITERATIONS):
        loss_of(plain_model, next(data)).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 0.5, norm_type)
        plain.step()
        plain.zero_grad()

        loss = loss_of(model, next(same_data))
        norm = opt.clip_grad_norm_(loss, 0.5, norm_type)
        loss.backward()
        opt.step()
        assert torch.equal(whole(expected), whole(norm))
        assert equal(outcome(plain_model, plain), outcome(model, opt))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_by_the_measured_norm(world: World, kind: str, norm_type: float) -> None:
    world.run(clipped, kind, norm_type)


def one_root_clipped(rank: int, kind: str) -> None:
    # No input of the module requires a gradient, so the graph holds no function of FSDP's.
    wrap = fsdp.fully_shard if kind == "fully_shard" else replicating.replicate
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = wrap(nn.Linear(8, 8), mesh=mesh)
        params = list(model.parameters())
        opt = fused_adamw(params) if fused else plain_adamw(params)
        loss = loss_of(model, next(batches(rank)))
        measured = opt.clip_grad_norm_(loss, 0.5) if isinstance(opt, BackwardFusedOptimizer) else None
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5) if measured is None else measured
        opt.step()
        results.append([whole(norm), *(local(param) for param in params)])
    assert equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_one_root(world: World, kind: str) -> None:
    world.run(one_root_clipped, kind, seconds=60)


def clipped_by_torch(rank: int, kind: str) -> None:
    results = []
    for make in (plain_adamw, fused_adamw):
        model = shard(kind, Net())
        opt = make(model.parameters())
        data = batches(rank)
        for _ in range(ITERATIONS):
            with accumulating(opt):
                loss_of(model, next(data)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        results.append(outcome(model, opt))
    assert equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_torch(world: World, kind: str) -> None:
    world.run(clipped_by_torch, kind)


def tracked(rank: int, kind: str) -> None:
    plain_model, model = shard(kind, Net()), shard(kind, Net())
    opt = fused_adamw(model.parameters(), track_grad_norm=True)
    batch = next(batches(rank))
    loss_of(plain_model, batch).backward()
    loss_of(model, batch).backward()
    opt.step()
    expected = torch.nn.utils.get_total_norm([param.grad for param in plain_model.parameters()])
    assert opt.grad_norm is not None
    assert torch.equal(whole(expected), whole(opt.grad_norm))


@pytest.mark.parametrize("kind", KINDS)
def test_tracked_norm(world: World, kind: str) -> None:
    world.run(tracked, kind)


def built_too_early(rank: int, kind: str) -> None:
    model = Net()
    opt = fused_adamw(model.parameters())
    shard(kind, model)
    before = [local(param) for param in model.parameters()]
    loss_of(model, next(batches(rank))).backward()
    with pytest.warns(UserWarning, match=r"replaced .* fully_shard.* build the optimizer after"):
        opt.step()
    assert equal(before, [local(param) for param in model.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_built_before_sharding_says_so(world: World, kind: str) -> None:
    world.run(built_too_early, kind)


def taken_over(rank: int, kind: str) -> None:
    results = []
    for fused in (False, True):
        model = shard(kind, Net())
        opt: torch.optim.Optimizer = plain_adamw(groups_of(model))
        train(model, opt, batches(rank), iterations=3)
        if fused:
            opt = BackwardFusedOptimizer.from_optimizer(opt)
        train(model, opt, batches(rank, seed=1), iterations=4)
        results.append(outcome(model, opt))
    assert equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_taking_over_in_mid_training(world: World, kind: str) -> None:
    world.run(taken_over, kind)
