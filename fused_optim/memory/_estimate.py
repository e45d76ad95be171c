"""Predicting the memory of a training run on fake tensors, which have shapes and no data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ._advice import advice
from ._fakes import NotFakeable
from ._recording import CATEGORIES, format_bytes
from ._simulation import VARIANTS, Inputs, Loss, Simulation, Variant


@dataclass(frozen=True)
class Estimate:
    """What training would take; made by `fused_optim.memory.estimate`.

    Attributes:
        plain: the optimizer with its defaults and the given arguments.
        foreach_false: the same with ``foreach=False``; None where the optimizer has no such argument.
        fused: the optimizer in a `fused_optim.BackwardFusedOptimizer`.
        parameters: number of the model's parameters.
        trainable: number of those that require a gradient.
        unknown: why activations are missing; empty where nothing is.
        notes: what else to know about how the figures were made.
    """

    plain: Variant
    foreach_false: Variant | None
    fused: Variant
    parameters: int
    trainable: int
    unknown: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def advice(self) -> str:
        """What dominates the peak, what fusing saves, and what saves more where that is little."""
        return advice(self.plain.peak, self.fused.peak, self.trainable, self.parameters, known=not self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as numbers, strings and dictionaries; sizes in bytes."""
        return {
            "plain": self.plain.to_dict(),
            "foreach=False": None if self.foreach_false is None else self.foreach_false.to_dict(),
            "fused": self.fused.to_dict(),
            "parameters": self.parameters,
            "trainable": self.trainable,
            "unknown": self.unknown,
            "notes": list(self.notes),
            "advice": self.advice,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        variants = (self.plain, self.foreach_false, self.fused)
        rows: list[tuple[str, ...]] = [("at the peak", *VARIANTS)]
        for name in (*CATEGORIES, "total"):
            if name == "activations" and self.unknown:
                sizes = ["unknown"] * len(variants)
            else:
                sizes = ["-" if one is None else format_bytes(getattr(one.peak, name)) for one in variants]
            rows.append((name.replace("_", " "), *sizes))
        lines = [f"{name:16}" + "".join(f"{cell:>15}" for cell in cells) for name, *cells in rows]
        lines += [f"{name}: peak in {one.moment}" for name, one in zip(VARIANTS, variants) if one and one.moment]
        lines += [f"note: {note}" for note in (self.unknown, *self.notes) if note]
        return "\n".join([*lines, self.advice])


def estimate(
    model_factory: Callable[[], torch.nn.Module],
    optimizer_class: type[torch.optim.Optimizer],
    example_inputs: Inputs,
    *,
    loss: Loss | None = None,
    device: str = "cpu",
    **optimizer_kwargs: Any,
) -> Estimate:
    """Predicts the peak memory of ordinary and fused training without allocating the model.

    Two iterations (forward, backward, ``step``, ``zero_grad``) run on fake tensors for each way to train, and
    a recorder watches them, so the figures have the meaning that those of `fused_optim.memory.record` have.
    The model's output is held until the end of its iteration.

    Args:
        model_factory: builds the model, in the dtype and with the frozen parameters it is trained with.
        optimizer_class: a class of `torch.optim` or alike.
        example_inputs: a tensor, a sequence of positional arguments or a mapping of keyword arguments for
            the model. Only shapes and dtypes are used, so tensors on the ``meta`` device will do.
        loss: turns the model's output into the scalar to call ``backward()`` on. By default the output's
            ``loss`` if it has one, else the sum of its first floating-point tensor.
        device: ``"cpu"``, or ``"cuda"`` on a machine that has one: some operators and the optimizers' default
            implementation differ.
        **optimizer_kwargs: arguments of the optimizer.

    Returns:
        The figures for the optimizer's default, ``foreach=False`` and fused. Where the model reads values of
        tensors, which fake ones do not have, parameters, gradients and state are exact and activations
        unknown.

    Raises:
        ValueError: the model rejects the inputs, the loss is no scalar that requires a gradient, or the
            device is none.
        TypeError: ``model_factory`` makes no module, or the optimizer rejects its arguments.

    Example:
        >>> import torch
        >>> from fused_optim import memory
        >>> figures = memory.estimate(
        ...     lambda: torch.nn.Linear(1000, 1000), torch.optim.Adam, torch.empty(1, 1000, device="meta")
        ... )
        >>> figures.plain.peak.gradients
        4004000
    """
    simulation = Simulation(model_factory, optimizer_class, example_inputs, loss, device, optimizer_kwargs)
    variants, unknown = _run_all(simulation)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in simulation.build().parameters()]
    return Estimate(
        variants["plain"],
        variants.get("foreach=False"),
        variants["fused"],
        sum(size for size, _ in sizes),
        sum(size for size, trainable in sizes if trainable),
        unknown,
        tuple(simulation.notes),
    )


def _run_all(simulation: Simulation) -> tuple[dict[str, Variant], str]:
    unknown = ""
    run: Callable[[str], Variant] = simulation.run
    variants: dict[str, Variant] = {}
    for name in simulation.variants():
        try:
            variants[name] = run(name)
        except NotFakeable as error:
            unknown = f"activations are unknown: {error}"
            run = simulation.formula
            variants[name] = run(name)
    if simulation.default_is_a_loop():
        # The default is foreach=False already, by the optimizers' documentation.
        variants["foreach=False"] = variants["plain"]
    return variants, unknown
