"""Recognises optimizers that communicate in ``step()``.

Ranks step their parameters in the order of their hooks: a collective inside a step would meet that of another
parameter on another rank, or wait for one that never comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")


class CollectiveError(RuntimeError):
    """Raised in place of a collective while none may run."""


@contextlib.contextmanager
def refuse_collectives(what: str) -> Iterator[None]:
    """Lets no collective of ``torch.distributed`` run, and refuses ``what`` if it tried one.

    The collective itself is not executed: other ranks may be elsewhere.

    Args:
        what: who would communicate: the name of an optimizer class.

    Raises:
        ValueError: on leaving the block, if a collective was tried, also where its error was swallowed.
    """
    watch = _Watch()
    try:
        with watch:
            yield
    except Exception as error:
        if watch.seen is None:
            raise
        raise ValueError(_message(what, watch.seen)) from error
    if watch.seen is not None:
        raise ValueError(_message(what, watch.seen))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at the first collective.

    Attributes:
        seen: the name of the first one that was tried.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            self.seen = self.seen or str(func.overloadpacket)
            raise CollectiveError(f"{func.overloadpacket} must not run here")
        return func(*args, **(kwargs or {}))


def _message(what: str, collective: str) -> str:
    return (
        f"{what} communicates between the ranks in step() ({collective}). Steps inside backward() come in the order "
        "of the gradients, which may differ from rank to rank, so that tensors of different parameters would meet, "
        f"or ranks wait for each other. Use {what} itself, or exchange gradients before the step with "
        "DistributedDataParallel or fully_shard()."
    )
