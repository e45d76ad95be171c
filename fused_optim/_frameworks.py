"""Clipping by a framework or a loop: it would find gradients that have already been applied.

Nothing of a framework is imported, and nothing is asked of it but public attributes of its trainer, which is
found on the stack of the ``step()`` call: no framework tells an optimizer that it is about to clip.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

_LIBRARIES = frozenset(
    {"fused_optim", "torch", "accelerate", "transformers", "lightning", "pytorch_lightning", "lightning_fabric"}
)
_LIGHTNING = ("lightning", "pytorch_lightning")
_CLIPPERS = frozenset({"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_gradients"})


class ClippingWatch:
    """Looks for clipping that cannot work, in the first rounds of one optimizer; costs nothing afterwards."""

    def __init__(self) -> None:
        self._looks = 0

    def look(self, strict: bool, clipped: bool) -> None:
        """Called by the ``step()`` that ends a fused round.

        What a trainer is configured to do is certain, and refused in the first round. What the calling code only
        mentions may never run, and is warned of in the second one: only from then on is ``clipped`` known.

        Args:
            strict: whether to raise rather than warn.
            clipped: whether the optimizer's own ``clip_grad_norm_`` clipped this round.

        Raises:
            RuntimeError: with ``strict``, if a trainer that calls is configured to clip.
        """
        if self._looks > 1:
            return
        callers = _callers()
        if self._looks == 0:
            configured = _configured(callers)
            if configured is not None and strict:
                raise RuntimeError(f"{configured} {_STEPPED}")
            _warn(configured or _overridden(callers), callers)
        elif not clipped:
            _warn(_mentioned(callers), callers)
        self._looks += 1

    def refuse(self) -> None:
        """Called before any parameter has moved: by a ``step()`` with a closure, and when state is loaded.

        Accelerate, and with it the Transformers Trainer, loads the state of every optimizer that it prepares.

        Raises:
            RuntimeError: if a trainer that calls is configured to clip.
        """
        configured = _configured(_callers()) if self._looks == 0 else None
        if configured is not None:
            raise RuntimeError(configured)


def _callers() -> list[FrameType]:
    """The frames outside of this module, innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def warn_outside(message: str) -> None:
    """Warns in the name of the code that called into this package, through whatever library."""
    _warn(message, _callers())


def _warn(message: str | None, callers: Sequence[FrameType]) -> None:
    if message is not None:
        level = next((level for level, frame in enumerate(callers) if not _in_library(frame)), 0)
        warnings.warn(message, stacklevel=level + 3)


def _in_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def _trainer(callers: Sequence[FrameType], *packages: str) -> Any | None:
    """The ``Trainer`` of one of ``packages`` that is calling, if one is."""
    for frame in callers:
        if frame.f_code.co_varnames[:1] == ("self",):
            candidate = frame.f_locals.get("self")
            for base in type(candidate).__mro__:
                if base.__name__ == "Trainer" and str(base.__module__).partition(".")[0] in packages:
                    return candidate
    return None


def _clips(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _configured(callers: Sequence[FrameType]) -> str | None:
    trainer = _trainer(callers, "transformers")
    max_norm = getattr(getattr(trainer, "args", None), "max_grad_norm", None)
    if _clips(max_norm):
        return (
            f"this Trainer is to clip gradients (max_grad_norm={max_norm!r}), but {_GONE}. Pass "
            f"TrainingArguments(max_grad_norm=0.0), and to clip all the same, call opt.clip_grad_norm_(loss, "
            f"{max_norm!r}) right before trainer.accelerator.backward(loss) runs. strict=False allows it."
        )
    clip_val = getattr(_trainer(callers, *_LIGHTNING), "gradient_clip_val", None)
    if _clips(clip_val):
        return (
            f"this Trainer is to clip gradients (gradient_clip_val={clip_val!r}), but {_GONE}. Leave "
            "gradient_clip_val out, and to clip all the same, override backward(loss) of the module: call "
            f"opt.clip_grad_norm_(loss, {clip_val!r}) there before loss.backward(). strict=False allows it."
        )
    return None


def _overridden(callers: Sequence[FrameType]) -> str | None:
    module = getattr(_trainer(callers, *_LIGHTNING), "lightning_module", None)
    if not getattr(module, "automatic_optimization", False):
        return None
    hook = getattr(type(module), "configure_gradient_clipping", None)
    if str(getattr(hook, "__module__", None)).partition(".")[0] in _LIBRARIES:
        return None
    return (
        f"configure_gradient_clipping() of {type(module).__name__} finds no gradients to clip, because they are "
        "applied inside backward(): override backward(loss) instead, and call opt.clip_grad_norm_(loss, max_norm) "
        "there before loss.backward()."
    )


def _mentioned(callers: Sequence[FrameType]) -> str | None:
    code = next((frame.f_code for frame in callers if not _in_library(frame)), None)
    named = sorted(_CLIPPERS.intersection(_names(code))) if code is not None else []
    if code is None or not named:
        return None
    return (
        f"{code.co_name}(), which calls step(), also speaks of {' and '.join(named)}: after backward() it "
        "finds no gradients to clip, because they have been applied inside backward(). Call "
        "opt.clip_grad_norm_(loss, max_norm) before loss.backward() instead. If it is for other parameters, or "
        "never runs, ignore this; it is said once."
    )


def _names(code: CodeType) -> set[str]:
    """What a function refers to, its closures included; what a module defines is no closure."""
    names = set(code.co_names)
    if code.co_name != "<module>":
        names.update(*(constant.co_names for constant in code.co_consts if isinstance(constant, CodeType)))
    return names


_GONE = "gradients are applied inside backward(), so that it finds none to clip"
_STEPPED = "The parameters of this backward pass have been stepped with unclipped gradients: start again."
