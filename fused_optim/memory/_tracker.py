"""The dispatch mode that watches every operation and says what the storages it meets are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._places import BACKWARD, FORWARD, FUSED_STEP, STEP, Places
from ._storages import StorageLog, tensors_in

# Ranks of the categories: of all that a storage has been in its life, the highest counts.
TEMPORARY, ACTIVATION, OTHER, GRADIENT, STATE, PARAMETER = range(6)

_PERSISTENT = (STATE, PARAMETER)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs storages between operations, from `start` to `stop`.

    Attributes:
        log: births and deaths of storages; its labels are positions in ``places``.
        places: pairs of a phase and a module's name.
        first_event: the event that completes what was alive before the start.

    The mode follows the thread that starts it and, because the autograd engine hands dispatch modes on, the
    threads that run its backward passes.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device_type: str) -> None:
        """Prepares the log, without switching anything on.

        Args:
            model: whose parameters, buffers and gradients are told apart.
            optimizer: whose parameters and state are told apart.
            device_type: only tensors on this type of device are counted.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = StorageLog(device_type)
        self.places: list[tuple[str, str]] = [(FORWARD, "")]
        self.first_event = 0
        self._model = model
        self._optimizer = optimizer
        self._hooks = Places(model, self._sweep)
        self._place_labels = {self.places[0]: 0}
        self._phase = FORWARD
        self._young: list[int] = []
        self._by_storage: dict[int, list[torch.Tensor]] = {}

    def start(self) -> None:
        """Enters what is alive already, attaches the hooks and enters the mode."""
        self._sweep()
        self.first_event = max(0, len(self.log.events) - 1)
        self._hooks.attach()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Leaves the mode, removes the hooks and closes the log."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.detach()

    def detach(self) -> None:
        """Removes the hooks and closes the log; the part of `stop` that a failed `start` needs too."""
        self._hooks.detach()
        self._sweep()
        self._settle_forward()
        self.log.close()
        self._by_storage.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.log.poll()
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        self._place(inputs)
        for tensor in inputs:
            self._see(tensor, OTHER)
        born = ACTIVATION if self._recomputes() else None
        for tensor in tensors_in(result):
            self._see(tensor, born)
        return result

    def _see(self, tensor: torch.Tensor, category: int | None) -> None:
        for number, new in self.log.see(tensor):
            if not new:
                continue
            if category is not None:
                self.log.claim(number, category)
            elif self._phase == FORWARD:
                self._young.append(number)
            else:
                self.log.claim(number, TEMPORARY)

    def _recomputes(self) -> bool:
        # The engine runs backward without grad mode; activation checkpointing switches it on to repeat a
        # forward.
        return self._phase == BACKWARD and torch.is_grad_enabled()

    def _place(self, inputs: list[torch.Tensor]) -> None:
        numbers = [number for tensor in inputs for number in self.log.numbers(tensor)]
        phase = self._hooks.phase(any(self.log.category[number] in _PERSISTENT for number in numbers))
        if phase == FUSED_STEP:
            self._claim_gradients(numbers)
        if _outer(phase) != _outer(self._phase):
            self._turn(_outer(phase))
        self._phase = phase
        owner = self._owner(numbers) if phase in (STEP, FUSED_STEP) else self._hooks.module(phase)
        self.log.label = self._label((phase, owner))

    def _owner(self, numbers: list[int]) -> str:
        owners = {self.log.owner[number].rpartition(".")[0] for number in numbers if self.log.owner[number]}
        if len(owners) == 1:
            return owners.pop()
        return "" if owners else self.places[self.log.label][1]

    def _label(self, place: tuple[str, str]) -> int:
        label = self._place_labels.setdefault(place, len(self.places))
        if label == len(self.places):
            self.places.append(place)
        return label

    def _turn(self, phase: str) -> None:
        if phase == BACKWARD:
            self._settle_forward()
        else:
            self._sweep()

    def _settle_forward(self) -> None:
        # What forward made and backward finds alive was kept for it; the rest was scratch.
        for number in self._young:
            self.log.claim(number, ACTIVATION if self.log.alive[number] else TEMPORARY)
        self._young.clear()

    def _claim_gradients(self, numbers: list[int]) -> None:
        for number in numbers:
            for parameter in self._by_storage.get(number, ()):
                if parameter.grad is not None:
                    self._claim(parameter.grad, GRADIENT, self.log.owner[number])

    def _sweep(self) -> None:
        """Looks up who owns what: the model parameters, a parameter its gradient, the optimizer state."""
        self._by_storage.clear()
        names: dict[torch.Tensor, str] = {}
        for name, parameter in self._parameters():
            names.setdefault(parameter, name)
            for number in self._claim(parameter, PARAMETER, name):
                self._by_storage.setdefault(number, []).append(parameter)
            if parameter.grad is not None:
                self._claim(parameter.grad, GRADIENT, name)
        for buffer in self._model.buffers():
            self._claim(buffer, OTHER)
        for key, state in list(self._optimizer.state.items()):
            owner = names.get(key, "") if isinstance(key, torch.Tensor) else ""
            for tensor in tensors_in(state):
                self._claim(tensor, STATE, owner)

    def _claim(self, tensor: torch.Tensor, category: int, owner: str = "") -> list[int]:
        numbers = [number for number, _ in self.log.see(tensor)]
        for number in numbers:
            self.log.claim(number, category, owner)
        return numbers

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"group {index}.parameter {position}", parameter


def _outer(phase: str) -> str:
    return BACKWARD if phase == FUSED_STEP else phase
