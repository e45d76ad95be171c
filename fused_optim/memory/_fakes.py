"""Fake tensors, which have shapes and no data, and what they need to build and train ordinary models."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NotFakeable(Exception):
    """The model does something that fake tensors cannot do."""


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions for the value of a fake tensor where the answer cannot change what is allocated.

    Attributes:
        number: what to answer when an optimizer asks for a number; None refuses.
        truth: what to answer when a truth value is asked for; None refuses.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number: float | None = None
        self.truth: bool | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            answer = self.truth if args[0].dtype is torch.bool else self.number
            if answer is None:
                raise
            return answer


class Fakes:
    """Makes all new tensors fake while entered, as often as needed; all of them belong together."""

    def __init__(self) -> None:
        """Makes nothing yet: loading what fakes tensors takes a second."""
        self._mode: Any = None

    @contextmanager
    def entered(self) -> Iterator[Answers]:
        """Makes all new tensors fake while the body runs; yields what answers questions for their values."""
        if self._mode is None:
            self._mode = _mode()
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        disabled = logger.disabled
        # A shape that an operator rejects is logged with a traceback before it is raised.
        logger.disabled = True
        try:
            with ExitStack() as stack:
                stack.enter_context(_copies())
                stack.enter_context(_conversions())
                stack.enter_context(self._mode)
                yield stack.enter_context(Answers())
        finally:
            logger.disabled = disabled


def is_fake_trouble(error: Exception) -> bool:
    """Whether an error comes from tensors being fake, and not from the model or its inputs."""
    # Errors of fake tensors have private types. Reading data or calling NumPy on one gives a plain
    # RuntimeError.
    if type(error).__module__.startswith(("torch._subclasses", "torch.fx.experimental")):
        return True
    text = str(error)
    return any(words in text for words in ("FakeTensor", "tensor subclasses", "data pointer", "meta tensors"))


def _mode() -> Any:
    # There is no public way to fake tensors.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    """Copies a fake tensor for `copy.deepcopy`, which would copy the mode that is among its attributes as well."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        made = tensor.detach().clone()
    made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    for name, value in vars(tensor).items():
        if name not in vars(made):
            setattr(made, name, copy.deepcopy(value, memo))
    if tensor.grad is not None:
        made.grad = _copied(tensor.grad, memo)
    return made


@contextmanager
def _conversions() -> Iterator[None]:
    """Lets ``module.to(dtype)`` work, which swaps fake parameters with their converted copies.

    The mode holds weak references to its tensors, and those forbid a swap. The data can be exchanged instead.
    """
    swap = getattr(torch.utils, "swap_tensors", None)
    if swap is None:
        yield
        return
    from torch._subclasses.fake_tensor import FakeTensor

    def exchange(target: torch.Tensor, source: torch.Tensor) -> None:
        if isinstance(target, FakeTensor) and isinstance(source, FakeTensor):
            target.data = source.data
        else:
            swap(target, source)

    with patch.object(torch.utils, "swap_tensors", exchange):
        yield


@contextmanager
def _copies() -> Iterator[None]:
    """Lets a model copy its layers."""
    from torch._subclasses.fake_tensor import FakeTensor

    with patch.object(FakeTensor, "__deepcopy__", _copied):
        yield
