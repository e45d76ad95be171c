"""Refusals: every way a run could silently differ, and the words that say so. Reads only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fused_optim import _torch
from fused_optim._shared import hyperparameters, same, writes

NOTHING_HAD_A_GRADIENT = (
    "opt.step() ended a round in which no parameter of this BackwardFusedOptimizer had a gradient, so nothing "
    "was trained. Were the parameters replaced after the optimizer was built (by fully_shard(), or by a "
    "conversion such as model.to(dtype))? Then build the optimizer after that. This is said once."
)
CLIPPED_WITHOUT_BACKWARD = (
    "opt.clip_grad_norm_(loss, ...) only measures: call loss.backward() after it, then opt.step(). "
    "No parameter was changed."
)
CLIPS_REDUCED = (
    "opt.clip_grad_norm_(loss, ...) walks backward twice, and DistributedDataParallel exchanges gradients in the "
    "first walk only. Run loss.backward() inside `with opt.accumulate():`, then call "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) and opt.step(): that is exact, and takes no "
    "more memory, as DistributedDataParallel keeps all gradients anyway."
)
NEEDS_STEP = (
    "DistributedDataParallel wraps parameters of this optimizer together with others, and lets parameters go "
    "unused: on a rank where a backward pass uses none of this optimizer's, nothing would step the gradients "
    "that come from the other ranks. Call opt.step() at the end of every iteration, or give all parameters of "
    "the wrapped model to one optimizer."
)
SCALED_WITHOUT_SCALER = (
    "GradScaler.step(opt) was called, but the gradients were applied inside backward() while still scaled. "
    "Pass the scaler: BackwardFusedOptimizer(..., grad_scaler=scaler). The parameters of this backward pass "
    "have been stepped with scaled gradients: start again from the last checkpoint."
)
LOADED_OVER_STEP = (
    "opt.step() was called after load_state_dict(), without a backward pass in between. The gradients of the pass "
    "before were applied inside backward(), and what they changed has been loaded over, whereas an ordinary "
    "optimizer would apply them to what was loaded. Call opt.step() before load_state_dict(), or run a new backward "
    "pass after it. strict=False allows it."
)
WEIGHTS_WRITTEN = (
    "a parameter was written in place between backward() and opt.step(). It had already been stepped, whereas an "
    "ordinary optimizer would step it after that. Write it before backward(), or after opt.step(). strict=False "
    "allows it."
)
DISCARDS_APPLIED = (
    "zero_grad() would discard gradients, but this optimizer already applied them inside backward(), and no "
    "step() has ended that round. If the loss belongs to another network (the generator's, say), freeze "
    "this one with requires_grad_(False) during that backward pass, or run it inside `with opt.accumulate():`. "
    "If a step is to be skipped (a NaN loss, an interrupted backward), decide before backward(). If backward() "
    "was meant to train, call opt.step() before zero_grad(). strict=False allows it."
)


def aliased(name: str) -> str:
    """The message for gradients of two parameters over the same memory, which something is going to write."""
    return (
        f"the gradient of {name} is the same memory as that of another parameter, as `a.view(-1) + b.view(-1)` makes "
        "it, and scaling, clipping or changing one changes both in an ordinary loop. Make the two differ, for "
        "example by `1 * a.view(-1)`, or run backward() inside `with opt.accumulate():` and then call opt.step()."
    )


def twice_in_one_backward(name: str) -> str:
    """The message for a parameter whose gradient arrives in parts within one backward pass."""
    return (
        f"{name} received a second gradient within one backward pass, and the first part was taken as the whole: "
        "this happens when a weight is shared between segments of re-entrant activation checkpointing, or when "
        "several threads run backward through it at once. Use "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or run backward inside "
        "`with opt.accumulate():` and then call opt.step()."
    )


def second_step_in_round(name: str) -> str:
    """The message for unannounced accumulation."""
    return (
        f"{name} received a second gradient before opt.step() ended the round; the first one has already been "
        "applied, so that an ordinary optimizer, which would have applied their sum, gives another result. "
        "Accumulating: run every backward() but the last inside `with opt.accumulate():`, or pass "
        "accumulate_when=. Several losses: add them up and call backward() once. A network that this loss only "
        "passes through: freeze it with requires_grad_(False). strict=False allows it."
    )


def taken_over(optimizer_class: str) -> str:
    """The message for a ``step()`` of an optimizer that ``from_optimizer`` took over."""
    return (
        f"step() was called on the {optimizer_class} that BackwardFusedOptimizer.from_optimizer() took over: call "
        "it on the BackwardFusedOptimizer, which has to know when a round ends, or call unfuse() on that one first."
    )


def unfinished_backward(name: str) -> str:
    """The message for a ``step()`` after a backward pass of which no end was seen."""
    return (
        f"opt.step() was called after a backward pass that did not reach its end, so that {name} was not stepped, "
        "whereas an ordinary optimizer would step whatever gradients there are. If backward() raised an "
        "exception, go on from the last checkpoint. If it ran under compiled autograd, which skips the callback at "
        "the end of a pass, switch that off. strict=False drops such gradients."
    )


def unseen_gradients(name: str) -> str:
    """The warning for gradients that ``zero_grad()`` finds, and that neither a hook nor ``step()`` has seen."""
    return (
        f"zero_grad() drops gradients, of {name} and perhaps others, that were never applied: the hooks did not see "
        "them, because the parameters were converted or replaced after the optimizer was built (by fully_shard(), or "
        "by model.to() under torch.__future__.set_swap_module_params_on_conversion()). From here on they are seen; "
        "build the optimizer after such a conversion. Gradients set by hand are applied by opt.step()."
    )


def cut_into_rounds(optimizer_class: str) -> str:
    """The message for a first round of several backward passes, each taken for a round of its own."""
    return (
        "there were several backward() calls before the first opt.step(), each of which was taken for a whole "
        f"round (as in a loop that never calls opt.step()), and {optimizer_class} counts rounds or moves "
        "parameters without gradient, so that the result differs. Add the losses up and call backward() once, or "
        "run every backward() but the last inside `with opt.accumulate():`. Start again; strict=False allows it."
    )


def nonfinite_norm(norm_type: float) -> str:
    """The message for ``error_if_nonfinite=True``."""
    return (
        f"the total norm of order {norm_type} of the gradients is not finite, so they cannot be clipped. No "
        "parameter was changed. Pass error_if_nonfinite=False to clip all the same."
    )


def check_class(optimizer_class: Any, fused_class: type[Optimizer]) -> None:
    """Refuses what is no optimizer class, or one that cannot step inside backward.

    Raises:
        TypeError: if it is no subclass of ``torch.optim.Optimizer``.
        ValueError: if its ``step`` needs a closure, or it is ``fused_class``.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "optimizer_class must be a subclass of torch.optim.Optimizer, such as torch.optim.AdamW, but got "
            f"{optimizer_class!r}. For an optimizer that is already built, use "
            "BackwardFusedOptimizer.from_optimizer(optimizer)."
        )
    if issubclass(optimizer_class, fused_class):
        raise ValueError(f"{optimizer_class.__name__} already steps inside backward(): give it the ordinary class.")
    if issubclass(optimizer_class, LBFGS) or _needs_closure(optimizer_class):
        raise ValueError(needs_closure(optimizer_class))


