"""Random numbers drawn in a step: who draws in another order gets other bits, and must be told."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

WATCHED_STEPS = 64
"""So many first steps are watched: after them, an optimizer that never drew is not expected to begin."""


def random_states() -> list[Any]:
    """The states of the generators of torch (CPU), Python and, if it is in use, NumPy."""
    states: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states.append((state[0], state[1].tolist(), *state[2:]))
    return states


def restore(states: list[Any]) -> None:
    """Puts all generators back to ``states``."""
    torch.set_rng_state(torch.tensor(states[0], dtype=torch.uint8))
    random.setstate(states[1])
    if len(states) > 2:
        sys.modules["numpy"].random.set_state(states[2])


def warn_of_draws(optimizer_class: type[Optimizer]) -> None:
    """Says that a class draws random numbers in its step."""
    warnings.warn(
        f"{optimizer_class.__name__} draws random numbers in step(): stepped inside backward(), parameters draw in "
        "another order than in an ordinary step. The distribution is the same, the bits are not.",
        stacklevel=2,
    )


class RandomWatch:
    """Watches the first steps for draws that tiny probe parameters did not provoke; warns once."""

    def __init__(self, optimizer_class: type[Optimizer], warned: bool = False) -> None:
        self._optimizer_class = optimizer_class
        self._left = 0 if warned else WATCHED_STEPS

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compares the generators around a step."""
        if self._left <= 0:
            yield
            return
        self._left -= 1
        before = random_states()
        yield
        if random_states() != before:
            self._left = 0
            warn_of_draws(self._optimizer_class)
