"""What a recording says: bytes by category at the peak, at the end and over time."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from os import PathLike
from typing import Any

from ._places import FUSED_STEP
from ._tracker import ACTIVATION, GRADIENT, OTHER, PARAMETER, STATE, TEMPORARY, Tracker

_SAMPLES = 2000


@dataclass(frozen=True)
class Breakdown:
    """Bytes by category. ``other`` holds buffers, inputs and labels.

    Attributes:
        parameters: bytes of the parameters of model and optimizer.
        gradients: bytes of what is or will be in a parameter's ``.grad``.
        optimizer_state: bytes of the tensors in ``optimizer.state``.
        activations: bytes that forward made and backward finds alive, and outputs.
        temporaries: bytes of intermediate results of forward, backward and optimizer step.
        other: bytes of buffers and of tensors from outside, such as inputs.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    temporaries: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Sum over all categories, in bytes."""
        return sum(asdict(self).values())

    @property
    def largest(self) -> str:
        """Name of the category with the most bytes."""
        return max(asdict(self).items(), key=lambda item: item[1])[0]

    def to_dict(self) -> dict[str, int]:
        """Bytes by category, with their sum under ``"total"``."""
        return {**asdict(self), "total": self.total}


CATEGORIES = tuple(field.name for field in fields(Breakdown))
_NAMES = {
    PARAMETER: "parameters", GRADIENT: "gradients", STATE: "optimizer_state",
    ACTIVATION: "activations", TEMPORARY: "temporaries", OTHER: "other",
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """One point in time.

    Attributes:
        phase: ``"forward"`` (all that is neither of the others), ``"backward"``, ``"optimizer step"`` or
            ``"optimizer step in backward"``.
        module: dotted name of the module at work; empty outside the model, or where a step works on
            several at once.
        event: number of the allocation or release, counted from the start of the recording.
        seconds: seconds since the start of the recording.
    """

    phase: str
    module: str
    event: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module else self.phase


@dataclass(frozen=True)
class Sample:
    """Live bytes at one moment."""

    moment: Moment
    bytes: Breakdown


@dataclass(frozen=True)
class Span:
    """A stretch of one phase, from event ``start`` up to event ``stop`` (not included)."""

    phase: str
    start: int
    stop: int


class Recording:
    """Live memory of a stretch of training; made by `fused_optim.memory.record`.

    All figures are bytes that live tensors hold on one type of device, as seen between operations: what an
    operator allocates and releases before it returns is not in them. They can be read once the recording has
    ended. A recording that has ended can be pickled, to be compared with one of another process.

    Example:
        >>> import torch
        >>> from fused_optim import memory
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with memory.record(model, optimizer) as recording:
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     optimizer.step()
        >>> recording.peak.parameters
        40
    """

    def __init__(self, device: str) -> None:
        """Makes a recording without figures yet; call `fused_optim.memory.record` instead.

        Args:
            device: type of the device whose memory is recorded.
        """
        self.device = device
        self._figures: _Figures | None = None

    @property
    def peak(self) -> Breakdown:
        """Bytes by category at the moment when their sum was largest.

        Raises:
            RuntimeError: the recording is still running.
        """
        return self._ended().peak

    @property
    def peak_moment(self) -> Moment:
        """When the peak was.

        Raises:
            RuntimeError: the recording is still running.
        """
        return self._ended().peak_moment

    @property
    def final(self) -> Breakdown:
        """Bytes by category at the end.

        Raises:
            RuntimeError: the recording is still running.
        """
        return self._ended().final

    @property
    def timeline(self) -> list[Sample]:
        """Live bytes over time, at most 2000 samples; each is the fullest moment of its stretch.

        Raises:
            RuntimeError: the recording is still running.
        """
        return self._ended().timeline

    @property
    def phases(self) -> list[Span]:
        """The phases in order; a fused optimizer's steps belong to the backward that they run in.

        Raises:
            RuntimeError: the recording is still running.
        """
        return self._ended().phases

    def plot(self, path: str | PathLike[str], title: str = "") -> None:
        """Draws live memory over time, stacked by category, with the peak and the phases marked.

        Args:
            path: picture to write; its ending says the format.
            title: text above the picture.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: the recording is still running.
        """
        from ._plot import plot

        plot([self], [title], path)

    def to_dict(self) -> dict[str, Any]:
        """The recording as numbers, strings, lists and dictionaries; sizes in bytes, times in seconds.

        Raises:
            RuntimeError: the recording is still running.
        """
        return {
            "device": self.device,
            "peak": self.peak.to_dict(),
            "peak_moment": asdict(self.peak_moment),
            "final": self.final.to_dict(),
            "phases": [asdict(span) for span in self.phases],
            "timeline": [{**asdict(sample.moment), "bytes": sample.bytes.to_dict()} for sample in self.timeline],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text.

        Raises:
            RuntimeError: the recording is still running.
        """
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        if self._figures is None:
            return "memory recording, still running"
        rows = [("", "peak", "final")]
        for name in (*CATEGORIES, "total"):
            peak, final = getattr(self.peak, name), getattr(self.final, name)
            rows.append((name.replace("_", " "), format_bytes(peak), format_bytes(final)))
        lines = [f"{name:16}{peak:>12}{final:>12}" for name, peak, final in rows]
        return "\n".join([*lines, f"peak in {self.peak_moment} ({self.device} memory)"])

    def _ended(self) -> _Figures:
        if self._figures is None:
            raise RuntimeError(
                "expected a recording that has ended, but it is still running: read it after the `with` block"
            )
        return self._figures

    def _end(self, tracker: Tracker) -> None:
        self._figures = _Figures(tracker)


