"""The engine: from a complete gradient to a stepped parameter, and from there to the end of the round."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fused_optim import _guards, _torch, distributed
from fused_optim._frameworks import ClippingWatch, warn_outside
from fused_optim._hooks import (
    GradientHook,
    Pass,
    Run,
    at_end_of_pass,
    pass_id,
    stream_of,
    surroundings,
    when_outer_pass_continues,
)
from fused_optim._norms import NormLedger, clip_coefficient
from fused_optim._roster import Roster, Slot
from fused_optim._scaling import KernelScaledRun, ScaledRun, lend_scale
from fused_optim._units import Traces, units_of

SMALL_BYTES = 64 * 1024
"""A gradient of up to so many bytes may share a unit; a larger one has a unit of its own."""
RUN_LENGTH = 128
"""So many small parameters share a unit at most: beyond it, the fixed cost of a step is spread thin enough."""

ParamHook = Callable[[Any, Tensor], None]


@dataclass
class Options:
    """The keyword options of ``BackwardFusedOptimizer``; its docstring describes them."""

    strict: bool = True
    bucket_cap_mb: float = 1.0
    accumulate_when: Callable[[], bool] | None = None
    grad_scaler: Any = None
    track_grad_norm: bool = False


class Engine:
    """Steps parameters of ``whole`` as their gradients become complete.

    Three counters tell what has been stepped when: ``_backward`` grows with every outermost backward pass,
    ``_interval`` with every ``step()``; a round ends with ``step()``, or, in a loop that has never called it,
    with the outermost backward pass.
    """

    def __init__(self, owner: Any, whole: Optimizer, options: Options) -> None:
        self.whole = whole
        self.options = options
        self.unit = units_of(whole)
        self.roster = Roster(whole, GradientHook(self))
        self._slots = self.roster.slots
        self.param_pre_hooks: OrderedDict[int, ParamHook] = OrderedDict()
        self.param_post_hooks: OrderedDict[int, ParamHook] = OrderedDict()
        self.grad_norm: Tensor | None = None
        self._owner = weakref.ref(owner)
        self._clipping_watch = ClippingWatch()
        self._reducers = distributed.Reducers()
        self._lock = threading.RLock()
        self._passes: dict[int, Pass] = {}
        self._cap_bytes = options.bucket_cap_mb * 2**20
        self._small_bytes = min(SMALL_BYTES, self._cap_bytes)
        self._accumulating = 0
        self._backward = 0
        self._interval = 0
        self._generation = 0
        self._zeroed_at = -1
        self._kept = False
        self._round_open = False
        self._rounds_closed = 0
        self._fused = False
        self._calls_step = False
        self._warned_idle = False
        self._repeated: str | None = None
        self._changed: str | None = None
        self._traces = Traces(False, False)
        self._view: list[dict[str, Any]] = []
        self._measuring: Callable[[Tensor], None] | None = None
        self._clip: Tensor | None = None
        self._overflowed = False
        self._discarded = False
        self._norms = NormLedger(2.0)
        self._earlier_norms = NormLedger(2.0)
        self._scaled_runs: list[ScaledRun] = []

    # From a complete gradient to a step

    def gradient_ready(self, param: Tensor) -> None:
        """Takes the complete gradient in ``param.grad``; called by the hook of ``param``."""
        with self._lock:
            current = self._passes.get(pass_id()) or self._open_pass(pass_id())
            if id(param) not in current.reduced:
                current.on_ready(self, param, current)

    def _open_pass(self, task: int) -> Pass:
        if task < 0:
            # Called by hand, as pipeline schedules do, which may change the gradient after: step() applies it.
            return Pass(Engine._keep, False, {})
        if not self.roster.is_current():
            self.roster.enrol()
        around = surroundings()
        if not around.nested:
            self._forget_failed_passes(threading.get_ident())
        current = self._passes[task] = Pass(self._on_ready(), around.nested, self._reduced())
        end = partial(_forward, weakref.ref(self), "_end_pass", task, current)
        at_end_of_pass(distributed.after_reducers(end) if current.reduced else end)
        if around.node is not None and not self._outermost_is_open():
            when_outer_pass_continues(around.node, partial(_forward, weakref.ref(self), "_note_pass"))
        return current

    def _reduced(self) -> dict[int, distributed.Reduced]:
        return self._reducers.around(self._params, self.roster.enrolments)

    def _params(self) -> list[Tensor]:
        return [param for _, param in self.roster.params()]

    def _note_pass(self) -> None:
        with self._lock:
            task = pass_id()
            if task not in self._passes:
                self._open_pass(task)

    def _outermost_is_open(self) -> bool:
        thread = threading.get_ident()
        return any(not opened.nested and opened.thread == thread for opened in self._passes.values())

    def _on_ready(self) -> Callable[[Engine, Tensor, Pass], None]:
        # Not bound to this engine: a pass that failed stays with it, and the cycle would keep both alive.
        if self._measuring is not None:
            return Engine._measure
        asked = self.options.accumulate_when
        if self._accumulating or (asked is not None and asked()):
            return Engine._keep
        if self._discarded and not self._calls_step:
            self._overflowed = self._discarded = False
            self._clip = None
        return Engine._discard if self._overflowed else Engine._step_ready

    def _keep(self, param: Tensor, current: Pass) -> None:
        self._kept = True

    def _discard(self, param: Tensor, current: Pass) -> None:
        param.grad = None

    def _measure(self, param: Tensor, current: Pass) -> None:
        if self._measuring is not None and param.grad is not None:
            self._measuring(param)

    def _step_ready(self, param: Tensor, current: Pass) -> None:
        slot = self._slots.get(id(param))
        if slot is None:
            return
        if slot.backward == self._backward or slot.interval == self._interval:
            if param.grad is None:
                # The end of another thread's pass came first and found this gradient pending.
                return
            self._check_second(slot, param)
        slot.backward, slot.interval, slot.generation = self._backward, self._interval, self._generation
        self._fused = True
        key = (slot.group, stream_of(param) if param.is_cuda else None)
        if slot.nbytes > self._small_bytes:
            # Small gradients that outlive large temporaries pin the heap between them; along with a large
            # parameter their step is free, too.
            waiting = current.runs.pop(key, None)
            self._step_run(slot.group, [*waiting.params, param] if waiting else [param])
            return
        run = current.runs.get(key)
        if run is None:
            run = current.runs[key] = Run()
        run.params.append(param)
        run.nbytes += slot.nbytes
        if len(run.params) >= RUN_LENGTH or run.nbytes >= self._cap_bytes:
            del current.runs[key]
            self._step_run(slot.group, run.params)

    def _check_second(self, slot: Slot, param: Tensor) -> None:
        if slot.backward == self._backward:
            raise RuntimeError(_guards.twice_in_one_backward(self.roster.name(param)))
        if self._calls_step and self.options.strict:
            raise RuntimeError(_guards.second_step_in_round(self.roster.name(param)))
        self._repeated = self._repeated or self.roster.name(param)

    def _step_run(self, group: int, params: list[Tensor]) -> None:
        try:
            if not self._round_open:
                self._begin_round()
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._apply(group, params)
            else:
                self._apply(group, params)
        except BaseException:
            self._abandon_round()
            raise
        finally:
            for param in params:
                param.grad = None

    def _apply(self, group: int, params: list[Tensor]) -> None:
        scaler = self.options.grad_scaler
        if scaler is None or not scaler.is_enabled():
            params = self._prepare(params)
            if params:
                self.unit.step(group, params)
        else:
            self._apply_scaled(scaler, group, params)
        self._fire(self.param_post_hooks, params)

    def _apply_scaled(self, scaler: Any, group: int, params: list[Tensor]) -> None:
        overflow = _torch.overflow_if_unscaled(scaler, self._owner())
        if overflow is not None:
            params[:] = self._prepare(params)
            if params and not overflow:
                self.unit.step(group, params)
            return
        kernel_unscales = getattr(self.whole, "_step_supports_amp_scaling", False)
        step = partial(self.unit.step, group, params)
        run = (
            KernelScaledRun(params, step, self.unit.optimizer) if kernel_unscales else ScaledRun(params, step)
        )
        self._scaled_runs.append(run)
        if not kernel_unscales or self._clip is not None or self.param_pre_hooks or self.options.track_grad_norm:
            scaler.unscale_(run)
        params[:] = self._prepare(params)
        if params:
            scaler.step(run)
        run.release()

    def _prepare(self, params: list[Tensor]) -> list[Tensor]:
        """What happens to gradients between their completion and the step; returns those to step."""
        tracks = self.options.track_grad_norm
        if not tracks and self._clip is None and not self.param_pre_hooks:
            return params
        for param in params:
            if param.grad is not None and tracks:
                self._norms.add(param, param.grad)
            if param.grad is not None and self._clip is not None:
                param.grad.mul_(self._clip.to(param.grad.device))
        self._fire(self.param_pre_hooks, params)
        return [param for param in params if param.grad is not None]

    def _fire(self, hooks: OrderedDict[int, ParamHook], params: list[Tensor]) -> None:
        if not hooks:
            return
        owner = self._owner()
        for param in params:
            for hook in list(hooks.values()):
                hook(owner, param)

    # The end of a backward pass

    def _end_pass(self, task: int, current: Pass) -> None:
        with self._lock:
            if current.reduced and not current.nested:
                self._take_reduced(current)
            for (group, _), run in current.take_runs():
                self._step_run(group, run.params)
            self._passes.pop(task, None)
            if current.nested:
                return
            self._backward += 1
            self._discarded |= current.on_ready == Engine._discard
            if current.on_ready == Engine._step_ready and not self._calls_step and not self._passes:
                self._end_round_after_backward(current)

    def _take_reduced(self, current: Pass) -> None:
        for param in distributed.completed(current.reduced):
            current.on_ready(self, param, current)
        self._kept = True

    def _end_round_after_backward(self, current: Pass) -> None:
        if self._rounds_closed and self._reducers.may_skip_us:
            raise RuntimeError(_guards.NEEDS_STEP)
        if self._zeroed_at >= 0:
            self._restore_zeros()
        for group, params in self._pending():
            # What a reducer has not exchanged by now waits for a later pass.
            params = [param for param in params if id(param) not in current.reduced]
            if params:
                self._step_pending(group, params)
        self._kept = bool(current.reduced)
        self._close_round()
        owner = self._owner()
        if owner is not None:
            _torch.note_step_called(owner)
            _torch.note_step_called(self.whole)

    def _forget_failed_passes(self, thread: int | None = None) -> str | None:
        """A pass that is still open when another begins on its thread ended in an exception.

        Returns:
            The name of a parameter whose gradient was waiting for the end of that pass, if one was.
        """
        lost: str | None = None
        failed = [task for task, opened in self._passes.items() if thread in (None, opened.thread)]
        for task in failed:
            for _, run in self._passes.pop(task).take_runs():
                for param in run.params:
                    param.grad = None
                    lost = lost or self.roster.name(param)
        if failed:
            self._backward += 1
        return lost

    # Rounds

    def _begin_round(self) -> None:
        self.unit.begin_round()
        self._round_open = True
        self._forget_scaled_runs()
        if self._rounds_closed and self._repeated is None:
            # Perhaps all one round, of a loop that is yet to call step() for the first time.
            self._earlier_norms.include(self._norms)
            self._changed = self._changed or _guards.change_in(self._view, self.whole.param_groups)
        self._norms = NormLedger(2.0)
        self._view = _guards.view_of(self.whole.param_groups)

    def _forget_scaled_runs(self) -> None:
        # A scaler takes an object at the address of one that it remembers for the same.
        scaler = self.options.grad_scaler
        self._scaled_runs = [run for run in self._scaled_runs if _torch.remembers(scaler, run)]

    def _close_round(self) -> None:
        if not self._round_open:
            return
        # Once a parameter has come again, the loop never calls step(), or step() raises anyway.
        traces = self.unit.commit(watch=not self._calls_step and self._repeated is None)
        self._traces = Traces(*map(max, self._traces, traces))
        self._view = _guards.view_of(self.whole.param_groups)
        self._round_open = False
        self._rounds_closed += 1
        self._clip = None
        self._note_norm()

    def _note_norm(self) -> None:
        if self.options.track_grad_norm:
            self.grad_norm = self._norms.total(param for _, param in self.roster.params())

    def _abandon_round(self) -> None:
        self._round_open = False
        self._next_interval()

    def _next_interval(self) -> None:
        self._interval += 1
        self._fused = False
        self._repeated = None
        self._changed = None
        self._traces = Traces(False, False)
        self._earlier_norms = NormLedger(2.0)
        self._rounds_closed = 0
        self._clip = None
        self._overflowed = self._discarded = False

    def refuse_clipping(self) -> None:
        """Refuses a trainer that calls before any parameter has moved, and is going to clip what is gone by then."""
        if self.options.strict and self.roster.hooked and not self._accumulating:
            self._clipping_watch.refuse()

    @_torch.never_compiled
    def finish_round(self) -> None:
        """Ends the round: steps the gradients that are pending, commits what the round wrote.

        Raises:
            RuntimeError: if the round cannot be what an ordinary ``step()`` would have done.
        """
        with self._lock, torch.no_grad():
            lost = self._forget_failed_passes()
            if lost is not None and self.options.strict:
                self._abandon_round()
                raise RuntimeError(_guards.unfinished_backward(lost))
            # The end of a pass that held only nested ones, of this optimizer, has not been seen.
            self._backward += 1
            self._reduced()
            if self._fused:
                self._calls_step = True
                self._check_round()
            elif self._overflowed:
                self._calls_step = True
            elif self._clip is not None:
                self._next_interval()
                raise RuntimeError(_guards.CLIPPED_WITHOUT_BACKWARD)
            self._enrol_newcomers()
            if self._zeroed_at >= 0:
                self._restore_zeros()
            if not self._overflowed:
                self._step_the_rest()
                # Schedulers built before from_optimizer() know only the whole.
                _torch.note_step_called(self.whole)
            self._round_open = False
            self._kept = False
            self._next_interval()

    def _step_the_rest(self) -> None:
        pending = self._pending()
        if not self._fused:
            self._step_whole([param for _, params in pending for param in params])
            return
        self._round_open = True
        self._norms.include(self._earlier_norms)
        for group, params in pending:
            self._rehook(params)
            self._step_pending(group, params)
        self._close_round()

    def _step_pending(self, group: int, params: list[Tensor]) -> None:
        for param in params:
            slot = self._slots.get(id(param))
            if slot is not None:
                if slot.interval == self._interval:
                    self._repeated = self._repeated or self.roster.name(param)
                slot.backward, slot.interval = self._backward - 1, self._interval
                slot.generation = self._generation
        self._step_run(group, params)

    def _step_whole(self, pending: list[Tensor]) -> None:
        """Does what the ordinary optimizer does, since nothing of this round was stepped in backward."""
        if not pending and not self._warned_idle:
            self._warned_idle = True
            warn_outside(_guards.NOTHING_HAD_A_GRADIENT)
        self._rehook(pending)
        self._norms = NormLedger(2.0)
        pending = self._prepare(pending)
        step = partial(_torch.unprofiled_step(type(self.whole)), self.whole)
        owner = self._owner()
        if owner is not None and "grad_scale" in vars(owner):
            lend_scale(owner, self.whole, step)
        else:
            step()
        self._note_norm()
        self._fire(self.param_post_hooks, pending)

    def _rehook(self, pending: list[Tensor]) -> None:
        if self._kept:
            return
        for param in pending:
            if param.requires_grad and param.is_leaf:
                self.roster.rehook(param)

    def _enrol_newcomers(self) -> None:
        """Enrols parameters that were put into the groups by hand: only they can hold an unseen gradient."""
        unseen = (id(param) not in self._slots for _, params in self._pending() for param in params)
        if not self.roster.is_current() or any(unseen):
            self.roster.enrol()

    def _pending(self) -> list[tuple[int, list[Tensor]]]:
        """Parameters that hold a gradient, by group."""
        pending = []
        for index, group in enumerate(self.whole.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                pending.append((index, params))
        return pending

    def _restore_zeros(self) -> None:
        """Gives gradients of zeros to parameters that would hold them after ``zero_grad(set_to_none=False)``."""
        for _, param in self.roster.params():
            if param.grad is None and self._would_hold_zeros(param):
                param.grad = torch.zeros_like(param)

    def _would_hold_zeros(self, param: Tensor) -> bool:
        slot = self._slots.get(id(param))
        return slot is not None and slot.generation == self._generation and slot.backward < self._zeroed_at

    def _check_round(self) -> None:
        try:
            owner = self._owner()
            if self.options.grad_scaler is None and owner is not None and "grad_scale" in vars(owner):
                raise RuntimeError(_guards.SCALED_WITHOUT_SCALER)
            self._clipping_watch.look(self.options.strict, clipped=self._clip is not None)
            if not self.options.strict:
                return
            repeated = self._repeated or self._stepped_and_pending()
            if repeated is not None:
                raise RuntimeError(_guards.second_step_in_round(repeated))
            changed = self._changed or _guards.change_in(self._view, self.whole.param_groups)
            if changed is not None:
                raise RuntimeError(changed)
            if self._was_cut_into_rounds():
                raise RuntimeError(_guards.cut_into_rounds(type(self.whole).__name__))
        except RuntimeError:
            self._round_open = False
            self._next_interval()
            raise

    def _stepped_and_pending(self) -> str | None:
        """Names a parameter that was stepped in backward and holds a gradient again, if there is one.

        A reducer's parameters hold theirs until the end of the pass only, and zeros are made for those that
        were not stepped.
        """
        for _, params in self._pending():
            for param in params:
                slot = self._slots.get(id(param))
                if slot is not None and slot.interval == self._interval:
                    return self.roster.name(param)
        return None

    def _was_cut_into_rounds(self) -> bool:
        """Whether backward ended rounds that this ``step()`` ought to have ended, and it made a difference."""
        wrote, moved = self._traces
        return (wrote or moved) if self._rounds_closed > 1 else (moved and bool(self._pending()))

    # What the optimizer's methods ask for

    @_torch.never_compiled
    def zero_grad(self, set_to_none: bool) -> None:
        """Drops pending gradients.

        Raises:
            RuntimeError: if gradients were applied that the loop now wants to discard.
        """
        with self._lock:
            self._forget_failed_passes()
            if self._fused and self._calls_step and self.options.strict:
                self._round_open = False
                self._next_interval()
                raise RuntimeError(_guards.DISCARDS_APPLIED)
            self.whole.zero_grad(set_to_none=set_to_none)
            self._kept = False
            self._zeroed_at = -1 if set_to_none else self._backward
            if set_to_none:
                self._generation += 1

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside leave their gradients alone."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def reset(self) -> None:
        """Starts afresh with whatever the whole holds now."""
        with self._lock:
            self._forget_failed_passes()
            self._round_open = False
            self._next_interval()
            self.roster.enrol()

    def has_fused_steps(self) -> bool:
        """Whether parameters were stepped in backward since the last ``step()``."""
        return self._fused or self._overflowed

    @_torch.never_compiled
    def measure_norm(
        self, loss: Tensor, max_norm: float, ledger: NormLedger, order: Iterable[Tensor], strict_finite: bool
    ) -> Tensor:
        """Walks backward once to measure the gradients, and prepares the next pass to clip them."""
        self._forget_failed_passes()
        if self._reduced():
            raise RuntimeError(_guards.CLIPS_REDUCED)
        pending = {id(param): param for _, params in self._pending() for param in params}
        kept = {key: param.grad for key, param in pending.items()}
        for param in pending.values():
            param.grad = None
        self._measuring = partial(self._measure_one, ledger, kept)
        self._overflowed = self._discarded = False
        try:
            torch.autograd.backward(loss, retain_graph=True)
            for param in order:
                if param not in ledger and (id(param) in pending or self._would_hold_zeros(param)):
                    param.grad = torch.zeros_like(param)
                    self._measure_one(ledger, kept, param)
        finally:
            self._measuring = None
            for key, param in pending.items():
                param.grad = kept[key]
        total = ledger.total(order)
        if strict_finite and not bool(torch.isfinite(total)):
            self._overflowed = False
            raise RuntimeError(_guards.nonfinite_norm(ledger.norm_type))
        self._clip = clip_coefficient(total, max_norm)
        return total

    def _measure_one(self, ledger: NormLedger, kept: dict[int, Tensor | None], param: Tensor) -> None:
        if param in ledger:
            raise RuntimeError(_guards.twice_in_one_backward(self.roster.name(param)))
        assert param.grad is not None
        with torch.no_grad():
            before = kept.get(id(param))
            if before is not None:
                param.grad.add_(before)
            if self.options.grad_scaler is not None and self.options.grad_scaler.is_enabled():
                self._overflowed |= not self._unscales_finite(param)
            ledger.add(param, param.grad)
        param.grad = None

    def _unscales_finite(self, param: Tensor) -> bool:
        finite: list[bool] = []
        run = ScaledRun([param], partial(finite.append, True))
        self._scaled_runs.append(run)
        self.options.grad_scaler.unscale_(run)
        self.options.grad_scaler.step(run)
        run.release()
        return bool(finite)


@_torch.never_compiled
def _forward(engine: weakref.ref[Engine], method: str, *args: Any) -> None:
    """Calls a method of an engine that may be gone by then: autograd holds this, and must not hold it."""
    alive = engine()
    if alive is not None:
        getattr(alive, method)(*args)
