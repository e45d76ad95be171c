"""Rounds: what one ordinary ``step()`` would cover, and whether what was done can still be that."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fused_optim import _guards
from fused_optim._norms import NormLedger
from fused_optim._roster import Roster, Slot
from fused_optim._stepper import Options, Stepper
from fused_optim._units import Traces


class Rounds:
    """Counts what has been stepped when.

    A round ends with ``step()``, or, in a loop that has not called it yet, with the outermost backward pass. As
    such a loop may still turn out to call it, the rounds since the last ``step()`` are looked at together then:
    they are one interval.

    Attributes:
        backward: number of the outermost backward pass; grows at its end.
        interval: number of the interval between two ``step()`` calls.
        generation: number of the ``zero_grad(set_to_none=True)``.
        fused: whether a parameter was stepped inside backward in this interval.
        calls_step: whether the loop is known to end fused rounds with ``step()``.
        overflowed: whether a measuring pass found an overflow, so that this round is skipped.
        reloaded: whether ``load_state_dict`` replaced what this interval had stepped.
    """

    def __init__(self, whole: Optimizer, roster: Roster, stepper: Stepper, options: Options) -> None:
        self.backward = 0
        self.interval = 0
        self.generation = 0
        self.fused = False
        self.calls_step = False
        self.overflowed = False
        self.reloaded = False
        self.closed = 0
        self.grad_norm: Tensor | None = None
        self._open = False
        self._whole = whole
        self._roster = roster
        self._stepper = stepper
        self._options = options
        self._versions = 0
        self._view: list[dict[str, Any]] = []
        self._start_interval()

    def _start_interval(self) -> None:
        self.closed = 0
        self._repeated: str | None = None
        self._changed: str | None = None
        self._traces = Traces(False, False)
        self._earlier_norms = NormLedger(2.0)

    # What happens in a round

    def mark(self, slot: Slot, param: Tensor) -> None:
        """Notes that ``param`` is stepped now, inside backward.

        Raises:
            RuntimeError: if it was stepped already in this backward pass, or, in strict loops that call
                ``step()``, in this round.
        """
        if slot.backward == self.backward or slot.interval == self.interval:
            self._check_second(slot, param)
        slot.backward, slot.interval, slot.generation = self.backward, self.interval, self.generation
        self.fused = True

    def mark_pending(self, slot: Slot, param: Tensor) -> None:
        """Notes that ``param`` is stepped now, outside of a backward pass."""
        if slot.interval == self.interval:
            self._repeated = self._repeated or self._roster.name(param)
        slot.backward, slot.interval, slot.generation = self.backward - 1, self.interval, self.generation

    def _check_second(self, slot: Slot, param: Tensor) -> None:
        if slot.backward == self.backward:
            raise RuntimeError(_guards.twice_in_one_backward(self._roster.name(param)))
        if self.calls_step and self._options.strict:
            raise RuntimeError(_guards.second_step_in_round(self._roster.name(param)))
        self._repeated = self._repeated or self._roster.name(param)

    def open(self) -> None:
        """Begins a round, unless one is open: from here on its hyperparameters and counters are fixed."""
        if self._open:
            return
        self._open = True
        if self.closed and self._repeated is None:
            self._earlier_norms.include(self._stepper.norms)
            self._changed = self._changed or _guards.change_in(self._view, self._whole.param_groups)
        self._stepper.begin_round()
        self._view = _guards.view_of(self._whole.param_groups)

    def reopen(self) -> None:
        """Goes on with the round that the end of backward closed, for the gradients still pending."""
        self._open = True
        self._stepper.norms.include(self._earlier_norms)

    def close(self) -> None:
        """Commits what the round wrote, once."""
        if not self._open:
            return
        # Once a parameter has come again, the loop never calls step(), or step() raises anyway.
        traces = self._stepper.unit.commit(watch=not self.calls_step and self._repeated is None)
        self._traces = Traces(*map(max, self._traces, traces))
        self._view = _guards.view_of(self._whole.param_groups)
        self._open = False
        self.closed += 1
        self._stepper.clip = None
        self.note_norm()

    def note_norm(self) -> None:
        """Adds up the norms of the round, with ``track_grad_norm``."""
        if self._options.track_grad_norm:
            self.grad_norm = self._stepper.norms.total(self._roster.all())

    def note_values(self) -> None:
        """Notes how often the parameters have been written by the end of backward."""
        self._versions = self._count_writes()

    def _count_writes(self) -> int:
        return _guards.count_writes(self._roster.all()) if self._options.strict else 0

    def end(self) -> None:
        """Ends the round and the interval, whatever became of them."""
        self._open = False
        self.fused = self.overflowed = self.reloaded = False
        self.interval += 1
        self._stepper.clip = None
        self._stepper.overflowed = False
        self._start_interval()

    # Whether it can be what an ordinary step() would have done

    def check(self, pending: list[Tensor]) -> None:
        """Looks at the interval as a whole, when ``step()`` ends it.

        Raises:
            RuntimeError: if an ordinary ``step()`` would have given another result.
        """
        repeated = self._repeated or self._stepped_and(pending)
        if repeated is not None:
            raise RuntimeError(_guards.second_step_in_round(repeated))
        changed = self._changed or _guards.change_in(self._view, self._whole.param_groups)
        if changed is not None:
            raise RuntimeError(changed)
        if self._was_cut(pending):
            raise RuntimeError(_guards.cut_into_rounds(type(self._whole).__name__))
        if self._versions != self._count_writes():
            raise RuntimeError(_guards.WEIGHTS_WRITTEN)

    def _stepped_and(self, pending: list[Tensor]) -> str | None:
        """Names a parameter that was stepped in backward and holds a gradient again, if there is one."""
        for param in pending:
            slot = self._roster.slots.get(id(param))
            if slot is not None and slot.interval == self.interval:
                return self._roster.name(param)
        return None

    def _was_cut(self, pending: list[Tensor]) -> bool:
        """Whether backward ended rounds that this ``step()`` ought to have ended, and it made a difference."""
        wrote, moved = self._traces
        return (wrote or moved) if self.closed > 1 else (moved and bool(pending))
