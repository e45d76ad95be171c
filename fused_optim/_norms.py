"""Global gradient norms, collected one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_optim import _torch


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


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which ``torch.nn.utils.clip_grad_norm_`` multiplies every gradient, at most 1."""
    return torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
