"""Surroundings: what is in force around ``step()`` and changes what it computes.

``backward()`` may be called under others: inside autocast, with another default dtype. A fused step runs in those
of ``step()``, which are taken to be those in which the optimizer was built, until its first ``step()`` tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

_default_device: Callable[[], Any] = getattr(torch, "get_default_device", lambda: None)


def _asks_autocast() -> dict[str, Callable[[], bool]]:
    try:
        torch.is_autocast_enabled("cpu")
    except TypeError:  # one function a device, in old releases
        return {"cpu": torch.is_autocast_cpu_enabled, "cuda": torch.is_autocast_enabled}
    kinds = {"cpu", "cuda"}
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is not None:
        kinds.add(accelerator.type)
    return {kind: partial(torch.is_autocast_enabled, kind) for kind in sorted(kinds)}


_autocast_asks = _asks_autocast()


class Surroundings(NamedTuple):
    """What a step computes under.

    Attributes:
        autocast: the kinds of device on which operations are cast.
        inference: whether tensors are made without a version.
        dtype: of new tensors for which none is given.
        device: of new tensors for which none is given.
        threads: so many share the work of an operation on the CPU, which decides how sums are rounded.
    """

    autocast: tuple[str, ...]
    inference: bool
    dtype: torch.dtype
    device: Any
    threads: int

    @classmethod
    def current(cls) -> Surroundings:
        """Those of the caller."""
        return cls(
            tuple(kind for kind, ask in _autocast_asks.items() if ask()),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            _default_device(),
            torch.get_num_threads(),
        )

    @contextlib.contextmanager
    def restored(self, now: Surroundings) -> Iterator[None]:
        """Puts these in the place of those of the caller, ``now``, for a while."""
        with contextlib.ExitStack() as stack:
            for kind in {*now.autocast, *self.autocast}:
                stack.enter_context(torch.autocast(kind, enabled=kind in self.autocast))
            if now.inference != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
                stack.enter_context(torch.no_grad())
            if now.device != self.device:
                stack.enter_context(torch.device(self.device))
            if now.dtype != self.dtype:
                stack.callback(torch.set_default_dtype, now.dtype)
                torch.set_default_dtype(self.dtype)
            if now.threads != self.threads:
                stack.callback(torch.set_num_threads, now.threads)
                torch.set_num_threads(self.threads)
            yield
