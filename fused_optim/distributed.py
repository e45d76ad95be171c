"""Data parallelism: gradients that are complete only once the ranks have exchanged them.

``fully_shard`` and ``replicate_with_fsdp`` call the hooks of a parameter themselves, after their reduction,
and need nothing from here. ``DistributedDataParallel`` reduces whole buckets after the hooks have run, and
writes the last results when the backward pass is over: its parameters are stepped then, after its reducer.
That is exact with any communication hook, with unused parameters, and whichever was built first, the
optimizer or the wrapper.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fused_optim._torch import at_end_of_pass


class Reduced(NamedTuple):
    """A parameter whose gradient is completed by reducers.

    Attributes:
        param: the parameter.
        wrappers: the ``DistributedDataParallel`` modules around it.
    """

    param: Tensor
    wrappers: list[weakref.ref[nn.Module]]


class Reducers:
    """The reducers that complete the gradients of one optimizer, whenever they came to be.

    Attributes:
        may_skip_us: whether a rank may see no hook of ours in a backward pass whose reducers give our
            parameters the gradients of other ranks.
    """

    def __init__(self) -> None:
        self.may_skip_us = False
        self._known: dict[int, Reduced] = {}
        self._seen: tuple[int, int, int] | None = None
        _wrappers.watch()

    def around(self, params: Callable[[], Collection[Tensor]], enrolments: int) -> dict[int, Reduced]:
        """Returns the parameters, by id, whose gradients a reducer completes.

        Args:
            params: the parameters of the optimizer; asked only when something has changed.
            enrolments: a number that changes with the parameters.

        Raises:
            ValueError: if ``FullyShardedDataParallel`` has been put around the parameters.
        """
        if self._seen is None:
            _wrappers.search()
        current = (_wrappers.additions, len(_wrappers.alive), enrolments)
        if current != self._seen:
            self._known = _reduced_among(params()) if _wrappers.alive else {}
            self.may_skip_us = any(_skips(wrapper, self._known) for wrapper in list(_wrappers.alive))
            self._seen = current
        return self._known


def check_not_flat(params: Collection[Tensor]) -> None:
    """Refuses parameters that ``FullyShardedDataParallel`` manages.

    Raises:
        ValueError: if it manages one of ``params``.
    """
    sharding = sys.modules.get("torch.distributed.fsdp")
    if sharding is None:
        return
    own = {id(param) for param in params}
    flat = any(isinstance(param, sharding.FlatParameter) for param in params)
    for wrapper in list(_wrappers.alive):
        if isinstance(wrapper, sharding.FullyShardedDataParallel):
            flat = flat or any(id(param) in own for param in wrapper.parameters())
    if flat:
        raise ValueError(
            "the parameters are managed by torch.distributed.fsdp.FullyShardedDataParallel, which completes "
            "gradients in flat pieces that the hooks of the parameters do not see. Shard the model with "
            "torch.distributed.fsdp.fully_shard() and build BackwardFusedOptimizer after that, or use the "
            "ordinary optimizer."
        )


def after_reducers(callback: Callable[[], None]) -> Callable[[], None]:
    """Wraps a callback for the end of a backward pass, so that it runs after those of the reducers."""
    # They are queued in the course of the pass, some before ours and some after it: a callback that is queued
    # by a callback comes after all of them.
    return partial(at_end_of_pass, callback)


def completed(reduced: dict[int, Reduced]) -> Iterator[Tensor]:
    """Yields the parameters that hold a gradient exchanged between the ranks, once a pass is over.

    Gradients of a pass under ``no_sync()`` stay where they are, for the next pass to add to.
    """
    for param, wrappers in reduced.values():
        if param.grad is not None and all(_exchanges(wrapper()) for wrapper in wrappers):
            yield param


def _exchanges(wrapper: nn.Module | None) -> bool:
    # A reducer goes by what was in force at the last forward pass, of which the second flag is the trace.
    # Where the two disagree the gradient stays pending, as it would with an ordinary optimizer.
    return bool(
        getattr(wrapper, "require_backward_grad_sync", True) and getattr(wrapper, "require_forward_param_sync", True)
    )


def _reduced_among(params: Collection[Tensor]) -> dict[int, Reduced]:
    check_not_flat(params)
    own = {id(param) for param in params}
    reduced: dict[int, Reduced] = {}
    for wrapper in list(_wrappers.alive):
        if isinstance(wrapper, DistributedDataParallel):
            for param in wrapper.parameters():
                if id(param) in own:
                    reduced.setdefault(id(param), Reduced(param, [])).wrappers.append(weakref.ref(wrapper))
    return reduced


def _skips(wrapper: nn.Module, known: dict[int, Reduced]) -> bool:
    if not (getattr(wrapper, "find_unused_parameters", False) or getattr(wrapper, "static_graph", False)):
        return False
    ours = [id(param) in known for param in wrapper.parameters() if param.requires_grad]
    return any(ours) and not all(ours)


class _Wrappers:
    """The modules of this process that exchange gradients.

    Attributes:
        alive: those that exist.
        additions: how many have been found so far.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.additions = 0
        self._watches = False

    def watch(self) -> None:
        """Notices every wrapper that exists or is built from now on."""
        if not self._watches and torch.distributed.is_available():
            self._watches = True
            register_module_module_registration_hook(self._registered)
            self.search()

    def search(self) -> None:
        """Finds the wrappers that exist; copied and unpickled ones cannot be noticed otherwise."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        objects = gc.get_objects()
        # By type, as isinstance() would ask every proxy for its class, and a dead one raises.
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, _kinds())}
        for found in objects if kinds else ():
            if type(found) in kinds:
                self._add(found)

    def _registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, _kinds()):
            self._add(module)

    def _add(self, wrapper: nn.Module) -> None:
        if wrapper not in self.alive:
            self.alive.add(wrapper)
            self.additions += 1


def _kinds() -> tuple[type[nn.Module], ...]:
    # Importing it takes a second; who has not imported it has no instance of it.
    sharding = sys.modules.get("torch.distributed.fsdp")
    flat = getattr(sharding, "FullyShardedDataParallel", None)
    return (DistributedDataParallel,) if flat is None else (DistributedDataParallel, flat)


_wrappers = _Wrappers()