def needs_closure(optimizer_class: type[Optimizer]) -> str:
    """The message for an optimizer that evaluates the loss itself."""
    return (
        f"{optimizer_class.__name__}.step() needs a closure: it evaluates the loss several times a step, which "
        f"cannot be done inside backward(). Use {optimizer_class.__name__} itself."
    )


def _needs_closure(optimizer_class: type[Optimizer]) -> bool:
    parameters = list(inspect.signature(_torch.bare_step(optimizer_class)).parameters.values())
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters[1:]
    )


def check_whole(whole: Optimizer) -> None:
    """Refuses an optimizer whose groups or flags cannot be stepped apart.

    Raises:
        ValueError: if it differentiates through its step, or wraps another optimizer.
    """
    name = type(whole).__name__
    inner = [key for key, value in vars(whole).items() if isinstance(value, Optimizer)]
    if inner or not {"param_groups", "state"} <= vars(whole).keys():
        raise ValueError(
            f"{name} wraps another optimizer{f' ({inner[0]})' if inner else ''}, which would step all its "
            "parameters at once. Wrap the inner optimizer's class instead, or use the ordinary optimizer."
        )
    for index, group in enumerate(whole.param_groups):
        if group.get("differentiable"):
            raise ValueError(
                f"parameter group {index} has differentiable=True: a step inside backward() cannot be "
                "differentiated. Pass differentiable=False, or use the ordinary optimizer."
            )
    step = vars(whole).get("step")
    if step is not None and not _torch.patched_by_scheduler(step):
        raise ValueError(
            f"step() of this {name} was replaced on the instance, and a step inside backward() would not run "
            "the replacement. Put it into a subclass, or remove it."
        )


