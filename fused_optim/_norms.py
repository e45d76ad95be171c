"""Global gradient norms, collected one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fused_optim import _guards, _torch


class NormLedger:
    """Norms of single gradients, and their total as ``torch.nn.utils.clip_grad_norm_`` computes it."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = float(norm_type)
        self._norms: dict[int, Tensor] = {}

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._norms

    def include(self, earlier: NormLedger) -> None:
        """Takes over the norms of gradients that are not noted here."""
        self._norms = {**earlier._norms, **self._norms}

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Notes the norm of ``grad``, the complete gradient of ``param``."""
        self._norms[id(param)] = _torch.grad_norm(grad, self.norm_type)

    def total(self, params: Iterable[Tensor]) -> Tensor:
        """The norm of all noted gradients together, a scalar tensor; adds up in the order of ``params``."""
        noted = [param for param in params if id(param) in self._norms]
        if not noted:
            return torch.tensor(0.0)
        norms = [self._norms[id(noted[index])] for index in _torch.clipping_order(noted)]
        device = noted[0].device
        stacked = torch.stack([norm.to(device) for norm in norms])
        total: Tensor = torch.linalg.vector_norm(stacked, self.norm_type)
        return total


class Measurement:
    """One measuring pass: takes each gradient for its norm, drops it, and leaves pending ones as they were.

    Args:
        ledger: where the norms go.
        pending: parameters that hold a gradient already, to which those of this pass are added.
        unscales: unscales the gradient of a parameter; returns whether it did not overflow.
        name: what to call a parameter in a message.

    Attributes:
        overflowed: whether a gradient was infinite or NaN, as a ``GradScaler`` sees it.
    """

    def __init__(
        self,
        ledger: NormLedger,
        pending: list[Tensor],
        unscales: Callable[[Tensor], bool],
        name: Callable[[Tensor], str],
    ) -> None:
        self.overflowed = False
        self._ledger = ledger
        self._pending = {id(param): (param, param.grad) for param in pending}
        self._unscales = unscales
        self._name = name
        for param in pending:
            param.grad = None

    def take(self, param: Tensor) -> None:
        """Takes the complete gradient that this pass has left in ``param.grad``.

        Raises:
            RuntimeError: if it arrives in parts.
        """
        if param in self._ledger:
            raise RuntimeError(_guards.twice_in_one_backward(self._name(param)))
        _, before = self._pending.get(id(param), (param, None))
        grad = param.grad
        if grad is None:
            return
        with torch.no_grad():
            if before is not None:
                grad.add_(before)
            self.overflowed |= not self._unscales(param)
            self._ledger.add(param, grad)
        param.grad = None

    def take_rest(self, zeroed: Iterable[Tensor]) -> None:
        """Takes what this pass did not reach: pending gradients, and those that would be zeros."""
        for param in [*(param for param, _ in self._pending.values()), *zeroed]:
            if param not in self._ledger:
                param.grad = torch.zeros_like(param)
                self.take(param)

    def give_back(self) -> None:
        """Puts the pending gradients back."""
        for param, grad in self._pending.values():
            param.grad = grad


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which ``torch.nn.utils.clip_grad_norm_`` multiplies every gradient, at most 1."""
    return torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
