"""Loss scaling: what a ``GradScaler`` sees of a run of parameters that is stepped inside backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class ScaledRun:
    """Looks like an optimizer to a ``GradScaler``, so that the scaler itself unscales, checks and counts.

    The scaler remembers what it saw by the identity of this object until its ``update()``: it must be kept
    alive as long.
    """

    def __init__(self, params: list[Tensor], step: Callable[[], None]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]
        self.stepped = False
        self._step = step

    def step(self) -> None:
        """Called by ``GradScaler.step`` if no gradient of the run is infinite or NaN."""
        self.stepped = True
        self._step()

    def release(self) -> None:
        """Lets go of the parameters; the identity stays."""
        self.param_groups = []


class KernelScaledRun(ScaledRun):
    """A run of an optimizer whose kernel unscales and checks by itself (``fused=True``)."""

    _step_supports_amp_scaling = True

    def __init__(self, params: list[Tensor], step: Callable[[], None], optimizer: Any) -> None:
        super().__init__(params, step)
        self._optimizer = optimizer

    def step(self) -> None:
        """Called by ``GradScaler.step``, which has put ``grad_scale`` and ``found_inf`` on this object."""
        self.stepped = True
        lend_scale(self, self._optimizer, self._step)


def lend_scale(source: Any, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Calls ``step`` while ``optimizer`` has the scale and the flag that the scaler put on ``source``."""
    optimizer.grad_scale, optimizer.found_inf = source.grad_scale, source.found_inf
    try:
        return step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
