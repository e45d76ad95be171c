"""Predicting the memory of a training run on fake tensors, which have shapes and no data."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._advice import advice
from ._record import record
from ._recording import CATEGORIES, Breakdown, Moment, Recording, format_bytes
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


@dataclass(frozen=True)
class Estimate:
    """What training would take; made by `fused_optim.memory.estimate`.

    Attributes:
        plain: the optimizer with its defaults and the given arguments.
        foreach_false: the same with ``foreach=False``; None where the optimizer has no such argument.
        fused: the optimizer in a `fused_optim.BackwardFusedOptimizer`.
        parameters: number of the model's parameters.
        trainable: number of those that require a gradient.
        unknown: why activations are missing; empty where nothing is.
        notes: what else to know about how the figures were made.
    """

    plain: Variant
    foreach_false: Variant | None
    fused: Variant
    parameters: int
    trainable: int
    unknown: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def advice(self) -> str:
        """What dominates the peak, what fusing saves, and what saves more where that is little."""
        return advice(self.plain.peak, self.fused.peak, self.trainable, self.parameters, known=not self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as numbers, strings and dictionaries; sizes in bytes."""
        return {
            "plain": self.plain.to_dict(),
            "foreach=False": None if self.foreach_false is None else self.foreach_false.to_dict(),
            "fused": self.fused.to_dict(),
            "parameters": self.parameters,
            "trainable": self.trainable,
            "unknown": self.unknown,
            "notes": list(self.notes),
            "advice": self.advice,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        variants = (self.plain, self.foreach_false, self.fused)
        rows: list[tuple[str, ...]] = [("at the peak", *VARIANTS)]
        for name in (*CATEGORIES, "total"):
            if name == "activations" and self.unknown:
                sizes = ["unknown"] * len(variants)
            else:
                sizes = ["-" if one is None else format_bytes(getattr(one.peak, name)) for one in variants]
            rows.append((name.replace("_", " "), *sizes))
        lines = [f"{name:16}" + "".join(f"{cell:>15}" for cell in cells) for name, *cells in rows]
        lines += [f"{name}: peak in {one.moment}" for name, one in zip(VARIANTS, variants) if one and one.moment]
        lines += [f"note: {note}" for note in (self.unknown, *self.notes) if note]
        return "\n".join([*lines, self.advice])


def estimate(
    model_factory: Callable[[], torch.nn.Module],
    optimizer_class: type[torch.optim.Optimizer],
    example_inputs: Inputs,
    *,
    loss: Loss | None = None,
    device: str = "cpu",
    **optimizer_kwargs: Any,
) -> Estimate:
    """Predicts the peak memory of ordinary and fused training without allocating the model.

    Two iterations (forward, backward, ``step``, ``zero_grad``) run on fake tensors for each way to train, and
    a recorder watches them, so the figures have the meaning that those of `fused_optim.memory.record` have.
    The model's output is held until the end of its iteration.

    Args:
        model_factory: builds the model, in the dtype and with the frozen parameters it is trained with.
        optimizer_class: a class of `torch.optim` or alike.
        example_inputs: a tensor, a sequence of positional arguments or a mapping of keyword arguments for
            the model. Only shapes and dtypes are used, so tensors on the ``meta`` device will do.
        loss: turns the model's output into the scalar to call ``backward()`` on. By default the output's
            ``loss`` if it has one, else the sum of its first floating-point tensor.
        device: ``"cpu"``, or ``"cuda"`` on a machine that has one: some operators and the optimizers' default
            implementation differ.
        **optimizer_kwargs: arguments of the optimizer.

    Returns:
        The figures for the optimizer's default, ``foreach=False`` and fused. Where the model reads values of
        tensors, which fake ones do not have, parameters, gradients and state are exact and activations
        unknown.

    Raises:
        ValueError: the model rejects the inputs, the loss is no scalar that requires a gradient, or the
            device is none.
        TypeError: ``model_factory`` makes no module, or the optimizer rejects its arguments.

    Example:
        >>> import torch
        >>> from fused_optim import memory
        >>> figures = memory.estimate(
        ...     lambda: torch.nn.Linear(1000, 1000), torch.optim.Adam, torch.empty(1, 1000, device="meta")
        ... )
        >>> figures.plain.peak.gradients
        4004000
    """
    simulation = Simulation(model_factory, optimizer_class, example_inputs, loss, device, optimizer_kwargs)
    variants, unknown = _run_all(simulation)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in simulation.build().parameters()]
    return Estimate(
        variants["plain"],
        variants.get("foreach=False"),
        variants["fused"],
        sum(size for size, _ in sizes),
        sum(size for size, trainable in sizes if trainable),
        unknown,
        tuple(simulation.notes),
    )


def _run_all(simulation: Simulation) -> tuple[dict[str, Variant], str]:
    unknown = ""
    run: Callable[[str], Variant] = simulation.run
    variants: dict[str, Variant] = {}
    for name in simulation.variants():
        try:
            variants[name] = run(name)
        except NotFakeable as error:
            unknown = f"activations are unknown: {error}"
            run = simulation.formula
            variants[name] = run(name)
    if simulation.default_is_a_loop():
        # The default is foreach=False already, by the optimizers' documentation.
        variants["foreach=False"] = variants["plain"]
    return variants, unknown


class NotFakeable(Exception):
    """The model does something that fake tensors cannot do."""


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        self._mode: Any = None

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
        with self.fakes() as answers:
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
        with self.fakes() as answers, torch.no_grad(), record(model, optimizer) as recording:
            answers.number, answers.truth = 1.0, False
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
        largest = max((_size(parameter) for parameter in trained), default=0)
        peak = recording.peak
        if variant != "fused":
            return Variant(peak)
        return Variant(Breakdown(peak.parameters, largest, recording.final.optimizer_state, other=peak.other))

    @contextmanager
    def fakes(self) -> Iterator[_Answers]:
        """Makes all new tensors fake while the body runs; yields what answers questions for their values."""
        if self._mode is None:
            # There is no public way to fake tensors. Imported here because it takes a second.
            from torch._subclasses.fake_tensor import FakeTensorMode

            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        disabled = logger.disabled
        # A shape that an operator rejects is logged with a traceback before it is raised.
        logger.disabled = True
        try:
            with self._mode, _Answers() as answers:
                yield answers
        finally:
            logger.disabled = disabled

    def build(self) -> torch.nn.Module:
        """Builds the model out of fake tensors.

        Raises:
            TypeError: the factory makes no module.
        """
        if self._real is None:
            try:
                return self._build_fake()
            except Exception as error:
                if not _is_fake_trouble(error):
                    raise
                reason = _line(error)
            self._real = _module(self._factory()).to("meta")
            self.notes.append(f"the model was built for real once, since building it reads values ({reason})")
        model = copy.deepcopy(self._real)
        with self.fakes():
            return model.to_empty(device=self._device)

    def _build_fake(self) -> torch.nn.Module:
        with self.fakes() as answers, torch.device(self._device):
            # Initialisation repeats draws until no value is out of bounds; with False none ever is.
            answers.truth = False
            return _module(self._factory())

    def _iterate(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs, answers: _Answers
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
            if _is_fake_trouble(error):
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


def _is_fake_trouble(error: Exception) -> bool:
    # Errors of fake tensors have private types. Reading data or calling NumPy on one gives a plain
    # RuntimeError.
    if type(error).__module__.startswith(("torch._subclasses", "torch.fx.experimental")):
        return True
    text = str(error)
    return any(words in text for words in ("FakeTensor", "tensor subclasses", "data pointer", "meta tensors"))


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
