"""What all tests of frameworks share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from distributed.world import World


@pytest.fixture(scope="module", autouse=True)
def _cheap_garbage_collection() -> Iterator[None]:
    """The frameworks collect garbage a lot; without their own modules to look through it takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two ranks, started by the first test that uses them."""
    ranks = World(2)
    yield ranks
    ranks.close()
