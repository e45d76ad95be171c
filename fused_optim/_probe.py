"""The probe: does a class give the same result stepped parameter by parameter as stepped at once?

Asked at construction of every class outside ``torch.optim``, on tiny parameters that look like the user's.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fused_optim import _guards, _torch
from fused_optim._random import random_states, restore, warn_of_draws
from fused_optim._shared import CoupledOptimizerError, differing, same, shared_values
from fused_optim._units import IsolatedUnit, coupled_message

Build = Callable[[list[dict[str, Any]]], Optimizer]

_SCALES = (1.0, 10.0, 0.1, 1.0, 100.0, 0.01, 1.0, 1.0, 10.0, 1.0)
"""Size of the gradients, step by step: couplings through a threshold show only on one side of it."""
_LARGEST_SIDE = 48
"""Sides of the user's parameters are cut to this: large enough for blocked kernels to round as they do."""
_WITHOUT_GRADIENT = {3: {0}, 6: {1, 2}}
"""Which parameters go without a gradient, by step."""


def probe(whole: Optimizer, build: Build) -> bool:
    """Steps tiny parameters at once and apart, and compares.

    Args:
        whole: the user's optimizer, whose groups the tiny ones imitate.
        build: makes an optimizer of the same class and arguments over given groups.

    Returns:
        Whether it draws random numbers, of which a warning was given.

    Raises:
        ValueError: if the results differ, or the class needs a closure or gradients of gradients. A class
            that cannot be built or stepped on the tiny parameters is not refused for that.
    """
    with _quietly(), torch.no_grad():
        twins = _twins(whole, build)
        if twins is None:
            return False
        drew = _compare(*twins)
    if drew:
        warn_of_draws(type(whole))
    return drew


def needs_probe(whole: Optimizer) -> bool:
    """Whether more than the class's own word is needed: classes outside ``torch.optim``, and one inside.

    The foreach implementation of ASGD in old releases steps all parameters by the rate of the first one, which
    differs as soon as one of them goes without a gradient.
    """
    if isinstance(whole, torch.optim.ASGD) and any(group["foreach"] is not False for group in whole.param_groups):
        return True
    return not type(whole).__module__.startswith("torch.optim.")


def _compare(joint: Optimizer, apart: Optimizer) -> bool:
    unit = IsolatedUnit(apart)
    step = _torch.unprofiled_step(type(joint))
    generator = torch.Generator().manual_seed(0)
    drew = False
    for number, scale in enumerate(_SCALES):
        for optimizer in (joint, apart):
            _set_gradients(optimizer, number, scale, generator.manual_seed(number))
        before = random_states()
        try:
            with Products() as together:
                step(joint)
        except Exception as error:
            _explain(type(joint), error)
            return drew
        drew = drew or before != random_states()
        restore(before)
        with Products() as alone:
            _step_apart(unit, apart)
        if together.batched and not alone.batched:
            raise CoupledOptimizerError(_stacks_message(type(joint)))
        if not drew:
            _require_equal(joint, apart)
    return drew


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether matrices are multiplied in batches.

    A product of stacked matrices rounds differently than each product alone, on some shapes and some processors:
    the values of a few small matrices cannot tell.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batched = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.batched = self.batched or func.overloadpacket in _BATCHED
        return func(*args, **(kwargs or {}))


_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def _stacks_message(optimizer_class: type[Optimizer]) -> str:
    name = optimizer_class.__name__
    return (
        f"{name} couples its parameters: it stacks matrices of one shape and multiplies them together, which rounds "
        f"differently than stepping them one by one. Pass foreach=False to {name}, or use {name} itself."
    )


def _step_apart(unit: IsolatedUnit, optimizer: Optimizer) -> None:
    unit.begin_round()
    for index, group in reversed(list(enumerate(optimizer.param_groups))):
        for param in reversed(group["params"]):
            if param.grad is None:
                continue
            try:
                unit.step(index, [param])
            except CoupledOptimizerError:
                raise
            except Exception as error:
                raise ValueError(
                    f"{type(optimizer).__name__} can step all parameters at once, but not one by one as a step "
                    f"inside backward() does: {type(error).__name__}: {error}. Use "
                    f"{type(optimizer).__name__} itself."
                ) from error
    unit.commit(watch=False)


