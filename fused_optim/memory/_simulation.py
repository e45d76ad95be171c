"""Running training on fake tensors, once for each way to train."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from ._fakes import Answers, Fakes, NotFakeable, is_fake_trouble
from ._record import record
from ._recording import Breakdown, Moment, Recording
from ._storages import tensors_in

Inputs = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Loss = Callable[[Any], torch.Tensor]
VARIANTS = ("plain", "foreach=False", "fused")

# Two iterations: the first creates the optimizer's state, the second is like all that follow.
_ITERATIONS = 2


@dataclass(frozen=True)
class Variant:
    """What one way to train takes.

    Attributes:
        peak: bytes by category at the peak. Where the model could not be run, activations are missing
            from it.
        moment: when the peak is; None where the model could not be run.
        recording: the recording of two iterations on fake tensors; None where the model could not be run.
    """

    peak: Breakdown
    moment: Moment | None = None
    recording: Recording | None = None

    def to_dict(self) -> dict[str, Any]:
        """Peak in bytes by category, and its moment."""
        moment = None if self.moment is None else {"phase": self.moment.phase, "module": self.moment.module}
        return {"peak": self.peak.to_dict(), "moment": moment}


class Simulation:
    """Runs training on fake tensors, once for each way to train."""

    def __init__(
        self,
        model_factory: Callable[[], torch.nn.Module],
        optimizer_class: type[torch.optim.Optimizer],
        example_inputs: Inputs,
        loss: Loss | None,
        device: str,
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Keeps what `estimate` was given.

        Raises:
            ValueError: ``device`` is neither ``"cpu"`` nor an available ``"cuda"``.
        """
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"expected device 'cpu', or 'cuda' on a machine that has it, got {device!r}: use 'cpu'")
        self.notes: list[str] = []
        self._factory = model_factory
        self._class = optimizer_class
        self._inputs = example_inputs
        self._loss = loss or default_loss
        self._device = device
        self._kwargs = dict(optimizer_kwargs)
        self._real: torch.nn.Module | None = None
        self._fakes = Fakes()

    def variants(self) -> list[str]:
        """Names of the ways to train that need a run of their own."""
        names = list(VARIANTS)
        if self.default_is_a_loop() or "foreach" not in signature(self._class).parameters:
            names.remove("foreach=False")
        return names

    def default_is_a_loop(self) -> bool:
        """Whether the optimizer, left alone, steps one parameter after the other."""
        given = {name for name, value in self._kwargs.items() if value}
        has_argument = "foreach" in signature(self._class).parameters
        return self._device == "cpu" and has_argument and not given & {"foreach", "fused"}

    def run(self, variant: str, batch: int | None = None) -> Variant:
        """Simulates one way to train.

        Args:
            variant: one of `VARIANTS`.
            batch: size to replace the first dimension of every input by.

        Raises:
            NotFakeable: the model cannot run on fake tensors.
            ValueError: the model rejects the inputs.
        """
        model = self.build()
        optimizer = self._optimizer(variant, model)
        with self._fakes.entered() as answers:
            inputs = self._fake_inputs(batch)
            with record(model, optimizer) as recording:
                for _ in range(_ITERATIONS):
                    self._iterate(model, optimizer, inputs, answers)
        return Variant(recording.peak, recording.peak_moment, recording)

    def formula(self, variant: str) -> Variant:
        """The peak of one way to train as far as it is known without running the model."""
        model = self.build()
        optimizer = self._optimizer("foreach=False" if variant == "fused" else variant, model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with self._fakes.entered() as answers, torch.no_grad(), record(model, optimizer) as recording:
            answers.number, answers.truth = 1.0, False
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
        largest = max((_size(parameter) for parameter in trained), default=0)
        peak = recording.peak
        if variant != "fused":
            return Variant(peak)
        return Variant(Breakdown(peak.parameters, largest, recording.final.optimizer_state, other=peak.other))

    def build(self) -> torch.nn.Module:
        """Builds the model out of fake tensors.

        Raises:
            TypeError: the factory makes no module.
        """
        if self._real is None:
            try:
                return self._build_fake()
            except Exception as error:
                if not is_fake_trouble(error):
                    raise
                reason = _line(error)
            self._real = _module(self._factory()).to("meta")
            self.notes.append(f"the model was built for real once, since building it reads values ({reason})")
        model = copy.deepcopy(self._real)
        with self._fakes.entered():
            return model.to_empty(device=self._device)

    def _build_fake(self) -> torch.nn.Module:
        with self._fakes.entered() as answers, torch.device(self._device):
            # Initialisation repeats draws until no value is out of bounds; with False none ever is.
            answers.truth = False
            return _module(self._factory())

    def _iterate(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs, answers: Answers
    ) -> None:
        answers.number = answers.truth = None
        # Held until the end, as the variable of a training loop does.
        output, loss = self._forward(model, inputs)
        # A fused optimizer steps in backward. An optimizer's numbers (a step count, a norm) size no tensor.
        answers.number, answers.truth = 1.0, False
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        del output

    def _forward(self, model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
        try:
            output = _call(model, inputs)
            loss = self._loss(output)
        except Exception as error:
            if is_fake_trouble(error):
                raise NotFakeable(f"the model cannot run on fake tensors ({_line(error)})") from error
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(inputs))
            raise ValueError(f"the model rejects inputs of shape {shapes}: {_line(error)}") from error
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"expected a scalar loss that requires a gradient, got shape {tuple(loss.shape)} with "
                f"requires_grad={loss.requires_grad}: check loss and which parameters are trained"
            )
        return output, loss

    def _optimizer(self, variant: str, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Makes the optimizer outside of fake mode, since one may try itself out on tensors of its own."""
        # Fake parameters are of another type than real ones, which switches the CUDA default off.
        kwargs = dict(self._kwargs)
        if "foreach" in signature(self._class).parameters and not kwargs.get("fused"):
            kwargs.setdefault("foreach", self._device == "cuda")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if variant == "foreach=False":
            kwargs.update(foreach=False)
            kwargs.pop("fused", None)
        if variant != "fused":
            return self._class(trained, **kwargs)
        from fused_optim import BackwardFusedOptimizer

        with warnings.catch_warnings():
            # A check for shared memory asks for addresses, and the answer that there is none is the right
            # one.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            return BackwardFusedOptimizer(self._class, trained, **kwargs)

    def _fake_inputs(self, batch: int | None) -> Any:
        made: dict[int, torch.Tensor] = {}

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            # One tensor given twice, as inputs and labels, stays one.
            return made.setdefault(id(tensor), self._fake_input(tensor, batch))

        return _map_tensors(self._inputs, fake)

    def _fake_input(self, tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
        shape = tuple(tensor.shape) if batch is None else (batch, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device=self._device)


def default_loss(output: Any) -> torch.Tensor:
    """The output's ``loss`` if it has one, else the sum of its first floating-point tensor.

    Raises:
        ValueError: there is no floating-point tensor in the output.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    for tensor in tensors_in(output):
        if tensor.is_floating_point():
            return tensor.sum()
    raise ValueError(f"found no floating-point tensor in an output of type {type(output).__name__}: pass loss")


def _call(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_map_tensors(item, change) for item in value)
    return value


def _module(built: object) -> torch.nn.Module:
    if not isinstance(built, torch.nn.Module):
        raise TypeError(f"expected the factory to make a torch.nn.Module, got {type(built).__name__}")
    return built


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
