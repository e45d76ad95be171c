"""Births and deaths of tensor storages, in the order in which they happen."""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

_Death = Callable[[int], None]


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested tuples, lists and mappings.

    Args:
        value: anything; what is neither a tensor nor a container of tensors is passed over.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the strided tensors whose storages hold the data of ``tensor``.

    A wrapper such as DTensor reports the global size and holds only its local part, and a sparse tensor has
    no storage of its own.

    Args:
        tensor: a tensor of any layout or subclass.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from dense_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        # The public accessors refuse a tensor that is not coalesced, which gradients of embeddings are.
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _address(storage: torch.UntypedStorage) -> int:
    # No public name identifies a storage on every supported version: `id` does only where a storage keeps its
    # Python object, and `data_ptr` is zero for every fake tensor.
    return int(storage._cdata)


class _FinalizedStorages:
    """Follows storages that keep their Python object for life: a finalizer tells when one dies."""

    def __init__(self, died: _Death) -> None:
        self._died = died
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def follow(self, storage: torch.UntypedStorage, address: int) -> None:
        self._references[address] = weakref.ref(storage, partial(self._finalize, address))

    def _finalize(self, address: int, _: object) -> None:
        del self._references[address]
        self._died(address)

    def poll(self) -> None:
        """Nothing to do: deaths report themselves."""

    def clear(self) -> None:
        self._references.clear()


class _PolledStorages:
    """Follows storages that make a new Python object at every access (torch 2.1): they have to be asked."""

    def __init__(self, died: _Death) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._reference = StorageWeakRef
        self._died = died
        self._references: dict[int, Any] = {}

    def follow(self, storage: torch.UntypedStorage, address: int) -> None:
        self._references[address] = self._reference(storage)  # type: ignore[no-untyped-call]

    def poll(self) -> None:
        for address in [address for address, reference in self._references.items() if reference.expired()]:
            del self._references[address]
            self._died(address)

    def clear(self) -> None:
        self._references.clear()


def _follower(died: _Death) -> _FinalizedStorages | _PolledStorages:
    probe = torch.empty(0)
    if probe.untyped_storage() is probe.untyped_storage():
        return _FinalizedStorages(died)
    return _PolledStorages(died)


class StorageLog:
    """The log of one recording: which storage was born or died when, and under which label.

    A storage gets a number at birth. What it is (its category and owner) may become known later in its life
    and then holds for all of it: the product of a matrix multiplication that ends up in ``.grad`` was a
    gradient from the start.

    Attributes:
        bytes: size of each storage in bytes, by number.
        category: rank of each storage's category, by number; see `claim`.
        owner: name of the parameter that each storage belongs to, or an empty string, by number.
        alive: whether each storage is alive, by number.
        events: for each event the number of the storage.
        deltas: for each event the bytes that came (positive) or went (negative).
        labels: for each event the `label` that held at the time.
        seconds: for each event the seconds since the log began.
        label: what new events are labelled with.
    """

    def __init__(self, device_type: str) -> None:
        """Begins an empty log.

        Args:
            device_type: only tensors on this type of device are counted, for example ``"cuda"``.
        """
        self.bytes: list[int] = []
        self.category: list[int] = []
        self.owner: list[str] = []
        self.alive = bytearray()
        self.events = array("q")
        self.deltas = array("q")
        self.labels = array("q")
        self.seconds = array("d")
        self.label = 0
        self._device_type = device_type
        self._numbers: dict[int, int] = {}
        self._follower = _follower(self._died)
        self._start = time.perf_counter()

    def poll(self) -> None:
        """Notices deaths that do not report themselves."""
        self._follower.poll()

    def numbers(self, tensor: torch.Tensor) -> Iterator[int]:
        """Yields the numbers of the storages of ``tensor`` that are in the log already."""
        for part in dense_parts(tensor):
            number = self._numbers.get(_address(part.untyped_storage()))
            if number is not None:
                yield number

    def see(self, tensor: torch.Tensor) -> Iterator[tuple[int, bool]]:
        """Enters the storages of ``tensor``, and changes of their size.

        Args:
            tensor: a tensor that is alive now.

        Yields:
            For each storage its number and whether it is new to the log.
        """
        for part in dense_parts(tensor):
            if part.device.type == self._device_type:
                yield self._see(part.untyped_storage())

    def claim(self, number: int, category: int, owner: str = "") -> None:
        """Says what a storage is; the strongest claim of its life holds.

        Args:
            number: the storage's number.
            category: rank of the category; a lower one never replaces a higher one.
            owner: name of the parameter that the storage belongs to.
        """
        if category > self.category[number]:
            self.category[number] = category
            self.owner[number] = owner

    def close(self) -> None:
        """Stops following storages."""
        self._follower.poll()
        self._follower.clear()
        self._numbers.clear()

    def _see(self, storage: torch.UntypedStorage) -> tuple[int, bool]:
        address, size = _address(storage), storage.nbytes()
        number = self._numbers.get(address)
        if number is None:
            return self._enter(storage, address, size), True
        if size != self.bytes[number]:
            self._append(number, size - self.bytes[number])
            self.bytes[number] = size
        return number, False

    def _enter(self, storage: torch.UntypedStorage, address: int, size: int) -> int:
        number = len(self.bytes)
        self.bytes.append(size)
        self.category.append(-1)
        self.owner.append("")
        self.alive.append(1)
        self._numbers[address] = number
        self._follower.follow(storage, address)
        self._append(number, size)
        return number

    def _died(self, address: int) -> None:
        number = self._numbers.pop(address)
        self.alive[number] = 0
        self._append(number, -self.bytes[number])

    def _append(self, number: int, delta: int) -> None:
        self.events.append(number)
        self.deltas.append(delta)
        self.labels.append(self.label)
        self.seconds.append(time.perf_counter() - self._start)
