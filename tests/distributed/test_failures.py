"""What goes wrong on one rank is an error on every rank, in time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Net, batches, equal, fused_adamw, loss_of, outcome, plain_adamw, ranks_agree, train
from world import COLLECTIVE_SECONDS, World

LIMIT = COLLECTIVE_SECONDS + 30


def shard(kind: str, model: nn.Module) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    return fsdp.fully_shard(model)


KINDS = ["ddp"] + (["fully_shard"] if torch.__version__ >= "2.6" else [])


def differing(rank: int, kind: str) -> None:
    model = Net()
    if rank == 1:
        model.third = nn.Linear(16, 16, bias=False)
    model = shard(kind, model)
    train(model, fused_adamw(model.parameters()), batches(rank), iterations=2)


def dying(rank: int, kind: str) -> None:
    model = shard(kind, Net())
    params = list(model.parameters())
    opt = fused_adamw(params)
    train(model, opt, batches(rank), iterations=2)
    if rank == 1 and kind == "ddp":
        params[2].register_hook(lambda _: os._exit(3))
    elif rank == 1:
        opt.register_param_step_pre_hook(lambda *_: os._exit(3))
    train(model, opt, batches(rank), iterations=2)


def failing_once(rank: int) -> None:
    results = []
    for make in (plain_adamw, fused_adamw):
        net = Net()
        wrapped: nn.Module = DistributedDataParallel(net)
        opt = make(net.parameters())
        train(wrapped, opt, batches(rank), iterations=2)
        handle = net.first.weight.register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(wrapped, next(batches(rank))).backward()
        handle.remove()
        opt.zero_grad()
        del wrapped
        gc.collect()
        train(DistributedDataParallel(net), opt, batches(rank, seed=1))
        results.append(outcome(net, opt))
    assert equal(*results)
    assert ranks_agree(results[1]["weights"])


def ready(rank: int) -> None:
    """Nothing but proof that the ranks are there: importing torch is not to count."""


@pytest.mark.parametrize("scenario", [differing, dying])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_raises(scenario: Any, kind: str) -> None:
    world = World(2)
    world.run(ready)
    started = time.monotonic()
    outcomes = world.outcomes(scenario, kind, seconds=LIMIT, grace=COLLECTIVE_SECONDS)
    world.close()
    errors = [error for _, error in outcomes]
    assert all(errors), outcomes
    assert "did not answer in time" not in errors
    assert time.monotonic() - started < LIMIT
    if scenario is dying:
        assert errors[1] == "died with exit code 3"
        assert "Error" in str(errors[0])


def test_training_goes_on_after_an_error_in_backward(world: World) -> None:
    world.run(failing_once)


def fails_on_one_rank(rank: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    torch.distributed.barrier()


def test_the_launcher_shows_errors_of_any_rank_and_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    world = World(2)
    with pytest.raises(AssertionError, match="only here") as caught:
        world.run(fails_on_one_rank, grace=0.5)
    assert "rank 0: did not answer in time" in str(caught.value)
    assert set(multiprocessing.active_children()) <= before
