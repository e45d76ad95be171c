"""Pictures of recordings. The only module that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from ._places import BACKWARD, FORWARD, FUSED_STEP, STEP
from ._recording import Breakdown, Moment, Recording, Sample, format_bytes

# Colours of Okabe and Ito, which the common kinds of colour blindness keep apart; from the bottom of the
# stack upwards.
COLOURS = {
    "parameters": "#0072B2",
    "optimizer_state": "#56B4E9",
    "activations": "#009E73",
    "gradients": "#D55E00",
    "temporaries": "#F0E442",
    "other": "#999999",
}
_PHASES = {FORWARD: "F", BACKWARD: "B", STEP: "S"}
# Eight inches of 10-point text stay legible where a page shows the picture 830 pixels wide.
_WIDTH, _HEIGHT, _DPI = 8.3, 2.9, 200


def compare(
    first: Recording,
    second: Recording,
    path: str | PathLike[str],
    titles: tuple[str, str] = ("first", "second"),
) -> None:
    """Draws two recordings one above the other, on the same scale.

    Args:
        first: the upper recording.
        second: the lower recording.
        path: picture to write; its ending says the format.
        titles: texts above the two recordings.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: a recording is still running.

    Example:
        >>> import torch
        >>> from fused_optim import memory
        >>> def run(**options):
        ...     model = torch.nn.Linear(64, 64)
        ...     optimizer = torch.optim.Adam(model.parameters(), **options)
        ...     with memory.record(model, optimizer) as recording:
        ...         model(torch.ones(1, 64)).sum().backward()
        ...         optimizer.step()
        ...     return recording
        >>> first, second = run(foreach=True), run(foreach=False)
        >>> memory.compare(first, second, "memory.png", ("foreach", "loop"))  # doctest: +SKIP
    """
    plot([first, second], list(titles), path)


def plot(recordings: Sequence[Recording], titles: Sequence[str], path: str | PathLike[str]) -> None:
    """Draws recordings one above the other on one scale, into a file.

    Args:
        recordings: ended recordings.
        titles: text above each.
        path: picture to write.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: a recording is still running.
    """
    draw(recordings, titles).savefig(path)


def draw(recordings: Sequence[Recording], titles: Sequence[str]) -> Any:
    """Draws recordings like `plot`, and returns the figure."""
    timelines = [recording.timeline for recording in recordings]
    figure = _figure_type()(figsize=(_WIDTH, 0.6 + _HEIGHT * len(recordings)), dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(recordings), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    used = [name for name in COLOURS if any(_shows(timeline, name) for timeline in timelines)]
    for panel, recording, timeline, title in zip(panels, recordings, timelines, titles):
        _draw_panel(panel, recording, timeline, used)
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    panels[0].set_xlim(0, max(_times(timeline)[-1] for timeline in timelines))
    panels[0].set_ylim(0, 1.28 * max(recording.peak.total for recording in recordings) / 1e9)
    panels[-1].set_xlabel("time, in allocations and releases of memory")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(used), frameon=False, fontsize=9.5)
    return figure


def _draw_panel(panel: Any, recording: Recording, timeline: list[Sample], used: list[str]) -> None:
    times = _times(timeline)
    layers = [[getattr(sample.bytes, name) / 1e9 for sample in timeline] for name in used]
    names = [name.replace("_", " ") for name in used]
    colours = [COLOURS[name] for name in used]
    panel.stackplot(times, layers, labels=names, colors=colours, step="post", linewidth=0)
    panel.set_ylabel("live memory, GB")
    panel.spines[["top", "right"]].set_visible(False)
    first = timeline[0].moment.event
    _mark_peak(panel, recording.peak, recording.peak_moment, recording.peak_moment.event - first, times[-1])
    _mark_phases(panel, recording, first)


def _mark_peak(panel: Any, peak: Breakdown, moment: Moment, time: int, end: int) -> None:
    height = peak.total / 1e9
    left = time < end / 2
    panel.axhline(height, color="black", linewidth=0.8, linestyle=":")
    panel.plot([time], [height], marker="v", color="black", markersize=7, clip_on=False)
    panel.annotate(
        f"peak {format_bytes(peak.total)}, {moment.phase}",
        (time, height),
        xytext=(8 if left else -8, 7),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom",
        fontsize=10,
        fontweight="bold",
    )


def _mark_phases(panel: Any, recording: Recording, first: int) -> None:
    """Writes the phases into a strip along the upper edge: a letter each, which the title explains."""
    strip = panel.get_xaxis_transform()
    end = recording.phases[-1].stop - first
    for index, span in enumerate(recording.phases):
        start, stop = span.start - first, span.stop - first
        panel.axvspan(start, stop, 0.93, 1.0, facecolor="#DDDDDD" if index % 2 else "#F2F2F2", linewidth=0)
        if stop - start > 0.018 * end:
            middle = (start + stop) / 2
            panel.text(middle, 0.962, _PHASES[span.phase], transform=strip, ha="center", va="center", fontsize=9)
    fused = any(sample.moment.phase == FUSED_STEP for sample in recording.timeline)
    letters = "F forward, B backward with optimizer step" if fused else "F forward, B backward, S optimizer step"
    panel.set_title(letters, loc="right", fontsize=9.5)


def _times(timeline: list[Sample]) -> list[int]:
    # Seconds would show how long the recorder takes for an operation, and what else the machine did.
    return [sample.moment.event - timeline[0].moment.event for sample in timeline]


def _shows(timeline: list[Sample], name: str) -> bool:
    # A layer thinner than a pixel would only fill the legend.
    top = max((sample.bytes.total for sample in timeline), default=0)
    return any(getattr(sample.bytes, name) > 0.003 * top for sample in timeline)


def _figure_type() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a recording needs matplotlib: pip install matplotlib") from error
    return Figure
