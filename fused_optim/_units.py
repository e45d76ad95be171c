"""Units: how a run of parameters is stepped apart from all others, with the whole optimizer's values.

A unit is a working copy of the whole whose groups hold just the parameters to be stepped. It is lent to
one run after the other: what a step reads comes from the whole each time, so nothing can go stale.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fused_optim import _torch
from fused_optim._random import RandomWatch
from fused_optim._shared import (
    MISSING,
    Conflict,
    CoupledOptimizerError,
    Memo,
    Place,
    differing,
    hyperparameters,
    merged,
    private_copy,
    shared_values,
    tensors_of,
    write,
    writes,
)


class Traces(NamedTuple):
    """What a round left behind besides the parameters that had a gradient.

    Attributes:
        wrote: whether it changed a value that the parameters share.
        moved: whether it changed a parameter without gradient, or the state of one.
    """

    wrote: bool
    moved: bool


def units_of(whole: Optimizer) -> DirectUnit | IsolatedUnit:
    """The unit that fits the class of ``whole``.

    The optimizers of ``torch.optim`` write nothing but the state of the parameters they step, which a test
    asserts for all of them; every other class could, and is isolated.
    """
    if type(whole).__module__.startswith("torch.optim."):
        return DirectUnit(whole)
    return IsolatedUnit(whole)


def _blank_copy(whole: Optimizer) -> Optimizer:
    copy: Optimizer = object.__new__(type(whole))
    vars(copy).update(vars(whole))
    for name in (*_torch.STEP_HOOKS, *_torch.STATE_HOOKS):
        vars(copy)[name] = OrderedDict()
    vars(copy).pop("step", None)
    return copy


class DirectUnit:
    """Steps a run on the whole's own state, through a view of its group."""

    def __init__(self, whole: Optimizer) -> None:
        self._whole = whole
        self._view: dict[str, Any] = {}
        self.optimizer = _blank_copy(whole)
        self.optimizer.param_groups = [self._view]
        self._step = _torch.bare_step(type(whole))
        self._check_capture = _torch.capture_check(type(whole))
        if self._check_capture is not None:
            vars(self.optimizer)[self._check_capture] = _nothing

    def step(self, group_index: int, params: list[Tensor]) -> None:
        """Steps ``params``, all of one group, with the gradients they hold."""
        view, optimizer, whole = self._view, self.optimizer, self._whole
        view.clear()
        view.update(whole.param_groups[group_index])
        view["params"] = params
        optimizer.state = whole.state
        try:
            self._step(optimizer)
            if view.get("fused"):
                _torch.raise_versions(params)
        finally:
            view.clear()

    def begin_round(self) -> None:
        """Lets the whole refuse; nothing else to fix, as no step of these classes writes what another reads."""
        if self._check_capture is not None:
            getattr(self._whole, self._check_capture)()

    def commit(self, watch: bool) -> Traces:
        """Nothing to store."""
        return Traces(False, False)

    def expect_draws(self) -> None:
        """These classes draw no random numbers."""


def _nothing() -> None:
    pass


