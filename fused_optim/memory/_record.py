"""Recording the memory of a real training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath

import torch

from ._recording import Recording
from ._tracker import Tracker


@contextmanager
def record(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, snapshot: str | PathLike[str] | None = None
) -> Iterator[Recording]:
    """Records live memory by category while the body runs, on the device of the model's parameters.

    The body may hold any number of iterations, also parts of one. While the recording runs, each operation
    takes about 30 microseconds longer (200 on torch 2.1, which has to poll storages), so time a run without
    it. The log takes about 50 bytes an operation. It sees neither what compiled code does inside, nor what
    other threads allocate than the calling one and those of the backward passes that it starts.

    Args:
        model: the model that is trained. Its modules name the moment of the peak.
        optimizer: any optimizer, ordinary or fused. Its state and parameters are counted.
        snapshot: on CUDA, a file for the allocator's history, for PyTorch's memory visualizer:
            ``python -m torch.cuda._memory_viz trace_plot FILE -o history.html``. The history is switched off
            at the end, also where it was on before.

    Yields:
        The recording, whose figures can be read after the body; also after a body that raised.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` has no parameter groups and state.
        ValueError: there is no parameter to record, or ``snapshot`` is given and the model is not on CUDA.

    Example:
        >>> import torch
        >>> from fused_optim import memory
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with memory.record(model, optimizer) as recording:
        ...     for _ in range(2):
        ...         model(torch.ones(1, 4)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> recording.final.gradients
        0
    """
    device = _device_type(model, optimizer)
    if snapshot is not None and device != "cuda":
        raise ValueError(
            f"expected a model on CUDA for snapshot={fspath(snapshot)!r}, but it is on {device}: "
            "leave snapshot out, since only the CUDA allocator keeps a history"
        )
    recording = Recording(device)
    with _allocator_history(snapshot), _tracking(Tracker(model, optimizer, device), recording):
        yield recording


@contextmanager
def _tracking(tracker: Tracker, recording: Recording) -> Iterator[None]:
    try:
        tracker.start()
    except BaseException:
        tracker.detach()
        raise
    try:
        yield
    finally:
        try:
            tracker.stop()
        finally:
            recording._end(tracker)


@contextmanager
def _allocator_history(path: str | PathLike[str] | None) -> Iterator[None]:
    if path is None:
        yield
        return
    # The documentation of torch.cuda describes these under their private names; there are no public ones.
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        try:
            torch.cuda.memory._dump_snapshot(fspath(path))  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def _device_type(model: object, optimizer: object) -> str:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise TypeError(
            f"expected an optimizer with param_groups and state, got {type(optimizer).__name__}: "
            "pass the torch.optim.Optimizer that trains the model"
        )
    for parameter in model.parameters():
        return parameter.device.type
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return str(parameter.device.type)
    raise ValueError("expected a model or optimizer with parameters, got none: build the model before recording")
