"""Private names of torch that this package relies on, each because no public one does it.

``tests/test_private_torch.py`` fails when one of them disappears or changes its meaning.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where an optimizer keeps its hooks; a working copy must not fire those of the original."""

_BACKWARD = torch.autograd.backward.__code__
_CUSTOM_BACKWARDS: set[CodeType] = {
    cast(Any, getattr(BackwardCFunction, name)).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
}


def graph_task_id() -> int:
    """Number of the running backward pass; -1 outside of one. Grows with every pass."""
    return int(torch._C._current_graph_task_id())


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the current backward pass has finished, before ``backward()`` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class Surroundings(NamedTuple):
    """Where a backward pass was called from.

    Attributes:
        nested: whether from inside another backward pass.
        node: the custom function of the outer pass whose ``backward`` made the call, if one did.
    """

    nested: bool
    node: torch.autograd.graph.Node | None


def surroundings() -> Surroundings:
    """Finds out, from inside a hook, whether the running backward pass is nested in another one.

    The Python stack is the only witness: re-entrant checkpointing calls ``torch.autograd.backward`` from
    within a node of the outer pass, on the same thread. On an accelerator the outermost call is on
    another thread's stack, which reads the same way: no such node above us.
    """
    passes = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _BACKWARD:
            passes += 1
        elif passes and frame.f_code in _CUSTOM_BACKWARDS:
            return Surroundings(True, frame.f_locals["self"])
        frame = frame.f_back
    return Surroundings(passes > 1, None)


def unprofiled_step(optimizer_class: type[Optimizer]) -> Callable[..., Any]:
    """``optimizer_class.step`` without the wrapper that runs step hooks and the profiler's record."""
    step: Any = optimizer_class.step
    return cast(Callable[..., Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


def bare_step(optimizer_class: type[Optimizer]) -> Callable[..., Any]:
    """``optimizer_class.step`` without any wrapper, its ``no_grad`` included."""
    return cast(Callable[..., Any], inspect.unwrap(optimizer_class.step))


def patched_by_scheduler(step: Any) -> bool:
    """Whether a method on an instance is the counting wrapper that LR schedulers put there."""
    return hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter")


def note_step_called(optimizer: Any) -> None:
    """Tells LR schedulers that the optimizer has stepped, as their wrapper of ``step`` would."""
    optimizer._opt_called = True
    optimizer._step_count = 1 + getattr(optimizer, "_step_count", 0)


def grad_norm(grad: Tensor, norm_type: float) -> Tensor:
    """Norm of one gradient by the very kernel that ``torch.nn.utils.clip_grad_norm_`` picks for it."""
    grad = grad.detach()
    if _has_foreach_support([grad], device=grad.device):
        return torch._foreach_norm([grad], norm_type)[0]
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type)
    return norm


def clipping_order(tensors: Sequence[Tensor]) -> list[int]:
    """The order in which ``torch.nn.utils.clip_grad_norm_`` adds up norms: by device and dtype."""
    groups = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return [index for _, indices in groups.values() for index in indices]
