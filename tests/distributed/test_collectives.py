"""Collectives are recognised before they run, on one rank alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import World

from fused_optim._collectives import refuse_collectives

TRIED: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "async": lambda x: dist.all_reduce(x, async_op=True),
    "all_gather": lambda x: dist.all_gather([x.clone(), x.clone()], x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "barrier": lambda x: dist.barrier(),
    "object": lambda x: dist.all_gather_object([None, None], 1),
    "isend": lambda x: dist.isend(x, 0),
}


def refused(rank: int) -> None:
    # Only one rank tries: a collective that ran would wait for the other one.
    if rank == 0:
        return
    for collective in TRIED.values():
        with pytest.raises(ValueError, match="Muon communicates between the ranks"), refuse_collectives("Muon"):
            collective(torch.ones(3))


def refused_though_swallowed(rank: int) -> None:
    with pytest.raises(ValueError, match="communicates"), refuse_collectives("Muon"):
        with contextlib.suppress(Exception):
            dist.all_reduce(torch.ones(3))


def left_alone(rank: int) -> float:
    with refuse_collectives("Adam"):
        total = torch.ones(3) * dist.get_world_size()
    with pytest.raises(KeyError), refuse_collectives("Adam"):
        raise KeyError("of the class itself")
    dist.all_reduce(total)
    return float(total[0])


def test_no_collective_runs_and_each_is_recognised(world: World) -> None:
    world.run(refused, seconds=60)


def test_an_error_that_a_class_swallows_is_not_lost(world: World) -> None:
    world.run(refused_though_swallowed, seconds=60)


def test_what_does_not_communicate_is_left_alone(world: World) -> None:
    assert world.run(left_alone, seconds=60) == [4.0, 4.0]
