"""From a complete gradient to a stepped parameter: unscale, measure, clip, user's hooks, step, free."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fused_optim import _guards, _torch
from fused_optim._norms import NormLedger
from fused_optim._scaling import KernelScaledRun, ScaledRun, lend_scale
from fused_optim._surroundings import Surroundings
from fused_optim._units import IsolatedUnit, units_of

ParamHook = Callable[[Any, Tensor], None]


@dataclass
class Options:
    """The keyword options of ``BackwardFusedOptimizer``; its docstring describes them."""

    strict: bool = True
    bucket_cap_mb: float = 1.0
    accumulate_when: Callable[[], bool] | None = None
    grad_scaler: Any = None
    track_grad_norm: bool = False

    def scaler(self) -> Any | None:
        """The scaler that scales the loss, if one does and is enabled."""
        return self.grad_scaler if self.grad_scaler is not None and self.grad_scaler.is_enabled() else None


class Stepper:
    """Steps runs of parameters with the gradients they hold, and frees these.

    Attributes:
        unit: does the stepping.
        steps_whole: whether the whole itself is being stepped, as an ordinary optimizer.
        overflowed: whether a run of the round was not stepped because a gradient of it overflowed.
        clip: the factor for all gradients of the round, once it is measured; a scalar tensor.
        norms: norms of the gradients of the round, with ``track_grad_norm``.
        pre_hooks, post_hooks: called around the step of each parameter.
    """

    def __init__(
        self, owner: weakref.ref[Any], whole: Optimizer, options: Options, name: Callable[[Tensor], str]
    ) -> None:
        self._name = name
        self.unit = units_of(whole)
        self.steps_whole = False
        self.overflowed = False
        self.clip: Tensor | None = None
        self.norms = NormLedger(2.0)
        self.pre_hooks: OrderedDict[int, ParamHook] = OrderedDict()
        self.post_hooks: OrderedDict[int, ParamHook] = OrderedDict()
        self._owner = owner
        self._whole = whole
        self._options = options
        self._scaled_runs: list[ScaledRun] = []
        self._isolated = isinstance(self.unit, IsolatedUnit)
        self._shared_memory: list[_torch.Memory] = []
        self.surroundings = Surroundings.current()

    def begin_round(self) -> None:
        """Forgets what belongs to the round before."""
        self.unit.begin_round()
        self.norms = NormLedger(2.0)
        self._shared_memory.clear()
        # A scaler takes an object at the address of one that it remembers for the same.
        scaler = self._options.grad_scaler
        self._scaled_runs = [run for run in self._scaled_runs if _torch.remembers(scaler, run)]

    def step_run(self, group: int, params: list[Tensor]) -> None:
        """Steps ``params``, all of one group, and frees their gradients, also when the step fails."""
        now = Surroundings.current()
        try:
            if torch.is_grad_enabled():
                with torch.no_grad(), self.surroundings.restored(now):
                    self._step(group, params)
            elif now != self.surroundings:
                with self.surroundings.restored(now):
                    self._step(group, params)
            else:
                self._step(group, params)
        finally:
            for param in params:
                param.grad = None

    def step_whole(self, params: list[Tensor]) -> None:
        """Steps the whole, in which ``params`` hold gradients, and leaves these, as an ordinary step does."""
        self.norms = NormLedger(2.0)
        params = self._prepare(params)
        step = partial(_torch.unprofiled_step(type(self._whole)), self._whole)
        owner = self._owner()
        self.steps_whole = True
        try:
            if owner is not None and "grad_scale" in vars(owner):
                lend_scale(owner, self._whole, step)
            else:
                step()
        finally:
            self.steps_whole = False
        self._fire(self.post_hooks, params)

    def reports_overflow(self, device: torch.device) -> bool:
        """Lets the scaler know that the round is to be skipped, unless it leaves that to the optimizer's kernel."""
        scaler = self._options.scaler()
        if scaler is None or getattr(self._whole, "_step_supports_amp_scaling", False):
            return False
        _torch.report_overflow(scaler, self._owner(), device)
        return True

    def unscales_finite(self, param: Tensor) -> bool:
        """Has the scaler unscale the gradient of ``param``; returns whether it did not overflow."""
        scaler = self._options.scaler()
        if scaler is None:
            return True
        finite: list[bool] = []
        run = self._remembered(ScaledRun([param], partial(finite.append, True)))
        scaler.unscale_(run)
        scaler.step(run)
        run.release()
        return bool(finite)

    def _own_gradients(self, params: list[Tensor]) -> None:
        """Gives each parameter a gradient of its own: what is going to write it must not write what others hold.

        Raises:
            RuntimeError: if two gradients are one memory, which an ordinary loop writes twice.
        """
        for param in params:
            grad = param.grad
            if grad is None or _torch.owns_memory(grad):
                continue
            memory = _torch.memory_of(grad)
            if memory is not None:
                if any(map(memory.overlaps, self._shared_memory)):
                    raise RuntimeError(_guards.aliased(self._name(param)))
                self._shared_memory.append(memory)
            param.grad = grad.clone()

    def _step(self, group: int, params: list[Tensor]) -> None:
        scaler = self._options.scaler()
        if self._isolated or scaler is not None or self.clip is not None or self.pre_hooks:
            self._own_gradients(params)
        if scaler is not None:
            self._step_scaled(scaler, group, params)
            return
        ready = self._prepare(params)
        if ready:
            self.unit.step(group, ready)
            self._fire(self.post_hooks, ready)

    def _step_scaled(self, scaler: Any, group: int, params: list[Tensor]) -> None:
        overflow = _torch.overflow_if_unscaled(scaler, self._owner())
        if overflow is not None:
            ready = self._prepare(params)
            if ready and not overflow:
                self.unit.step(group, ready)
                self._fire(self.post_hooks, ready)
            return
        ready = list(params)
        run = self._remembered(self._scaled(ready, partial(self.unit.step, group, ready)))
        if not isinstance(run, KernelScaledRun) or not self._passes_through():
            scaler.unscale_(run)
        ready[:] = self._prepare(ready)
        if ready:
            scaler.step(run)
            self.overflowed |= not run.stepped
            self._fire(self.post_hooks, ready)
        run.release()

    def _scaled(self, params: list[Tensor], step: Callable[[], None]) -> ScaledRun:
        if getattr(self._whole, "_step_supports_amp_scaling", False):
            return KernelScaledRun(params, step, self.unit.optimizer)
        return ScaledRun(params, step)

    def _remembered(self, run: ScaledRun) -> ScaledRun:
        self._scaled_runs.append(run)
        return run

    def _passes_through(self) -> bool:
        """Whether nothing looks at a gradient, or changes it, before the step."""
        return self.clip is None and not self.pre_hooks and not self._options.track_grad_norm

    def _prepare(self, params: list[Tensor]) -> list[Tensor]:
        """What happens to gradients between their completion and the step; returns those to step."""
        if self._passes_through():
            return params
        for param in params:
            if param.grad is not None and self._options.track_grad_norm:
                self.norms.add(param, param.grad)
            if param.grad is not None and self.clip is not None:
                param.grad.mul_(self.clip.to(param.grad.device))
        self._fire(self.pre_hooks, params)
        return [param for param in params if param.grad is not None]

    def _fire(self, hooks: OrderedDict[int, ParamHook], params: list[Tensor]) -> None:
        if not hooks:
            return
        owner = self._owner()
        for param in params:
            for hook in list(hooks.values()):
                hook(owner, param)
