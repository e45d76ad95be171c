"""Private names of torch that this package relies on, each because no public one does it.

``tests/test_private_torch.py`` fails when one of them disappears or changes its meaning.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

Function = TypeVar("Function", bound=Callable[..., Any])

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


graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the running backward pass; -1 outside of one. Grows with every pass."""


never_compiled: Callable[[Function], Function] = getattr(torch, "_disable_dynamo")  # noqa: B009
"""Decorates what dynamo must not trace when it compiles a function that calls ``backward()`` or ``step()``:
compiled, an optimizer rounds otherwise. ``torch.compiler.disable`` would import dynamo while it decorates."""


is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
"""Whether dynamo is tracing: cheaper to ask at every gradient than what ``never_compiled`` costs."""


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the current backward pass has finished, before ``backward()`` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def hooks_of(param: Tensor) -> dict[int, Any]:
    """The post-accumulate-grad hooks of ``param``, by the id of their handles."""
    return getattr(param, "_post_accumulate_grad_hooks", None) or {}


def revive_hooks(param: Tensor) -> None:
    """Tells autograd of the post-accumulate-grad hooks of ``param``, of which ``swap_tensors`` has robbed it."""
    if hooks_of(param):
        param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks


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


def raise_versions(params: Sequence[Tensor]) -> None:
    """Tells autograd that ``params`` were written: the fused kernels do not."""
    for param in params:
        torch.autograd.graph.increment_version(param)


def _storage_uses(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()  # held while asked: the address of a storage that is gone means nothing
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses


_USES_OF_A_SOLE_OWNER = _storage_uses(torch.empty(1))


def owns_memory(tensor: Tensor) -> bool:
    """Whether nobody else, autograd included, holds the memory of ``tensor``; False where that cannot be told."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.layout is not torch.strided:
        return False
    try:
        if local.untyped_storage().device.type == "meta":  # fake tensors have no memory to share
            return True
        return _storage_uses(local) <= _USES_OF_A_SOLE_OWNER
    except (RuntimeError, NotImplementedError):  # a subclass without storage
        return False


class Memory(NamedTuple):
    """Where a tensor lies.

    Attributes:
        storage: a weak reference, equal for tensors of one storage.
        start, end: its bytes in there.
    """

    storage: StorageWeakRef
    start: int
    end: int

    def overlaps(self, other: Memory) -> bool:
        """Whether both may hold the same bytes; False once one of them is gone."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end


def memory_of(tensor: Tensor) -> Memory | None:
    """Where ``tensor`` lies, without keeping it; None where that cannot be told."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.layout is torch.sparse_coo:
        local = local._values()
    if local.layout is not torch.strided or type(local) not in (Tensor, torch.nn.Parameter) or not local.numel():
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride()))
    start, size = int(local.storage_offset()), local.element_size()
    reference = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
    return Memory(reference, start * size, (start + int(extent)) * size)


def capture_check(optimizer_class: type[Optimizer]) -> str | None:
    """Name of the method by which the optimizers of ``torch.optim`` refuse capture in a CUDA graph, if any.

    It looks at the whole optimizer and costs a tenth of a small step, so it is called once a round only.
    """
    names = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    return next((name for name in names if hasattr(optimizer_class, name)), None)


def unprofiled_step(optimizer_class: type[Optimizer]) -> Callable[..., Any]:
    """``optimizer_class.step`` without the wrapper that runs step hooks and the profiler's record."""
    step: Any = optimizer_class.step
    profiled = getattr(step, "hooked", False) and not _is_foreign(step)
    return cast(Callable[..., Any], step.__wrapped__ if profiled else step)


def bare_step(optimizer_class: type[Optimizer]) -> Callable[..., Any]:
    """``optimizer_class.step`` without any wrapper of torch's, its ``no_grad`` included.

    What a program has wrapped around the method of a class of torch's stays.
    """
    return cast(Callable[..., Any], inspect.unwrap(optimizer_class.step, stop=_is_foreign))


def _is_foreign(step: Any) -> bool:
    # Not `__module__`, which functools.wraps() copies.
    return not str(getattr(step, "__globals__", {}).get("__name__")).startswith("torch.")


def patched_by_scheduler(step: Any) -> bool:
    """Whether a method on an instance is the counting wrapper that LR schedulers put there."""
    return hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter")


def note_step_called(optimizer: Any) -> None:
    """Tells LR schedulers that the optimizer has stepped, as their wrapper of ``step`` would.

    Only where there is such a wrapper: an optimizer may have a ``_step_count`` of its own.
    """
    wrapper = vars(optimizer).get("step")
    if hasattr(wrapper, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True
    if hasattr(wrapper, "_with_counter"):
        optimizer._step_count += 1


def remembers(scaler: Any, optimizer: Any) -> bool:
    """Whether a ``GradScaler`` keeps books on an object, by its id, until its next ``update()``."""
    return id(optimizer) in getattr(scaler, "_per_optimizer_states", ())


def overflow_if_unscaled(scaler: Any, optimizer: Any) -> bool | None:
    """Whether ``scaler.unscale_(optimizer)`` found an overflow; None if it was not called since ``update()``."""
    if not remembers(scaler, optimizer):
        return None
    books = scaler._per_optimizer_states[id(optimizer)]
    if books["stage"].name != "UNSCALED" or not books["found_inf_per_device"]:
        return None
    return any(bool(found) for found in books["found_inf_per_device"].values())


def report_overflow(scaler: Any, optimizer: Any, device: torch.device) -> None:
    """Has ``scaler.step(optimizer)`` skip the step, as if ``unscale_(optimizer)`` had found an overflow."""
    books = scaler._per_optimizer_states[id(optimizer)]
    books["stage"] = type(books["stage"]).UNSCALED
    books["found_inf_per_device"] = {device: torch.ones((), device=device)}


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
