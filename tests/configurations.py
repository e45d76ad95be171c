"""All configurations of all optimizers of torch.optim that run on a CPU.

The newest torch lists them itself; for the oldest, which does not ship that list, they are written out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from twins import SHAPES, Twins

try:
    from torch.testing._internal.common_optimizers import optim_db
except ImportError:
    optim_db = []

WITHOUT_GRADIENTS = 5
"""The step in which nothing has a gradient."""
MATRICES = ((4, 3), (3, 5), (2, 2))


@dataclass
class Configuration:
    """An optimizer class with its arguments."""

    optimizer_class: type[Optimizer]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        flags = "-".join(f"{key}={_short(value)}" for key, value in self.kwargs.items())
        return f"{self.optimizer_class.__name__}-{flags}"

    def used(self, step: int, count: int) -> list[int]:
        """Which parameters have a gradient in a step: another subset each time, none at all in one step."""
        if step == WITHOUT_GRADIENTS:
            return []
        if step == 0 and self._needs_all_at_first():
            return list(range(count))
        return [index for index in range(count) if (index + step) % 4]

    def is_coupled(self) -> bool:
        """The foreach ASGD of old torch uses the rate of the first parameter for all: refused, and tested so."""
        return not optim_db and self.optimizer_class is torch.optim.ASGD and self.kwargs.get("foreach") is not False

    def _needs_all_at_first(self) -> bool:
        # The ordinary SGD itself fails when only some parameters have a momentum buffer in the fused kernel.
        return self.optimizer_class is torch.optim.SGD and bool(self.kwargs.get("fused"))

    def twins(self, options: dict[str, Any] | None = None) -> Twins:
        """A plain and a fused optimizer of this configuration, each over two groups."""
        shapes = MATRICES if self.optimizer_class.__name__ == "Muon" else SHAPES
        return Twins(self.optimizer_class, shapes, _two_groups, options=options, **copy.deepcopy(self.kwargs))


def _two_groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


def _short(value: Any) -> str:
    return f"tensor({value.item():g})" if isinstance(value, torch.Tensor) else str(value)


def configurations() -> list[Configuration]:
    """Every configuration with every implementation: default, for-loop, foreach and fused."""
    bases = _listed_by_torch() if optim_db else _written_out()
    return [
        Configuration(optimizer_class, {**kwargs, **flags})
        for optimizer_class, kwargs, implementations in bases
        for flags in ({}, *implementations)
    ]


Base = tuple[type[Optimizer], dict[str, Any], list[dict[str, bool]]]


def _listed_by_torch() -> list[Base]:
    bases: list[Base] = []
    for info in optim_db:
        # LBFGS needs a closure and is refused, SparseAdam takes only sparse gradients: both have tests of their own.
        if info.optim_cls.__name__ in ("LBFGS", "SparseAdam"):
            continue
        flags = [{"foreach": value} for value in (True, False) if "foreach" in info.supported_impls]
        flags += [{"fused": True}] if "fused" in info.supported_impls else []
        for given in info.optim_inputs_func(device="cpu"):
            if not given.kwargs.get("differentiable") and not given.kwargs.get("capturable"):
                bases.append((info.optim_cls, given.kwargs, _fitting(given.kwargs, flags)))
    return bases


def _fitting(kwargs: dict[str, Any], flags: list[dict[str, bool]]) -> list[dict[str, bool]]:
    if isinstance(kwargs.get("lr"), torch.Tensor):
        flags = [flag for flag in flags if not flag.get("foreach")]
    return [flag for flag in flags if not flag.keys() & kwargs.keys()]


def _written_out() -> list[Base]:
    optim = torch.optim
    table: dict[type[Optimizer], list[dict[str, Any]]] = {
        optim.Adadelta: [{}, {"lr": 0.01, "weight_decay": 0.1}, {"rho": 0.95, "maximize": True}],
        optim.Adagrad: [{}, {"lr": 0.1, "lr_decay": 0.5}, {"initial_accumulator_value": 0.1, "weight_decay": 0.1}],
        optim.Adam: [
            {},
            {"lr": 0.01, "amsgrad": True},
            {"weight_decay": 0.1, "maximize": True},
            {"lr": torch.tensor(0.001)},
        ],
        optim.AdamW: [{}, {"lr": 0.01, "amsgrad": True}, {"weight_decay": 0.1, "maximize": True}],
        optim.Adamax: [{}, {"weight_decay": 0.1}, {"lr": 0.001, "maximize": True}],
        optim.ASGD: [{}, {"lr": 0.02, "t0": 3}, {"weight_decay": 0.1, "maximize": True}],
        optim.NAdam: [{}, {"momentum_decay": 6e-3}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
        optim.RAdam: [{}, {"lr": 2e-3}, {"weight_decay": 0.1, "eps": 1e-6}],
        optim.RMSprop: [{}, {"momentum": 0.1, "centered": True}, {"weight_decay": 0.1, "maximize": True}],
        optim.Rprop: [{}, {"etas": (0.5, 1.5)}, {"step_sizes": (2e-6, 100), "maximize": True}],
        optim.SGD: [
            {"lr": 0.01},
            {"lr": 0.01, "momentum": 0.9},
            {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.5},
            {"lr": 0.01, "momentum": 0.9, "dampening": 0.5, "maximize": True},
        ],
        optim.SparseAdam: [],
    }
    foreach = [{"foreach": True}, {"foreach": False}]
    return [
        (optimizer_class, kwargs, _fitting(kwargs, foreach))
        for optimizer_class, rows in table.items()
        for kwargs in rows
    ]
