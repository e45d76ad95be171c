"""One set of ranks for all distributed tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two ranks, started by the first test that uses them."""
    ranks = World(2)
    yield ranks
    ranks.close()