def listed_once(listed: Sequence[tuple[int, Tensor]], name: Callable[[Tensor], str]) -> dict[int, tuple[int, Tensor]]:
    """Returns (group index, parameter) by id of the parameter.

    Raises:
        ValueError: if one is listed twice: an ordinary step would step it twice, or not, as its implementation is.
    """
    members: dict[int, tuple[int, Tensor]] = {}
    for index, param in listed:
        if id(param) in members:
            raise ValueError(f"{name(param)} is listed twice in the parameter groups: list it once.")
        members[id(param)] = index, param
    return members


def check_distinct_memory(params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
    """Refuses two parameters over the same memory: stepping one changes the other in mid-backward.

    Raises:
        ValueError: if two of ``params`` overlap.
    """
    spans = sorted((span for span in map(_span, params) if span is not None), key=lambda span: span[:3])
    for first, second in zip(spans, spans[1:]):
        if first[0] == second[0] and second[1] < first[2]:
            raise ValueError(
                f"{name(first[3])} and {name(second[3])} share memory: stepping one inside backward() would "
                "change the other before its gradient is complete. Use one parameter in both places (tied "
                "weights), or give each its own memory."
            )


def _span(param: Tensor) -> tuple[str, int, int, Tensor] | None:
    local = getattr(param, "_local_tensor", param)
    try:
        start = local.data_ptr()
        if start == 0 or local.numel() == 0:
            return None
        extent = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride()))
    except (RuntimeError, NotImplementedError):
        return None
    return str(local.device), start, start + extent * local.element_size(), param


def count_writes(params: Sequence[Tensor]) -> int:
    """How often all ``params`` were written in place, as far as autograd knows."""
    return sum(map(writes, params))


def view_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hyperparameters of all groups as a round sees them."""
    return [{key: _frozen(value) for key, value in hyperparameters(group).items()} for group in groups]


def change_in(view: list[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> str | None:
    """The message for hyperparameters that changed between a fused backward and ``step()``, if one did."""
    for index, (before, group) in enumerate(zip(view, groups)):
        for key, value in before.items():
            if key in group and not same(value, _frozen(group[key])):
                return (
                    f"{key!r} of parameter group {index} was changed between backward() and opt.step(). The "
                    "parameters have already been stepped with the value before, whereas an ordinary "
                    "optimizer would use the new one: change it before backward(), or after opt.step(). "
                    "strict=False allows it."
                )
    return None


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TensorAsSeen(value)
    if type(value) is list:
        return list(value)
    return dict(value) if type(value) is dict else value


class _TensorAsSeen:
    """A tensor and how often it had been written: comparing it needs no look at a device's memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = writes(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorAsSeen) and self._tensor is other._tensor and self._version == other._version

    def __hash__(self) -> int:
        return id(self._tensor)


def check_loss(loss: Any) -> None:
    """Refuses a loss that cannot be walked backward.

    Raises:
        TypeError: if ``loss`` is no tensor.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss must be a tensor, as returned by the model's loss function, but got {loss!r}.")


def checked_order(params: list[Tensor], own: list[Tensor]) -> list[Tensor]:
    """Returns ``params`` if they are the optimizer's own, in whatever order.

    Raises:
        ValueError: if a parameter is missing or is not the optimizer's.
    """
    if {id(param) for param in params} != {id(param) for param in own}:
        raise ValueError(
            f"parameters must be the {len(own)} parameters of this optimizer in the order in which their norms "
            f"are added up, but got {len(params)} tensors that are not the same ones."
        )
    return params


def check_options(options: Any) -> None:
    """Refuses options of the wrong kind.

    Raises:
        TypeError: if ``bucket_cap_mb`` is no number, ``accumulate_when`` cannot be called, or ``grad_scaler`` is
            no scaler.
        ValueError: if ``bucket_cap_mb`` is negative.
    """
    if not isinstance(options.bucket_cap_mb, (int, float)):
        raise TypeError(f"bucket_cap_mb must be a number (MiB), but got {options.bucket_cap_mb!r}.")
    if not options.bucket_cap_mb >= 0:
        raise ValueError(f"bucket_cap_mb must be 0 or more (MiB), but got {options.bucket_cap_mb!r}.")
    if options.accumulate_when is not None and not callable(options.accumulate_when):
        raise TypeError(
            "accumulate_when must be a function without arguments that returns True while gradients are to be "
            f"accumulated, but got {options.accumulate_when!r}."
        )
    if options.grad_scaler is not None and not hasattr(options.grad_scaler, "unscale_"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, but got {options.grad_scaler!r}.")
