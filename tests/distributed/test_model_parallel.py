"""Tensor parallelism and pipelines: the same bits as the ordinary optimizer, or an error."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import Net, batches, equal, fused_adamw, groups_of, outcome, plain_adamw, train
from world import World

tensor = pytest.importorskip("torch.distributed.tensor")
if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("public fully_shard came with torch 2.6", allow_module_level=True)

from torch.distributed import pipelining  # noqa: E402
from torch.distributed._composable.replicate_with_fsdp import replicate  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

MESHES = {"tensor": None, "sequence": None, "data x tensor": (1, 2), "sharded x tensor": (2, 1)}


class Normed(Net):
    """Net with a normalization in front, whose weight is replicated and gets partial gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, skip_third: bool = False) -> torch.Tensor:
        return super().forward(self.norm(x), skip_third)


def parallelize(how: str) -> nn.Module:
    model = Normed()
    plan: dict[str, Any] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    if how == "sequence":
        split = tensor.Shard(0)
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            **plan,
            "first": ColwiseParallel(input_layouts=split),
        }
    if MESHES[how] is None:
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    mesh = init_device_mesh("cpu", MESHES[how], mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], plan)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])  # type: ignore[no-any-return]


def tensor_parallel(rank: int, how: str) -> None:
    results = []
    for make in (plain_adamw, fused_adamw):
        model = parallelize(how)
        opt = make(groups_of(model))
        train(model, opt, batches(rank if how == "sharded x tensor" else 0))
        results.append(outcome(model, opt))
    assert all(grad is None for grad in results[1]["gradients"])
    assert equal(*results)


@pytest.mark.parametrize("how", list(MESHES))
def test_tensor_parallel(world: World, how: str) -> None:
    world.run(tensor_parallel, how)


MICRO_BATCHES = 4
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}


SHARDING = {"fully_shard": fully_shard, "replicate": replicate}


class Pipeline:
    """This rank's part of a pipeline of linear layers.

    Args:
        schedule: name of the schedule.
        sharding: what shards its stages, over one rank each; None for bare ones.
    """

    def __init__(self, rank: int, schedule: str, sharding: str | None) -> None:
        each = SCHEDULES[schedule]
        size = dist.get_world_size()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(size * each)]
        places = [rank + size * turn for turn in range(each)]
        if schedule == "ZBVZeroBubble":
            places = [rank, 2 * size - 1 - rank]
        self.model = nn.ModuleList(layers[place] for place in places)
        if sharding is not None:
            mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pipeline", "data"))
            for layer in self.model:
                SHARDING[sharding](layer, mesh=mesh["data"])
        stages = [
            pipelining.PipelineStage(layer, place, len(layers), torch.device("cpu"))
            for layer, place in zip(self.model, places)
        ]
        self._first = any(stage.is_first for stage in stages)
        self._last = any(stage.is_last for stage in stages)
        make = getattr(pipelining, f"Schedule{schedule}")
        self._schedule = make(stages if each > 1 else stages[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._schedule.step(*([inputs] if self._first else []), **({"target": targets} if self._last else {}))


def run_pipeline(rank: int, schedule: str, sharding: str | None, kind: str, iterations: int = 4) -> dict[str, Any]:
    pipeline = Pipeline(rank, schedule, sharding)
    opt = (plain_adamw if kind == "plain" else fused_adamw)(pipeline.model.parameters())
    data = batches(0, rows=8)
    for _ in range(iterations):
        with opt.accumulate() if kind == "accumulating" else nullcontext():  # type: ignore[attr-defined]
            pipeline.step(next(data), next(data))
        opt.step()
        opt.zero_grad()
    return outcome(pipeline.model, opt)


def pipelines(rank: int, schedule: str, sharding: str | None, kind: str) -> None:
    assert equal(run_pipeline(rank, schedule, sharding, "plain"), run_pipeline(rank, schedule, sharding, kind))


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("sharding", [None, *SHARDING])
def test_pipelines_inside_accumulate(world: World, schedule: str, sharding: str | None) -> None:
    world.run(pipelines, schedule, sharding, "accumulating")


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("sharding", list(SHARDING))
def test_sharded_pipelines_are_exact_by_themselves(world: World, schedule: str, sharding: str) -> None:
    world.run(pipelines, schedule, sharding, "fused")


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_pipelines_without_accumulate_raise(schedule: str) -> None:
    world = World(2)
    outcomes = world.outcomes(run_pipeline, schedule, None, "fused", 1, grace=3)
    world.close()
    assert any("with opt.accumulate():" in str(error) for _, error in outcomes), outcomes
