"""Values that the parameters of an optimizer share: hyperparameters, counters, instance attributes.

An ordinary ``step()`` reads and writes them once. Stepping parameters apart, every unit must start from the
same values, and what the units write must agree, or the optimizer couples its parameters.
"""

from __future__ import annotations

import copy
import math
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fused_optim import _torch

Place = tuple[str, int]
"""Where shared values live: ("group", index), ("state", 0) or ("attribute", 0)."""

_PER_PARAMETER = frozenset({"params", "param_names"})
_NOT_SHARED = frozenset(
    {"param_groups", "state", "step", "_zero_grad_profile_name", *_torch.STEP_HOOKS, *_torch.STATE_HOOKS}
)
_IMMUTABLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, types.FunctionType)
_DEEPEST = 6
"""Objects within objects are compared down to here: enough for projectors and schedules, and it ends."""
MISSING = object()
"""Marks a value that is not there."""


class CoupledOptimizerError(ValueError):
    """The optimizer's parameters depend on each other, so that stepping them one by one is a different run."""


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """The values of a parameter group that its parameters share."""
    return {key: value for key, value in group.items() if key not in _PER_PARAMETER}


def shared_values(optimizer: Optimizer) -> dict[Place, dict[Any, Any]]:
    """All values of ``optimizer`` that belong to no single parameter, by place; nothing is copied."""
    values: dict[Place, dict[Any, Any]] = {
        ("group", index): hyperparameters(group) for index, group in enumerate(optimizer.param_groups)
    }
    values["state", 0] = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    values["attribute", 0] = {key: value for key, value in vars(optimizer).items() if key not in _NOT_SHARED}
    return values


def write(optimizer: Optimizer, place: Place, key: Any, value: Any) -> None:
    """Stores a shared value where :func:`shared_values` found it; a tensor keeps its identity."""
    kind, index = place
    home: Any
    if kind == "group":
        home = optimizer.param_groups[index]
    else:
        home = optimizer.state if kind == "state" else vars(optimizer)
    if value is MISSING:
        home.pop(key, None)
        return
    current = home.get(key)
    if _same_kind(current, value):
        with torch.no_grad():
            current.copy_(value)
        return
    home[key] = value


def differing(old: dict[Place, dict[Any, Any]], new: dict[Place, dict[Any, Any]]) -> Iterator[tuple[Place, Any, Any]]:
    """Yields (place, key, new value) of everything that differs between two sets of shared values."""
    for place, before in old.items():
        after = new[place]
        for key in before.keys() | after.keys():
            value = after.get(key, MISSING)
            if not same(before.get(key, MISSING), value):
                yield place, key, value


class Memo(dict[int, Any]):
    """What to use instead of a copy, by id of the original, with a fallback shared between copies."""

    def __init__(self, aliases: dict[int, Any], fallback: dict[int, Any]) -> None:
        super().__init__(aliases)
        self._fallback = fallback

    def get(self, key: Any, default: Any = None) -> Any:
        """The replacement of an object; called by ``copy.deepcopy`` as well."""
        return super().get(key, self._fallback.get(key, default))


def private_copy(value: Any, memo: Memo) -> Any:
    """Copies what a step could change in place.

    Parameters, modules, what is keyed by parameters, and what cannot be copied stay the same objects.
    """
    known = memo.get(id(value))
    if known is not None:
        return known
    if isinstance(value, (*_IMMUTABLE, torch.nn.Module, type)):
        return value
    if isinstance(value, Tensor):
        return value if isinstance(value, torch.nn.Parameter) or value.requires_grad else value.clone()
    if isinstance(value, types.MethodType):
        owner = memo.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if isinstance(value, dict):
        if any(isinstance(key, Tensor) for key in value):
            return value
        return _refilled(value, {key: private_copy(item, memo) for key, item in value.items()})
    if type(value) in (list, set, tuple):
        return type(value)(private_copy(item, memo) for item in value)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, process groups, generators: a step can only share them
        return value


def same(first: Any, second: Any, _depth: int = 0) -> bool:
    """Whether two values are equal bit for bit, tensors inside containers and objects included."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, (types.MethodType, types.FunctionType)):
        return first.__code__ is second.__code__
    if isinstance(first, weakref.ref):
        return True
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and _equal_tensors(first, second)
    if isinstance(first, dict):
        return _same_dicts(first, second, _depth)
    if isinstance(first, (list, tuple, deque)):
        return len(first) == len(second) and all(same(one, other, _depth) for one, other in zip(first, second))
    if isinstance(first, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    if isinstance(first, Optimizer):  # whose copies carry no more than this
        return same((first.param_groups, first.state), (second.param_groups, second.state), _depth + 1)
    if isinstance(first, _IMMUTABLE) or not hasattr(first, "__dict__"):
        return _equal_or_incomparable(first, second)
    return _depth > _DEEPEST or same(vars(first), vars(second), _depth + 1)


def merged(start: Any, first: Any, second: Any) -> Any:
    """What two steps from the same ``start`` wrote together; MISSING marks nothing there.

    Raises:
        Conflict: if they wrote different values.
    """
    if same(first, second) or same(second, start):
        return first
    if same(first, start):
        return second
    if not (isinstance(first, dict) and isinstance(second, dict)):
        raise Conflict
    before = start if isinstance(start, dict) else {}
    keys = [*first, *(key for key in second if key not in first)]
    items = {key: merged(before.get(key, MISSING), first.get(key, MISSING), second.get(key, MISSING)) for key in keys}
    return _refilled(first, {key: item for key, item in items.items() if item is not MISSING})


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of an optimizer's state, inside containers too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple, deque)):
        for item in value:
            yield from tensors_of(item)


def writes(tensor: Tensor) -> int:
    """How often a tensor was written in place, as far as autograd knows: no look at a device's memory."""
    return 0 if tensor.is_inference() else tensor._version


class Conflict(Exception):
    """Two steps of a round wrote different values for the same key."""


def _same_dicts(first: dict[Any, Any], second: dict[Any, Any], depth: int) -> bool:
    if any(isinstance(key, Tensor) for key in (*first, *second)):
        # Keyed by parameters, which twins cannot share: compared in order.
        return len(first) == len(second) and all(map(same, first.values(), second.values()))
    return first.keys() == second.keys() and all(same(first[key], second[key], depth) for key in first)


def _equal_or_incomparable(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except Exception:  # an object whose comparison fails cannot be told apart
        return True


def _equal_tensors(first: Tensor, second: Tensor) -> bool:
    if first.is_floating_point() or first.is_complex():
        return bool(((first == second) | (first.isnan() & second.isnan())).all())
    return torch.equal(first, second)


def _same_kind(current: Any, value: Any) -> bool:
    if not (isinstance(current, Tensor) and isinstance(value, Tensor)):
        return False
    return current.shape == value.shape and current.dtype == value.dtype and current is not value


def _refilled(template: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if type(template) is dict:
        return items
    copy = template.copy()
    copy.clear()
    copy.update(items)
    return copy