def _require_equal(joint: Optimizer, apart: Optimizer) -> None:
    pairs = zip(_params(joint), _params(apart))
    for first, second in pairs:
        before, after = joint.state.get(first, {}), apart.state.get(second, {})
        for key in [*before, *(key for key in after if key not in before)]:
            if not same(before.get(key), after.get(key)):
                raise CoupledOptimizerError(coupled_message(joint, ("state", 0), key))
        if not same(first.data, second.data):
            raise CoupledOptimizerError(coupled_message(joint, ("state", 0), "params"))
    for place, key, value in differing(shared_values(joint), shared_values(apart)):
        if isinstance(value, dict) and any(isinstance(item, Tensor) for item in value):
            continue  # kept by parameter, of which the twins have their own: it shows in the values above
        raise CoupledOptimizerError(coupled_message(joint, place, key))


def _explain(optimizer_class: type[Optimizer], error: Exception) -> None:
    if "closure" in f"{type(error).__name__} {error}".lower():
        raise ValueError(_guards.needs_closure(optimizer_class)) from error
    if "does not require grad" in str(error):
        raise ValueError(
            f"{optimizer_class.__name__} differentiates the gradients in step(), for which all of them must "
            f"exist together. Use {optimizer_class.__name__} itself."
        ) from error


def _twins(whole: Optimizer, build: Build) -> tuple[Optimizer, Optimizer] | None:
    for groups in _tiny_groups(whole):
        with contextlib.suppress(Exception):
            states = random_states()
            joint = build(_fresh(groups))
            restore(states)
            apart = build(_fresh(groups))
            if _steps(build, groups):
                return joint, apart
    return None


def _steps(build: Build, groups: list[dict[str, Any]]) -> bool:
    trial = build(_fresh(groups))
    _set_gradients(trial, 0, 1.0, torch.Generator().manual_seed(0))
    try:
        _torch.unprofiled_step(type(trial))(trial)
    except Exception as error:
        text = f"{type(error).__name__} {error}".lower()
        return "closure" in text or "does not require grad" in text
    return True


def _tiny_groups(whole: Optimizer) -> Iterator[list[dict[str, Any]]]:
    """Groups to try, the most telling first: shapes and options of the user's own, then plainer ones."""
    groups = [whole.param_groups[0], whole.param_groups[-1]]
    own = [{key: value for key, value in group.items() if "param" not in key} for group in groups]
    if isinstance(whole, torch.optim.ASGD):
        own = [{**extras, "foreach": True} for extras in own]
    shapes: list[list[tuple[int, ...]]] = [_tiny_shapes(group["params"]) for group in groups]
    plain: list[dict[str, Any]] = [{}, {}]
    for extras in (own, plain):
        for chosen in (shapes, [[(4, 3), (5,)]] * 2, [[(4, 3), (3, 5)]] * 2):
            tiny = [[torch.zeros(shape) for shape in group_shapes] for group_shapes in chosen]
            yield [{**extra, "params": params} for extra, params in zip(extras, tiny)]


def _tiny_shapes(params: list[Tensor]) -> list[tuple[int, ...]]:
    """The first two shapes twice, so that equal ones meet and pairs stay pairs, and one of another rank."""
    shapes = [tuple(min(size, _LARGEST_SIDE) for size in param.shape) for param in params]
    first = shapes[:2] or [(4, 3)]
    other = [shape for shape in shapes if len(shape) != len(first[0])]
    return [*first, *first, *other[:1]]


def _fresh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    fresh = []
    for group in groups:
        params = [
            torch.nn.Parameter(torch.randn(param.shape, generator=generator, dtype=torch.float32, device="cpu"))
            for param in group["params"]
        ]
        fresh.append({**{key: copy.deepcopy(value) for key, value in group.items()}, "params": params})
    return fresh


def _set_gradients(optimizer: Optimizer, number: int, scale: float, generator: torch.Generator) -> None:
    for position, param in enumerate(_params(optimizer)):
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float32, device="cpu") * scale
        param.grad = None if position in _WITHOUT_GRADIENT.get(number, ()) else grad


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps the user's random streams as they are, compiles nothing and passes no warning on."""
    states = random_states()
    stance = getattr(torch.compiler, "set_stance", None)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        if stance is not None and "torch._dynamo" in sys.modules:
            stack.enter_context(stance("force_eager"))
        try:
            yield
        finally:
            restore(states)
