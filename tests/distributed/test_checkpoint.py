"""torch.distributed.checkpoint: what either optimizer saves the other one loads, and training goes on."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import (
    Net,
    batches,
    contents,
    equal,
    fused_adamw,
    groups_of,
    loss_of,
    outcome,
    plain_adamw,
    train,
)
from world import World

from fused_optim import BackwardFusedOptimizer

if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("public fully_shard came with torch 2.6", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard  # noqa: E402

MAKE = {"plain": plain_adamw, "fused": fused_adamw}
PAIRS = [(saver, loader) for saver in MAKE for loader in MAKE]
OPTIONS = {
    "default": {},
    "full": {"full_state_dict": True},
    "flat": {"flatten_optimizer_state_dict": True},
}


def model_of(sharded: bool) -> Any:
    model = Net()
    if sharded:
        for layer in (model.first, model.second):
            fully_shard(layer)
        fully_shard(model)
    return model


def trained(kind: str, sharded: bool, rank: int = 0) -> tuple[Any, Any]:
    model = model_of(sharded)
    opt = MAKE[kind](groups_of(model))
    train(model, opt, batches(rank), iterations=3)
    return model, opt


def fresh(kind: str, sharded: bool) -> tuple[Any, Any]:
    model = model_of(sharded)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model, MAKE[kind](groups_of(model))


def check_goes_on(rank: int, first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    assert equal(outcome(*first), outcome(*second))
    for model, opt in (first, second):
        train(model, opt, batches(rank, seed=1), iterations=3)
    assert equal(outcome(*first), outcome(*second))


def through_state_dict(rank: int, saver: str, loader: str, sharded: bool, options: str, together: bool) -> None:
    chosen = StateDictOptions(**OPTIONS[options])
    model, opt = trained(saver, sharded, rank)
    other_model, other = fresh(loader, sharded)
    if together:
        weights, state = get_state_dict(model, opt, options=chosen)
        set_state_dict(other_model, other, model_state_dict=weights, optim_state_dict=state, options=chosen)
    else:
        weights = get_model_state_dict(model, options=chosen)
        state = get_optimizer_state_dict(model, opt, options=chosen)
        set_model_state_dict(other_model, weights, options=chosen)
        set_optimizer_state_dict(other_model, other, state, options=chosen)
    check_goes_on(rank, trained("plain", sharded, rank), (other_model, other))


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_sharded_state_dicts(world: World, saver: str, loader: str, together: bool, options: str) -> None:
    world.run(through_state_dict, saver, loader, True, options, together)


def between_wrapped_and_sharded(rank: int, saver: str, loader: str) -> None:
    full = StateDictOptions(full_state_dict=True)
    net = Net()
    opt = MAKE[saver](groups_of(net))
    wrapped = DistributedDataParallel(net)
    train(wrapped, opt, batches(rank), iterations=3)
    # Copies, as loading shares tensors such as "step" with the state dict.
    weights, state = copy.deepcopy(get_state_dict(wrapped, opt, options=full))
    model, other = fresh(loader, True)
    set_state_dict(model, other, model_state_dict=weights, optim_state_dict=state, options=full)
    back, final = fresh(saver, False)
    weights, state = copy.deepcopy(get_state_dict(model, other, options=full))
    set_state_dict(back, final, model_state_dict=weights, optim_state_dict=state, options=full)
    del wrapped
    gc.collect()
    check_goes_on(rank, (net, opt), (back, final))


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_from_a_wrapped_model_to_a_sharded_one_and_back(world: World, saver: str, loader: str) -> None:
    world.run(between_wrapped_and_sharded, saver, loader)


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_state_dicts_of_one_process(saver: str, loader: str, together: bool, options: str) -> None:
    through_state_dict(0, saver, loader, False, options, together)


def save(rank: int, kind: str, path: str) -> Any:
    model, opt = trained(kind, True, rank)
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, opt, options=full)


def load(model: nn.Module, opt: torch.optim.Optimizer, path: str) -> None:
    weights, state = get_state_dict(model, opt)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def load_sharded(rank: int, saver: str, loader: str, path: str) -> None:
    model, opt = fresh(loader, True)
    load(model, opt, path)
    check_goes_on(rank, trained("plain", True, rank), (model, opt))


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_saved_by_two_ranks(world: World, tmp_path: Path, saver: str, loader: str) -> None:
    saved = world.run(save, saver, str(tmp_path))
    world.run(load_sharded, saver, loader, str(tmp_path))
    # One process alone takes up what two ranks have left.
    model, opt = fresh(loader, False)
    load(model, opt, str(tmp_path))
    twin, plain = fresh("plain", False)
    set_state_dict(twin, plain, model_state_dict=saved[0][0], optim_state_dict=saved[0][1])
    check_goes_on(0, (twin, plain), (model, opt))


SGD = {"lr": 0.1, "weight_decay": 0.5}


def initialised(rank: int, stateless: bool, sharded: bool, calls_step: bool) -> None:
    model, twin = model_of(sharded), model_of(sharded)
    if stateless:
        opt: Any = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), **SGD)
        plain: Any = torch.optim.SGD(twin.parameters(), **SGD)
    else:
        opt, plain = fused_adamw(model.parameters()), plain_adamw(twin.parameters())
    for rounds in (0, 2):
        train(model, opt, batches(rank), iterations=rounds, calls_step=calls_step)
        train(twin, plain, batches(rank), iterations=rounds)
        before = outcome(model, opt)["weights"]
        state = get_optimizer_state_dict(model, opt)
        after = outcome(model, opt)
        assert equal(before, after["weights"])
        assert all(grad is None for grad in after["gradients"])
        assert equal(contents(state), contents(get_optimizer_state_dict(twin, plain)))
    train(model, opt, batches(rank, seed=1), iterations=3, calls_step=calls_step)
    train(twin, plain, batches(rank, seed=1), iterations=3)
    assert equal(outcome(twin, plain), outcome(model, opt))


@pytest.mark.parametrize(("stateless", "calls_step"), [(False, True), (False, False), (True, True)])
def test_initialising_state_moves_no_weight(world: World, stateless: bool, calls_step: bool) -> None:
    initialised(0, stateless, False, calls_step)
    world.run(initialised, stateless, True, calls_step)


def test_a_stateless_optimizer_in_a_loop_without_step_is_refused() -> None:
    # get_optimizer_state_dict() calls step() with gradients of zeros whenever there is no state, and here
    # that reads like the end of a round of several gradients.
    model = model_of(False)
    opt = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), **SGD)
    train(model, opt, batches(0), iterations=2, calls_step=False)
    before = outcome(model, opt)["weights"]
    with pytest.raises(RuntimeError, match=r"opt.step\(\)"):
        get_optimizer_state_dict(model, opt)
    assert equal(before, outcome(model, opt)["weights"])


def mid_accumulation(rank: int) -> None:
    model = model_of(True)
    opt = fused_adamw(model.parameters())
    with opt.accumulate():
        loss_of(model, next(batches(rank))).backward()
    before = outcome(model, opt)
    get_optimizer_state_dict(model, opt)
    assert equal(before["weights"], outcome(model, opt)["weights"])
    assert equal(before["gradients"], outcome(model, opt)["gradients"])


def test_pending_gradients_survive(world: World) -> None:
    world.run(mid_accumulation)
