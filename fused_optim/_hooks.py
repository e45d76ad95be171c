"""Hooks: how autograd tells that a gradient is complete, and how a backward pass begins and ends.

Nothing here touches optimizer state. Hooks hold neither an optimizer nor a parameter strongly, because
autograd keeps a hook alive as long as its parameter, out of the garbage collector's sight.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fused_optim import _torch
from fused_optim.distributed import Reduced


class GradientSink(Protocol):
    """What a hook reports to."""

    def gradient_ready(self, param: Tensor) -> None:
        """``param.grad`` is complete for the running backward pass."""


class GradientHook:
    """The post-accumulate-grad hook: one object for all parameters of an optimizer."""

    def __init__(self, sink: GradientSink) -> None:
        self._sink = weakref.ref(sink)
        self._warned = False

    def __call__(self, param: Tensor) -> None:
        """Called by autograd once ``param.grad`` holds the gradient of a backward pass."""
        if _torch.is_compiling():
            self._untraced(param)
            return
        sink = self._sink()
        if sink is not None:
            sink.gradient_ready(param)
        elif not self._warned:
            self._warned = True
            warnings.warn(
                "a BackwardFusedOptimizer that stepped these parameters inside backward() no longer exists: "
                "their gradients now stay in .grad and nothing steps them. Keep a reference to the optimizer, "
                "or call its unfuse() before dropping it.",
                stacklevel=2,
            )

    @_torch.never_compiled
    def _untraced(self, param: Tensor) -> None:
        self(param)

    def is_dead(self) -> bool:
        """Whether what it reported to no longer exists."""
        return self._sink() is None

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientHook:
        return self


def register(param: Tensor, hook: GradientHook) -> Any | None:
    """Registers ``hook`` on ``param``; returns the handle, or None where autograd takes no hook.

    A frozen parameter is hooked as well, by unfreezing it for a moment: it may be unfrozen later on. What
    cannot hold a hook (integer weights, a tensor that is not a leaf) has its gradient stepped by ``step()``.
    """
    frozen = not param.requires_grad
    _remove_dead(param)
    try:
        if frozen:
            param.requires_grad_(True)
        return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    finally:
        if frozen and param.requires_grad:
            param.requires_grad_(False)


def _remove_dead(param: Tensor) -> None:
    # Whoever drives the parameter from now on, it is no longer true that nothing does.
    hooks = _torch.hooks_of(param)
    for key, hook in list(hooks.items()):
        if isinstance(hook, GradientHook) and hook.is_dead():
            del hooks[key]


class Run:
    """Parameters of one group that became ready one after the other, to be stepped together."""

    __slots__ = ("nbytes", "params")

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.nbytes = 0


class Pass:
    """One backward pass: a graph task of autograd.

    Attributes:
        thread: the thread that the hooks of this pass run on.
        nested: whether it was started inside another pass (re-entrant checkpointing).
        on_ready: what this pass does with a complete gradient; takes the sink first.
        reduced: parameters, by id, whose gradients are complete only when the pass is over.
        runs: small parameters that wait to be stepped together, by group and stream.
    """

    __slots__ = ("nested", "on_ready", "reduced", "runs", "thread")

    def __init__(
        self, on_ready: Callable[[Any, Tensor, Pass], None], nested: bool, reduced: dict[int, Reduced]
    ) -> None:
        self.thread = threading.get_ident()
        self.nested = nested
        self.on_ready = on_ready
        self.reduced = reduced
        self.runs: dict[Any, Run] = {}

    def take_runs(self) -> list[tuple[Any, Run]]:
        """Returns the waiting runs, in the order of their first gradients, and forgets them."""
        runs, self.runs = list(self.runs.items()), {}
        return runs


def when_outer_pass_continues(node: torch.autograd.graph.Node, callback: Callable[[], None]) -> None:
    """Calls ``callback`` once, inside the pass that executes ``node``, when that pass goes on after ``node``.

    A nested pass cannot see the pass around it; the nodes that follow ``node`` run inside it.
    """
    handles: list[Any] = []
    nested = pass_id()

    def continued(_: Any) -> None:
        if pass_id() == nested:  # a weight that both passes lead to
            return
        for handle in handles:
            handle.remove()
        if handles:
            handles.clear()
            callback()

    for following, _ in node.next_functions:
        if following is not None:
            handles.append(following.register_prehook(continued))


def stream_of(param: Tensor) -> Any:
    """The stream a hook of ``param``, on CUDA, runs on: gradients of different streams must not be stepped together."""
    return torch.cuda.current_stream(param.device)


pass_id = _torch.graph_task_id
at_end_of_pass = _torch.at_end_of_pass
surroundings = _torch.surroundings