class _Figures:
    """The log of a tracker, summed up."""

    def __init__(self, tracker: Tracker) -> None:
        log = tracker.log
        # Only plain data, so that a recording can be pickled and holds no storage alive.
        self._ranks = bytes(max(log.category[number], TEMPORARY) for number in log.events)
        self._deltas, self._labels, self._seconds = log.deltas, log.labels, log.seconds
        self._places = tracker.places
        self._first = tracker.first_event
        peak, last = _highest(self._deltas), len(self._deltas) - 1
        totals = self._totals({peak, last})
        self.peak = totals[peak]
        self.peak_moment = self._moment(peak)
        self.final = totals[last]
        self.phases = self._spans()

    @property
    def timeline(self) -> list[Sample]:
        events = _fullest(self._deltas, self._first, _SAMPLES)
        totals = self._totals(set(events))
        return [Sample(self._moment(event), totals[event]) for event in events]

    def _totals(self, wanted: set[int]) -> dict[int, Breakdown]:
        running = dict.fromkeys(_NAMES, 0)
        found = {-1: Breakdown()}
        for event, (rank, delta) in enumerate(zip(self._ranks, self._deltas)):
            running[rank] += delta
            if event in wanted:
                found[event] = Breakdown(**{_NAMES[rank]: size for rank, size in running.items()})
        return found

    def _moment(self, event: int) -> Moment:
        if event < 0:
            return Moment(*self._places[0], 0, 0.0)
        return Moment(*self._places[self._labels[event]], event, self._seconds[event])

    def _spans(self) -> list[Span]:
        spans: list[Span] = []
        for event in range(self._first, len(self._labels)):
            phase = self._places[self._labels[event]][0]
            phase = "backward" if phase == FUSED_STEP else phase
            if spans and spans[-1].phase == phase:
                spans[-1] = Span(phase, spans[-1].start, event + 1)
            else:
                spans.append(Span(phase, event, event + 1))
        return spans


def _highest(deltas: array[int]) -> int:
    total = best = 0
    where = -1
    for event, delta in enumerate(deltas):
        total += delta
        if total > best:
            best, where = total, event
    return where


def _fullest(deltas: array[int], first: int, stretches: int) -> list[int]:
    """The events where the sum is highest in each of so many stretches, and the first and the last."""
    totals = list(accumulate(deltas))
    length = -(-(len(totals) - first) // stretches) or 1
    chosen = [
        max(range(start, min(start + length, len(totals))), key=totals.__getitem__)
        for start in range(first, len(totals), length)
    ]
    return sorted({first, *chosen, len(totals) - 1}) if totals else []


def format_bytes(size: float) -> str:
    """Writes a size in bytes with a readable unit (powers of 1000)."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
