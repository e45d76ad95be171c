"""What a framework needs to run on a rank of :class:`distributed.world.World`, and what a rank sends home."""

from __future__ import annotations

import functools
import os
from typing import Any

from accelerate.state import AcceleratorState, GradientState
from tiny_gpt2 import Outcome
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from twins import assert_equal


def forget_accelerators() -> None:
    """Accelerate keeps its state in singletons, which a second Accelerator of a process would inherit."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def join(rank: int) -> None:
    """The environment that ``accelerate launch`` would set."""
    forget_accelerators()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        NODE_RANK="0",
        ACCELERATE_USE_CPU="true",
    )


def sent(run: Outcome) -> dict[str, Any]:
    """What can be sent home of a run."""
    whole = functools.partial(tree_map_only, DTensor, DTensor.full_tensor)
    return {
        "weights": whole([param.detach().clone() for param in run.model.parameters()]),
        "state_dict": whole(run.optimizer.state_dict()),
        "losses": run.losses,
        "rates": run.rates,
        "held": run.held,
    }


def assert_same_ranks(plain: list[dict[str, Any]], fused: list[dict[str, Any]]) -> None:
    """Every rank of the fused run has what the same rank of the plain one has, and all have the same weights."""
    for one, other in zip(plain, fused):
        for key in ("weights", "state_dict", "losses", "rates"):
            assert_equal(one[key], other[key], key)
        assert all(one["held"])
    assert_equal(fused[0]["weights"], fused[1]["weights"])
