"""The engine: what a backward pass does with complete gradients, and what ends it.

backward -> hook -> pass -> run -> stepper; the end of the pass -> the end of the round.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
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
from fused_optim._norms import Measurement, NormLedger, clip_coefficient
from fused_optim._roster import Roster
from fused_optim._rounds import Rounds
from fused_optim._stepper import Options, Stepper
from fused_optim._surroundings import Surroundings

RUN_LENGTH = 128
"""So many parameters share a unit at most: beyond it, the fixed cost of a step is spread thin enough."""


class Engine:
    """Steps parameters of ``whole`` as their gradients become complete."""

    def __init__(self, owner: Any, whole: Optimizer, options: Options) -> None:
        self.whole = whole
        self.options = options
        self.roster = Roster(whole, GradientHook(self))
        self.stepper = Stepper(weakref.ref(owner), whole, options, self.roster.name)
        self.rounds = Rounds(whole, self.roster, self.stepper, options)
        self._owner = weakref.ref(owner)
        self._slots = self.roster.slots
        self._clipping_watch = ClippingWatch()
        self._reducers = distributed.Reducers()
        self._lock = threading.RLock()
        self._passes: dict[int, Pass] = {}
        self._cap_bytes = options.bucket_cap_mb * 2**20
        self._accumulating = 0
        self._kept = False
        self._heard = True
        self._zeroed_at = -1
        self._discarded = False
        self._warned_idle = False
        self._measuring: Measurement | None = None

    # What a pass does with a complete gradient

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
        self._heard = True
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

    def _note_pass(self) -> None:
        with self._lock:
            task = pass_id()
            if task not in self._passes:
                self._open_pass(task)

    def _outermost_is_open(self) -> bool:
        thread = threading.get_ident()
        return any(not opened.nested and opened.thread == thread for opened in self._passes.values())

    def _reduced(self) -> dict[int, distributed.Reduced]:
        return self._reducers.around(self.roster.all, self.roster.enrolments)

    def _on_ready(self) -> Callable[[Engine, Tensor, Pass], None]:
        # Not bound to this engine: a pass that failed stays with it, and the cycle would keep both alive.
        if self._measuring is not None:
            return Engine._measure
        asked = self.options.accumulate_when
        if self._accumulating or (asked is not None and asked()):
            return Engine._keep
        if self._discarded and not self.rounds.calls_step:
            self.rounds.overflowed = self._discarded = False
            self.stepper.clip = None
        return Engine._discard if self.rounds.overflowed else Engine._step_ready

    def _keep(self, param: Tensor, current: Pass) -> None:
        self._kept = True

    def _discard(self, param: Tensor, current: Pass) -> None:
        param.grad = None

    def _measure(self, param: Tensor, current: Pass) -> None:
        if self._measuring is not None and param.grad is not None:
            self._measuring.take(param)

    def _step_ready(self, param: Tensor, current: Pass) -> None:
        slot = self._slots.get(id(param))
        if slot is None:
            return
        if slot.interval == self.rounds.interval and param.grad is None:
            # The end of another thread's pass came first and found this gradient pending.
            return
        self.rounds.mark(slot, param)
        key = (slot.group, stream_of(param) if param.is_cuda else None)
        run = current.runs.get(key)
        if run is None:
            run = current.runs[key] = Run()
        run.params.append(param)
        run.nbytes += slot.nbytes
        # A large gradient fills the run by itself and takes the small ones along: they never outlive it, which
        # would pin the heap between the large temporaries of backward.
        if run.nbytes >= self._cap_bytes or len(run.params) >= RUN_LENGTH:
            del current.runs[key]
            self._step_run(slot.group, run.params)

    def _step_run(self, group: int, params: list[Tensor]) -> None:
        self.rounds.open()
        try:
            self.stepper.step_run(group, params)
        except BaseException:
            self.rounds.end()
            raise

    # The end of a backward pass

    def _end_pass(self, task: int, current: Pass) -> None:
        with self._lock:
            if current.reduced and not current.nested:
                self._take_reduced(current)
            for (group, _), run in current.take_runs():
                self._step_run(group, run.params)
            self._passes.pop(task, None)
            if current.nested:
                if not self._passes:  # the pass around it may hold none of these parameters, and so never be seen
                    self.rounds.note_values()
                return
            self.rounds.backward += 1
            self._discarded |= current.on_ready == Engine._discard
            if current.on_ready != Engine._step_ready:
                return
            if not self.rounds.calls_step and not self._passes:
                self._end_round_after_backward(current)
            self.rounds.note_values()

    def _take_reduced(self, current: Pass) -> None:
        for param in distributed.completed(current.reduced):
            current.on_ready(self, param, current)
        self._kept = True

    def _end_round_after_backward(self, current: Pass) -> None:
        if self.rounds.closed and self._reducers.may_skip_us:
            raise RuntimeError(_guards.NEEDS_STEP)
        self._restore_zeros()
        for group, params in self._pending():
            # What a reducer has not exchanged by now waits for a later pass.
            params = [param for param in params if id(param) not in current.reduced]
            if params:
                self._step_pending(group, params)
        self._kept = bool(current.reduced)
        self.rounds.close()
        self._note_step_called()

    def _note_step_called(self) -> None:
        owner = self._owner()
        if owner is not None:
            _torch.note_step_called(owner)
        # Schedulers built before from_optimizer() know only the whole.
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
            self.rounds.backward += 1
            self.rounds.note_values()
        return lost

    # The end of a round

    @_torch.never_compiled
    def finish_round(self) -> None:
        """Ends the round: steps the gradients that are pending, commits what the round wrote.

        Raises:
            RuntimeError: if the round cannot be what an ordinary ``step()`` would have done.
        """
        self.stepper.surroundings = Surroundings.current()
        with self._lock, torch.no_grad():
            lost = self._forget_failed_passes()
            # The end of a pass that held only nested ones, of this optimizer, has not been seen.
            self.rounds.backward += 1
            self._reduced()
            try:
                self._check_round(lost)
                self._enrol_newcomers()
                if not self.rounds.overflowed:
                    self._restore_zeros()
                    self._step_the_rest()
                    _torch.note_step_called(self.whole)
            finally:
                self._kept = False
                self._heard = True
                self.rounds.end()

    def _check_round(self, lost: str | None) -> None:
        rounds, strict = self.rounds, self.options.strict
        if lost is not None and strict:
            raise RuntimeError(_guards.unfinished_backward(lost))
        rounds.calls_step = rounds.calls_step or rounds.fused or rounds.overflowed
        if not rounds.fused:
            self._check_unfused()
            return
        owner = self._owner()
        if self.options.grad_scaler is None and owner is not None and "grad_scale" in vars(owner):
            raise RuntimeError(_guards.SCALED_WITHOUT_SCALER)
        self._clipping_watch.look(strict, clipped=self.stepper.clip is not None)
        if strict:
            rounds.check([param for _, params in self._pending() for param in params])

    def _check_unfused(self) -> None:
        if self.rounds.reloaded and not self._pending():
            raise RuntimeError(_guards.LOADED_OVER_STEP)
        if self.stepper.clip is not None and not self.rounds.overflowed:
            raise RuntimeError(_guards.CLIPPED_WITHOUT_BACKWARD)

    def _step_the_rest(self) -> None:
        pending = self._pending()
        if not self.rounds.fused:
            self._step_whole([param for _, params in pending for param in params])
            return
        self.rounds.reopen()
        for group, params in pending:
            self._rehook(params)
            self._step_pending(group, params)
        self.rounds.close()

    def _step_pending(self, group: int, params: list[Tensor]) -> None:
        for param in params:
            slot = self._slots.get(id(param))
            if slot is not None:
                self.rounds.mark_pending(slot, param)
        self._step_run(group, params)

    def _step_whole(self, pending: list[Tensor]) -> None:
        """Does what the ordinary optimizer does, since nothing of this round was stepped in backward."""
        if not pending and not self._warned_idle:
            self._warned_idle = True
            warn_outside(_guards.NOTHING_HAD_A_GRADIENT)
        self._rehook(pending)
        self.stepper.step_whole(pending)
        self.rounds.note_norm()

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
        if self._zeroed_at < 0:
            return
        for param in self.roster.all():
            if param.grad is None and self._would_hold_zeros(param):
                param.grad = torch.zeros_like(param)

    def _would_hold_zeros(self, param: Tensor) -> bool:
        slot = self._slots.get(id(param))
        return slot is not None and slot.generation == self.rounds.generation and slot.backward < self._zeroed_at

    # What the optimizer's methods ask for

    def refuse_clipping(self) -> None:
        """Refuses a trainer that calls before any parameter has moved, and is going to clip what is gone by then."""
        if self.options.strict and self.roster.hooked and not self._accumulating:
            self._clipping_watch.refuse()

    @_torch.never_compiled
    def zero_grad(self, set_to_none: bool) -> None:
        """Drops pending gradients.

        Raises:
            RuntimeError: if gradients were applied that the loop now wants to discard.
        """
        with self._lock:
            self._forget_failed_passes()
            if self.rounds.fused and self.rounds.calls_step and self.options.strict:
                self.rounds.end()
                raise RuntimeError(_guards.DISCARDS_APPLIED)
            self._look_for_unseen()
            self.whole.zero_grad(set_to_none=set_to_none)
            self._kept = self._heard = self.rounds.reloaded = False
            self._zeroed_at = -1 if set_to_none else self.rounds.backward
            if set_to_none:
                self.rounds.generation += 1

    def _look_for_unseen(self) -> None:
        """Warns of gradients that no hook has reported, in a loop where no ``step()`` would find them."""
        self._enrol_newcomers()
        if self._heard or self._kept or not self.roster.hooked:
            return
        unseen = [param for _, params in self._pending() for param in params]
        if unseen:
            self._rehook(unseen)
            warn_outside(_guards.unseen_gradients(self.roster.name(unseen[0])))

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
            replaces = self.rounds.fused and self.rounds.calls_step and self.options.strict
            self.rounds.end()
            self.rounds.reloaded = replaces
            self.roster.enrol()

    def skips_overflow(self) -> bool:
        """Ends a round that overflowed by letting the scaler skip its ``step()``, as it does for an ordinary one."""
        if not (self.rounds.overflowed or self.stepper.overflowed):
            return False
        if not self.stepper.reports_overflow(self.roster.all()[0].device):
            return False
        self.rounds.calls_step = True
        self.rounds.end()
        return True

    def has_fused_steps(self) -> bool:
        """Whether parameters were stepped in backward since the last ``step()``."""
        return self.rounds.fused or self.rounds.overflowed

    @_torch.never_compiled
    def measure_norm(
        self, loss: Tensor, max_norm: float, ledger: NormLedger, order: Iterable[Tensor], strict_finite: bool
    ) -> Tensor:
        """Walks backward once to measure the gradients, and prepares the next pass to clip them."""
        self._forget_failed_passes()
        if self._reduced():
            raise RuntimeError(_guards.CLIPS_REDUCED)
        pending = [param for _, params in self._pending() for param in params]
        measuring = self._measuring = Measurement(ledger, pending, self.stepper.unscales_finite, self.roster.name)
        self.rounds.overflowed = self._discarded = False
        try:
            torch.autograd.backward(loss, retain_graph=True)
            measuring.take_rest(param for param in order if self._would_hold_zeros(param))
        finally:
            self._measuring = None
            measuring.give_back()
        total = ledger.total(order)
        if strict_finite and not bool(torch.isfinite(total)):
            raise RuntimeError(_guards.nonfinite_norm(ledger.norm_type))
        self.rounds.overflowed = measuring.overflowed
        self.stepper.clip = clip_coefficient(total, max_norm)
        return total


@_torch.never_compiled
def _forward(engine: weakref.ref[Engine], method: str, *args: Any) -> None:
    """Calls a method of an engine that may be gone by then: autograd holds this, and must not hold it."""
    alive = engine()
    if alive is not None:
        getattr(alive, method)(*args)