class IsolatedUnit:
    """Steps a run on private copies of the shared values, and joins what the runs of a round write."""

    def __init__(self, whole: Optimizer) -> None:
        self._whole = whole
        self.optimizer = _blank_copy(whole)
        self._step = _torch.unprofiled_step(type(whole))
        self._start: dict[Place, dict[Any, Any]] = {}
        self._written: dict[tuple[Place, Any], Any] = {}
        self._params: dict[int, Tensor] = {}
        self._waiting: dict[int, int] = {}
        self._lent: set[int] = set()
        self._draws = RandomWatch(type(whole))

    def expect_draws(self) -> None:
        """Random numbers in a step are known of: no warning any more."""
        self._draws = RandomWatch(type(self._whole), warned=True)

    def begin_round(self) -> None:
        """Fixes the values that all steps of the round start from."""
        whole = self._whole
        self._params = {id(param): param for group in whole.param_groups for param in group["params"]}
        self._waiting = {
            id(param): index for index, group in enumerate(whole.param_groups) for param in group["params"]
        }
        self._written = {}
        memo = Memo({id(alias): alias for alias in self._aliases()}, self._params)
        self._start = {place: private_copy(values, memo) for place, values in shared_values(whole).items()}

    def step(self, group_index: int, params: list[Tensor]) -> None:
        """Steps ``params``, all of one group, with the gradients they hold.

        Raises:
            CoupledOptimizerError: if another run of the round wrote another value for the same key.
        """
        self._lend(group_index, params)
        with self._draws.watching():
            self._step(self.optimizer)
        # Optimizers that write through `.data` hide the change from autograd's check of saved tensors.
        for param in params:
            torch.autograd.graph.increment_version(param)
            self._waiting.pop(id(param), None)
        self._take_back(params)
        self._collect()

    def commit(self, watch: bool) -> Traces:
        """Steps the parameters without gradient, as an ordinary step does, and stores what the round wrote.

        Args:
            watch: whether to look for parameters that move without a gradient.
        """
        self._include_added_groups()
        idle = [self._params[key] for key in self._waiting if self._params[key].grad is None] if watch else []
        before = self._writes_to(idle)
        self._step_without_gradient()
        for (place, key), value in self._written.items():
            write(self._whole, place, key, value)
        return Traces(bool(self._written), before != self._writes_to(idle))

    def _writes_to(self, params: list[Tensor]) -> list[tuple[int, int]]:
        """Which tensors the parameters and their state are, and how often each was written."""
        tensors = [*params, *(item for param in params for item in tensors_of(self._whole.state.get(param)))]
        return [(id(tensor), writes(tensor)) for tensor in tensors]

    def _step_without_gradient(self) -> None:
        by_group: dict[int, list[Tensor]] = {}
        for key, index in self._waiting.items():
            if self._params[key].grad is None:
                by_group.setdefault(index, []).append(self._params[key])
        self._waiting = {}
        for index, params in by_group.items():
            self._lend(index, params)
            # Some classes refuse a step in which nothing has a gradient; in the ordinary step something has.
            with contextlib.suppress(Exception):
                self._step(self.optimizer)
                self._take_back(params)
            self._collect()

    def _lend(self, group_index: int, params: list[Tensor]) -> None:
        # Every group is there, because classes index lists of their own by the position of a group.
        self._include_added_groups()
        whole, copy = self._whole, self.optimizer
        views: list[dict[str, Any]] = [{"params": []} for _ in whole.param_groups]
        views[group_index]["params"] = params
        state = whole.state.copy()
        state.clear()
        replacements = (copy, views, state, *views)
        memo = Memo({id(alias): own for alias, own in zip(self._aliases(), replacements)}, self._params)
        self._lent = {id(own) for own in replacements}
        for index, view in enumerate(views):
            view.update(private_copy(self._start["group", index], memo))
        state.update(private_copy(self._start["state", 0], memo))
        state.update({param: whole.state[param] for param in params if param in whole.state})
        attributes = vars(copy)
        hooks = {name: attributes[name] for name in (*_torch.STEP_HOOKS, *_torch.STATE_HOOKS)}
        attributes.clear()
        attributes.update(hooks)
        attributes.update(private_copy(self._start["attribute", 0], memo))
        copy.param_groups = views
        copy.state = state

    def _include_added_groups(self) -> None:
        # A group that is added between backward() and step() takes part in that step.
        for index, group in enumerate(self._whole.param_groups):
            if ("group", index) not in self._start:
                self._start["group", index] = private_copy(hyperparameters(group), Memo({}, self._params))
                self._params.update({id(param): param for param in group["params"]})
                self._waiting.update({id(param): index for param in group["params"]})

    def _aliases(self) -> list[Any]:
        """What an attribute may refer to that a working copy has of its own."""
        whole = self._whole
        return [whole, whole.param_groups, whole.state, *whole.param_groups]

    def _take_back(self, params: list[Tensor]) -> None:
        state, whole_state = self.optimizer.state, self._whole.state
        for key, value in state.items():
            if isinstance(key, Tensor):
                whole_state[key] = value
        for param in params:
            if param not in state:
                whole_state.pop(param, None)

    def _collect(self) -> None:
        for place, key, value in differing(self._start, shared_values(self.optimizer)):
            if id(value) in self._lent:
                continue
            before = self._start[place].get(key, MISSING)
            try:
                self._written[place, key] = merged(before, self._written.get((place, key), before), value)
            except Conflict:
                raise CoupledOptimizerError(coupled_message(self._whole, place, key)) from None


def coupled_message(whole: Optimizer, place: Place, key: Any) -> str:
    """Why an optimizer cannot be stepped parameter by parameter, and what to do."""
    kind, index = place
    name = type(whole).__name__
    where = {"group": f"parameter group {index}", "state": "its state", "attribute": "an attribute"}[kind]
    foreach = any("foreach" in group for group in whole.param_groups)
    return (
        f"{name} couples its parameters: stepping them one by one gives another value of {key!r} ({where}) than "
        f"stepping them together. Stepping inside backward() would be a different training run; use {name} itself"
        f"{', or try foreach=False' if foreach else ''}."
    )
