"""The roster: which parameters are driven, by which hooks, and where they stand in the groups."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fused_optim import _guards, _torch
from fused_optim._hooks import GradientHook, register
from fused_optim.distributed import check_not_flat

_living: weakref.WeakSet[Roster] = weakref.WeakSet()


class Slot:
    """What is known of one parameter; holds no reference to it.

    Attributes:
        group: index of its parameter group.
        nbytes: bytes of its gradient.
        handle: removes its hook; None where autograd takes none.
        backward: number of the outermost backward pass that stepped it last.
        interval: number of the interval between two ``step()`` calls in which it was stepped last.
        generation: number of the ``zero_grad(set_to_none=True)`` after which it had a gradient last.
    """

    __slots__ = ("backward", "generation", "group", "handle", "interval", "nbytes")

    def __init__(self, group: int, nbytes: int, handle: Any | None) -> None:
        self.group = group
        self.nbytes = nbytes
        self.handle = handle
        self.backward = -1
        self.interval = -1
        self.generation = -1


class Roster:
    """Keeps one hook on every parameter of the whole, whatever happens to its groups."""

    def __init__(self, whole: Optimizer, hook: GradientHook) -> None:
        self.slots: dict[int, Slot] = {}
        self.hooked = False
        self.enrolments = 0
        self._whole = whole
        self._hook = hook
        self._seen: list[tuple[dict[str, Any], list[Tensor], int]] = []
        _living.add(self)

    def all(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [param for group in self._whole.param_groups for param in group["params"]]

    def _places(self) -> list[tuple[int, Tensor]]:
        return [(index, param) for index, group in enumerate(self._whole.param_groups) for param in group["params"]]

    def is_current(self) -> bool:
        """Whether the groups are still the objects and lengths that were last enrolled."""
        groups = self._whole.param_groups
        if len(groups) != len(self._seen):
            return False
        for group, (seen, params, length) in zip(groups, self._seen):
            if group is not seen or group["params"] is not params or len(params) != length:
                return False
        return True

    def enrol(self) -> None:
        """Puts a hook on every parameter of the groups and removes those of parameters that left.

        Raises:
            ValueError: if a parameter is listed twice, two share memory, another optimizer drives one of them,
                or ``FullyShardedDataParallel`` does.
        """
        members = _guards.listed_once(self._places(), self.name)
        new = {key: member for key, member in members.items() if self._lacks_hook(key)}
        if new:
            _guards.check_distinct_memory([param for _, param in members.values()], self.name)
            self._check_undriven(new)
            check_not_flat([param for _, param in new.values()])
        for key in self.slots.keys() - members.keys():
            self._release(self.slots.pop(key))
        for key, (index, param) in members.items():
            slot = self.slots.get(key)
            if slot is None:
                slot = self.slots[key] = Slot(index, _nbytes(param), None)
            slot.group = index
            if self.hooked and slot.handle is None:
                slot.handle = register(param, self._hook)
        self.enrolments += 1
        self._seen = [(group, group["params"], len(group["params"])) for group in self._whole.param_groups]

    def _lacks_hook(self, key: int) -> bool:
        slot = self.slots.get(key)
        return slot is None or (self.hooked and slot.handle is None)

    def hook_all(self) -> None:
        """Registers the hooks; undoes it when that fails."""
        self.hooked = True
        try:
            self.enrol()
        except BaseException:
            self.unhook_all()
            raise

    def unhook_all(self) -> None:
        """Removes every hook."""
        self.hooked = False
        for slot in self.slots.values():
            self._release(slot)

    def rehook(self, param: Tensor) -> None:
        """Registers the hook of ``param`` anew: ``swap_tensors`` keeps the old one but silences it."""
        slot = self.slots[id(param)]
        if self.hooked:
            self._release(slot)
            slot.handle = register(param, self._hook)
            _torch.revive_hooks(param)

    def name(self, param: Tensor) -> str:
        """What to call ``param`` in a message: its name where known, else its place and shape."""
        for index, group in enumerate(self._whole.param_groups):
            for position, member in enumerate(group["params"]):
                if member is param:
                    names = group.get("param_names")
                    if names:
                        return f"parameter {names[position]!r}"
                    return f"parameter {position} of group {index}, of shape {tuple(param.shape)},"
        return f"a parameter of shape {tuple(param.shape)}"

    def _check_undriven(self, new: dict[int, tuple[int, Tensor]]) -> None:
        for other in _living:
            if other is self or not other.hooked:
                continue
            for key in new.keys() & other.slots.keys():
                raise ValueError(
                    f"{self.name(new[key][1])} is already stepped inside backward() by another "
                    "BackwardFusedOptimizer, and would be stepped twice. Give each parameter to one optimizer, "
                    "or call unfuse() on the other one or delete it first."
                )

    @staticmethod
    def _release(slot: Slot) -> None:
        if slot.handle is not None:
            slot.handle.remove()
            slot.handle = None


def _nbytes(param: Tensor) -> int:
    return param.numel() * param.element_size()
