"""The optimizer that a training loop sees."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fused_optim import _guards, _torch
from fused_optim._engine import Engine
from fused_optim._norms import NormLedger
from fused_optim._probe import needs_probe, probe
from fused_optim._stepper import Options, ParamHook

if TYPE_CHECKING:
    from typing_extensions import Self

Closure = Callable[[], Any]

_OPTIONS = tuple(field.name for field in fields(Options))


class BackwardFusedOptimizer(Optimizer):
    """Steps every parameter inside ``backward()``, as soon as its gradient is complete, and frees the gradient.

    Replaces ``optimizer_class(params, ...)`` in a training loop and gives the same weights bit for bit, or an
    error that says why not. A whole set of gradients never exists.

    Args:
        optimizer_class: a subclass of ``torch.optim.Optimizer``.
        params: what ``optimizer_class`` takes: an iterable of tensors, of (name, tensor) pairs or of group dicts.
        *args: further positional arguments of ``optimizer_class``.
        strict: whether to raise when a loop that calls ``step()`` would differ from the ordinary optimizer:
            a second gradient for a parameter in a round, ``zero_grad()`` after gradients were applied,
            hyperparameters changed between ``backward()`` and ``step()``.
        bucket_cap_mb: small parameters share a step until their gradients fill so many MiB; 0 steps each alone.
        accumulate_when: asked once a backward pass; while it returns True, gradients are left in ``.grad``.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does.
        track_grad_norm: whether to compute :attr:`grad_norm`.
        **kwargs: keyword arguments of ``optimizer_class``.

    Raises:
        TypeError: if ``optimizer_class`` is no optimizer class.
        ValueError: if the optimizer cannot be stepped inside backward (it needs a closure, couples its
            parameters, is differentiable), or two parameters share memory, or another fused optimizer drives one.
        Exception: whatever the constructor of ``optimizer_class`` raises.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = BackwardFusedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)
        >>> model(torch.randn(8, 4)).square().mean().backward()  # the parameters are stepped here
        >>> opt.step()                                           # ends the round
        >>> model.weight.grad is None
        True
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Any,
        *args: Any,
        strict: bool = True,
        bucket_cap_mb: float = 1.0,
        accumulate_when: Callable[[], bool] | None = None,
        grad_scaler: Any = None,
        track_grad_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        options = Options(strict, bucket_cap_mb, accumulate_when, grad_scaler, track_grad_norm)
        _guards.check_options(options)
        _guards.check_class(optimizer_class, BackwardFusedOptimizer)
        whole = optimizer_class(params, *args, **kwargs)
        self._adopt(whole, options, lambda groups: optimizer_class(groups, *args, **kwargs))

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer, **options: Any) -> Self:
        """Takes over an optimizer that is already built, with its groups and state, also in mid-training.

        Schedulers built on ``optimizer`` keep working, as its groups are the new optimizer's groups. Call
        ``step()`` on the new one from here on: on the old one it raises.

        Args:
            optimizer: the ordinary optimizer.
            **options: ``strict``, ``bucket_cap_mb``, ``accumulate_when``, ``grad_scaler``, ``track_grad_norm``.

        Raises:
            TypeError: if ``optimizer`` is no ordinary ``torch.optim.Optimizer``, or an option is unknown.
            ValueError: as the constructor.
        """
        if isinstance(optimizer, cls) or not isinstance(optimizer, Optimizer):
            raise TypeError(
                "from_optimizer() takes an ordinary torch.optim.Optimizer, such as torch.optim.AdamW(...), but got "
                f"{type(optimizer).__name__}."
            )
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise TypeError(f"from_optimizer() got an unknown option {unknown[0]!r}; it takes {', '.join(_OPTIONS)}.")
        checked = Options(**options)
        _guards.check_options(checked)
        _guards.check_class(type(optimizer), BackwardFusedOptimizer)
        fused = cls.__new__(cls)
        fused._adopt(optimizer, checked, partial(_rebuild, optimizer))
        for name in _torch.STEP_HOOKS:
            vars(fused)[name] = vars(optimizer)[name]
        optimizer.register_step_pre_hook(partial(_refuse_step, weakref.ref(fused)))
        return fused

    def _adopt(self, whole: Optimizer, options: Options, build: Any) -> None:
        _guards.check_whole(whole)
        draws = needs_probe(whole) and probe(whole, build)
        self._become(whole, options)
        if draws:
            self._engine.stepper.unit.expect_draws()
        self._engine.roster.hook_all()

    def _become(self, whole: Optimizer, options: Options) -> None:
        # Before `_whole` exists, the setters and add_param_group() of this class ignore what the base
        # constructor sets: it is called for its hook registries only.
        super().__init__([{"params": []}], {})
        self._whole = whole
        self._engine = Engine(self, whole, options)

    # The whole is the truth

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The ordinary optimizer's groups; what is changed here reaches the next step."""
        return self._whole.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._built():
            self._whole.param_groups = groups
            self._engine.roster.enrol()

    @property
    def state(self) -> Any:
        """The ordinary optimizer's state, by parameter."""
        return self._whole.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._built():
            self._whole.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The ordinary optimizer's defaults."""
        return self._whole.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._built():
            self._whole.defaults = defaults

    def _built(self) -> bool:
        # Not by `vars`: the optimizer wrappers of Lightning derive from this class and forward attributes.
        return hasattr(self, "_whole")

    def __getattr__(self, name: str) -> Any:
        """What only the inner class has (``train()`` and ``eval()`` of schedule-free optimizers) acts on the whole."""
        whole = vars(self).get("_whole")
        if whole is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        whole = vars(self).get("_whole")
        belongs_here = whole is None or name in vars(self) or hasattr(type(self), name)
        if belongs_here or name not in vars(whole):
            super().__setattr__(name, value)
        else:
            setattr(whole, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._whole!r}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as the ordinary optimizer does.

        Raises:
            ValueError: if a parameter shares memory with another, or another fused optimizer drives it; the
                group is not added then.
        """
        if not self._built():
            return
        before = list(self._whole.param_groups)
        self._whole.add_param_group(param_group)
        try:
            _guards.check_whole(self._whole)
            self._engine.roster.enrol()
        except ValueError:
            self._whole.param_groups[:] = before
            self._engine.roster.enrol()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The ordinary optimizer's state dict, key for key."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._whole.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer or of the ordinary one, through the inner class.

        Raises:
            RuntimeError: with ``strict``, if a trainer calls that is configured to clip gradients.
        """
        self._engine.refuse_clipping()
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._whole.load_state_dict(state_dict)
        self._engine.reset()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # The round

    def step(self, closure: Closure | None = None) -> Any:
        """Ends the round; changes no parameter that was already stepped inside backward.

        Gradients that are pending (accumulated, set by hand, made while unfused) are applied as the ordinary
        ``step()`` applies them.

        Args:
            closure: called first, with gradients enabled; does ``zero_grad()``, ``backward()`` and returns the loss.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            RuntimeError: if the round is not what an ordinary ``step()`` would have done (see ``strict``), or the
                gradients were scaled without ``grad_scaler``.
        """
        loss = None
        if closure is not None:
            self._engine.refuse_clipping()
            with torch.enable_grad():
                loss = closure()
        self._engine.finish_round()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops pending gradients.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.

        Raises:
            RuntimeError: with ``strict``, in a loop that calls ``step()``: if gradients were applied inside
                backward that the ordinary ``zero_grad()`` would have discarded.
        """
        self._engine.zero_grad(set_to_none)

    def accumulate(self) -> AbstractContextManager[None]:
        """Context in which backward passes leave their gradients in ``.grad``, as an ordinary backward does.

        The next backward pass outside, or ``step()``, applies the sum.

        Example:
            >>> model = torch.nn.Linear(4, 2)
            >>> opt = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
            >>> with opt.accumulate():
            ...     model(torch.randn(8, 4)).mean().backward()
            >>> model(torch.randn(8, 4)).mean().backward()
            >>> opt.step()
        """
        return self._engine.accumulating()

    def clip_grad_norm_(
        self,
        loss: Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        parameters: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Measures the global gradient norm of ``loss``; the next ``loss.backward()`` applies clipped gradients.

        Walks backward twice altogether and never holds the gradients: each is freed after its norm is known.
        Norm and weights equal ``torch.nn.utils.clip_grad_norm_`` followed by an ordinary step. Anything else
        that happens in a backward pass happens twice, too: batch normalization inside a checkpointed segment
        updates its running statistics once more, for example.

        Args:
            loss: what ``backward()`` will be called on; scaled, if there is a ``grad_scaler``.
            max_norm: largest norm allowed.
            norm_type: order of the norm; may be ``inf``.
            error_if_nonfinite: whether to raise if the norm is infinite or NaN.
            parameters: the parameters of this optimizer in the order in which their norms are added up; the
                order of the groups by default. With several groups, give ``model.parameters()`` to get the bits
                of ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``.

        Returns:
            The total norm before clipping, a scalar tensor.

        Raises:
            TypeError: if ``loss`` is no tensor.
            RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set.

        Example:
            >>> model = torch.nn.Linear(4, 2)
            >>> opt = BackwardFusedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
            >>> loss = model(torch.randn(8, 4)).square().mean()
            >>> norm = opt.clip_grad_norm_(loss, max_norm=1.0)
            >>> loss.backward()
            >>> opt.step()
        """
        _guards.check_loss(loss)
        own = self._engine.roster.all()
        order = own if parameters is None else _guards.checked_order(list(parameters), own)
        return self._engine.measure_norm(loss, max_norm, NormLedger(norm_type), order, error_if_nonfinite)

    @property
    def grad_norm(self) -> Tensor | None:
        """Global 2-norm of the last round's gradients before clipping, with ``track_grad_norm=True``; else None."""
        return self._engine.rounds.grad_norm

    def register_param_step_pre_hook(self, hook: ParamHook) -> RemovableHandle:
        """Registers ``hook(optimizer, param)``, called before each parameter is stepped.

        ``param.grad`` holds the gradient; the hook may change it, or set it to None to skip the parameter.

        Returns:
            A handle whose ``remove()`` takes the hook off.
        """
        return _registered(self._engine.stepper.pre_hooks, hook)

    def register_param_step_post_hook(self, hook: ParamHook) -> RemovableHandle:
        """Registers ``hook(optimizer, param)``, called after each parameter was stepped, its gradient still there.

        Returns:
            A handle whose ``remove()`` takes the hook off.
        """
        return _registered(self._engine.stepper.post_hooks, hook)

    def unfuse(self) -> None:
        """Takes the hooks off: an ordinary optimizer from here on, with the same groups and state."""
        self._engine.roster.unhook_all()

    def fuse(self) -> None:
        """Puts the hooks on again after :meth:`unfuse`.

        Raises:
            ValueError: if another fused optimizer drives one of the parameters by now.
        """
        self._engine.roster.hook_all()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by ``GradScaler.step``: whether gradients were, or will be, unscaled here rather than there."""
        if self._engine.skips_overflow():
            return False
        return self._engine.has_fused_steps() or getattr(self._whole, "_step_supports_amp_scaling", False)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        # A copied method would drag a second copy of the whole along, made the lossy way of torch.optim.Optimizer.
        methods = {
            key: value.__name__
            for key, value in vars(self._whole).items()
            if isinstance(value, MethodType) and value.__self__ is self._whole
        }
        dropped = {*_torch.STEP_HOOKS, *_torch.STATE_HOOKS, *methods, "step"}
        whole = {key: value for key, value in vars(self._whole).items() if key not in dropped}
        return {
            "optimizer_class": type(self._whole),
            "whole": whole,
            "methods": {key: name for key, name in methods.items() if key != "step"},
            "options": self._engine.options,
            "fused": self._engine.roster.hooked,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        whole: Optimizer = object.__new__(state["optimizer_class"])
        whole.__setstate__(state["whole"])
        for key, name in state["methods"].items():
            setattr(whole, key, getattr(whole, name))
        self._become(whole, state["options"])
        if state["fused"]:
            self._engine.roster.hook_all()
        else:
            self._engine.roster.enrol()


def _registered(hooks: OrderedDict[int, ParamHook], hook: ParamHook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse_step(fused: weakref.ref[BackwardFusedOptimizer], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step pre-hook of an optimizer that was taken over."""
    engine = getattr(fused(), "_engine", None)
    # Both share their hooks, and only one of the two may step. A class may fire them from within its step, too.
    if engine is None or optimizer is not engine.whole or engine.stepper.steps_whole:
        return
    if engine.roster.hooked:
        raise RuntimeError(_guards.taken_over(type(optimizer).__name__))


def _rebuild(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Builds another optimizer like one whose arguments are not known: from its defaults."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    kwargs = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)(groups, **kwargs)
