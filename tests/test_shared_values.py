"""What an optimizer keeps for all its parameters together, wherever it keeps it: read and written once a round."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from twins import Twins, assert_equal, assert_no_gradients, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

FULL = range(4)


class Base(Optimizer):
    """Steps every parameter by a rate that depends on a counter; subclasses say where the counter lives."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.prepare()

    def prepare(self) -> None:
        """Makes the counter."""

    def count(self) -> float:
        """Advances the counter, once a step."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        k = self.count()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / k)


class InTheGroup(Base):
    def count(self) -> float:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return float(self.param_groups[0]["k"])


class TensorInTheGroup(Base):
    def prepare(self) -> None:
        for group in self.param_groups:
            group["k"] = torch.zeros(())

    def count(self) -> float:
        for group in self.param_groups:
            group["k"] += 1
        return float(self.param_groups[0]["k"])


class InTheStateUnderAString(Base):
    def count(self) -> float:
        self.state["k"] = self.state.get("k", 0) + 1
        return float(self.state["k"])


class InADictOfTheState(Base):
    def count(self) -> float:
        books = self.state["books"]
        books["k"] = books.get("k", 0) + 1
        return float(books["k"])


class InAnAttribute(Base):
    k = 0

    def count(self) -> float:
        self.k += 1
        return float(self.k)


class InATensorAttribute(Base):
    def prepare(self) -> None:
        self.k = torch.zeros(1)

    def count(self) -> float:
        self.k += 1
        return float(self.k)


class InAList(Base):
    def prepare(self) -> None:
        self.history: list[int] = []

    def count(self) -> float:
        self.history.append(len(self.history))
        return float(len(self.history))


class InADict(Base):
    def prepare(self) -> None:
        self.books = {"nested": {"k": 0}}

    def count(self) -> float:
        self.books["nested"]["k"] += 1
        return float(self.books["nested"]["k"])


class InAnObject(Base):
    def prepare(self) -> None:
        self.schedule = types.SimpleNamespace(k=torch.zeros(()), seen=[0])

    def count(self) -> float:
        self.schedule.k += 1
        self.schedule.seen[0] += 1
        return float(self.schedule.k)


class ThroughABoundMethod(Base):
    def prepare(self) -> None:
        self.k = 0
        self.advance = self.really_advance

    def really_advance(self) -> int:
        self.k += 1
        return self.k

    def count(self) -> float:
        return float(self.advance())


class InThePrivateOrder(Base):
    """Reads the counter before it is advanced: what units start from must be the same."""

    k = 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / self.k)
        self.k *= 2


class OnlyIfSomethingHadAGradient(Base):
    k = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            self.k += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / self.k)


class PerParameterDict(Base):
    """Keeps the momentum in an attribute, keyed by parameter."""

    def prepare(self) -> None:
        self.momentum: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    buffer = self.momentum.setdefault(param, torch.zeros_like(param))
                    buffer.mul_(0.9).add_(param.grad)
                    param.sub_(buffer, alpha=group["lr"])


class ByGroupIndex(Base):
    """Keeps the first rate of each group in a list by the position of the group."""

    def prepare(self) -> None:
        self.base_lrs = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group, base_lr in zip(self.param_groups, self.base_lrs):
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * base_lr / group["k"])


class TouchesParametersWithoutGradient(Base):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["age"] = state.get("age", 0) + 1
                param.mul_(1 - 0.01 * state["age"])
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


class MakesZeroGradients(Base):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                buffer = self.state[param].setdefault("buffer", torch.zeros_like(param))
                buffer.mul_(0.9).add_(grad)
                param.sub_(buffer, alpha=group["lr"])


EXACT = [
    InTheGroup,
    TensorInTheGroup,
    InTheStateUnderAString,
    InADictOfTheState,
    InAnAttribute,
    InATensorAttribute,
    InAList,
    InADict,
    InAnObject,
    ThroughABoundMethod,
    InThePrivateOrder,
    OnlyIfSomethingHadAGradient,
    PerParameterDict,
    ByGroupIndex,
    TouchesParametersWithoutGradient,
    MakesZeroGradients,
]
BY_CLASS = pytest.mark.parametrize("optimizer_class", EXACT, ids=lambda value: value.__name__)


def two_groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]


def shared_of(optimizer: Any) -> dict[str, Any]:
    """The attributes in which the classes above keep something."""
    names = ("k", "history", "books", "base_lrs")
    return {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}


@pytest.mark.parametrize("cap", [0, 1.0], ids=["alone", "in runs"])
@BY_CLASS
def test_exact_wherever_the_counter_lives(optimizer_class: type[Optimizer], cap: float) -> None:
    twins = Twins(optimizer_class, group_by=two_groups, options={"bucket_cap_mb": cap})
    for seed in range(6):
        twins.iterate(seed, [index for index in FULL if (index + seed) % 3])
        twins.check(f"iteration {seed}")
        assert_equal(shared_of(twins.plain), shared_of(twins.fused))
        assert_no_gradients(twins.fused)


@BY_CLASS
def test_exact_without_calling_step(optimizer_class: type[Optimizer]) -> None:
    twins = Twins(optimizer_class, group_by=two_groups)
    for seed in range(5):
        for params, optimizer in twins.each():
            optimizer.zero_grad()
            loss_of(params, [index for index in FULL if (index + seed) % 3], seed).backward()
        twins.plain.step()
        twins.check(f"iteration {seed}")
        assert_equal(shared_of(twins.plain), shared_of(twins.fused))


@BY_CLASS
def test_exact_when_taken_over_in_mid_training_and_when_copied(optimizer_class: type[Optimizer]) -> None:
    params, others = make_params(), make_params()
    optimizer, other = optimizer_class(two_groups(params)), optimizer_class(two_groups(others))
    for seed in range(3):
        for chosen, each in ((params, optimizer), (others, other)):
            loss_of(chosen, FULL, seed).backward()
            each.step()
            each.zero_grad()
    fused: Any = BackwardFusedOptimizer.from_optimizer(other)
    for seed in range(3, 8):
        if seed == 6:
            others, fused = copy.deepcopy((others, fused))
        for chosen, each in ((params, optimizer), (others, fused)):
            loss_of(chosen, (seed % 4, 3), seed).backward()
            each.step()
            each.zero_grad()
        assert all(map(torch.equal, params, others))
        assert_equal(optimizer.state_dict(), fused.state_dict())


# Coupled ones


class ThroughTheGroup(Base):
    """Writes the largest gradient seen so far into its group, as D-Adaptation does with its estimate."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    group["d"] = max(group.get("d", 0.0), float(param.grad.abs().max()))
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / group["d"], alpha=group["lr"])


class ThroughAnAttribute(Base):
    """Sums up what it has seen."""

    seen = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.seen += float(param.grad.abs().sum())
                    param.sub_(param.grad, alpha=group["lr"] / (1 + self.seen))


class ThroughTheState(Base):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state["norm"] = self.state.get("norm", 0.0) + float(param.grad.norm())
                    param.sub_(param.grad, alpha=group["lr"] / (1 + self.state["norm"]))


class ThroughItsParameters(Base):
    """Nothing is stored: only the weights tell."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = sum(float(param.grad.square().sum()) for param in params) ** 0.5
        for param in params:
            param.sub_(param.grad, alpha=0.1 / (1 + scale))


COUPLED = [ThroughTheGroup, ThroughAnAttribute, ThroughTheState, ThroughItsParameters]


@pytest.mark.parametrize("optimizer_class", COUPLED, ids=lambda value: value.__name__)
def test_coupled_classes_are_refused_at_construction(optimizer_class: type[Optimizer]) -> None:
    name = optimizer_class.__name__
    with pytest.raises(ValueError, match=f"{name} couples its parameters.*use {name} itself"):
        BackwardFusedOptimizer(optimizer_class, make_params())
    with pytest.raises(ValueError, match=f"{name} couples its parameters"):
        BackwardFusedOptimizer.from_optimizer(optimizer_class(make_params()))


class CoupledLater(Base):
    """Ordinary for twenty steps, then writes a value into its group that depends on one parameter's gradient."""

    where = "group"
    total = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                if group["k"] > 20:
                    self.remember(group, float(param.grad.norm()))
                param.sub_(param.grad, alpha=group["lr"] / group["k"])

    def remember(self, group: dict[str, Any], norm: float) -> None:
        if self.where == "group":
            group["total"] = group.get("total", 0.0) + norm
        elif self.where == "state":
            self.state["total"] = self.state.get("total", 0.0) + norm
        else:
            self.total += norm


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("where", ["group", "state", "attribute"])
def test_a_disagreement_the_probe_could_not_see_is_refused_when_it_happens(where: str, calls_step: bool) -> None:
    optimizer_class = type("CoupledLater", (CoupledLater,), {"where": where})
    twins = Twins(optimizer_class, options={"bucket_cap_mb": 0})

    def iterate(seed: int) -> None:
        loss_of(twins.models[1], FULL, seed).backward()
        if calls_step:
            twins.fused.step()

    for seed in range(20):
        loss_of(twins.models[0], FULL, seed).backward()
        twins.plain.step()
        twins.plain.zero_grad()
        iterate(seed)
        twins.check(f"iteration {seed}")
    with pytest.raises(ValueError, match="CoupledLater couples its parameters.*'total'"):
        iterate(20)


class Unprobed(Base):
    """Cannot be built on other parameters than the user's: not refused for that."""

    allowed = True

    def prepare(self) -> None:
        if len(self.param_groups[0]["params"]) != 4 or not type(self).allowed:
            raise LookupError("only for the four parameters of this test")
        type(self).allowed = False

    def count(self) -> float:
        return 1.0


def test_a_class_that_cannot_be_probed_is_not_refused_for_that() -> None:
    params, others = make_params(), make_params()
    Unprobed.allowed = True
    fused = BackwardFusedOptimizer(Unprobed, params)
    Unprobed.allowed = True
    plain = Unprobed(others)
    for chosen, optimizer in ((params, fused), (others, plain)):
        loss_of(chosen, FULL, 0).backward()
        optimizer.step()
    assert all(map(torch.equal, params, others))


class Random(Base):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


class RandomLater(Random):
    """Draws from its third step on, and only for large gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    noise = torch.randn_like(param) if float(param.grad.abs().max()) > 1e4 else 0
                    param.sub_(param.grad + noise, alpha=group["lr"])


def test_random_numbers_in_a_step_are_warned_of_once_and_leave_the_users_stream_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="Random draws random numbers.*distribution is the same") as record:
        fused = BackwardFusedOptimizer(Random, params := make_params())
    assert len(record) == 1
    assert_equal(expected, torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(params, FULL, 0).backward()
        fused.step()


def test_random_numbers_that_only_training_provokes_are_warned_of_then() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused = BackwardFusedOptimizer(RandomLater, params := make_params())
        loss_of(params, FULL, 0).backward()
        fused.step()
    loss = loss_of(params, FULL, 1) * 1e6
    with pytest.warns(UserWarning, match="RandomLater draws random numbers in step"):
        loss.backward()


# Schedule-free


def in_mode(optimizer: Any, mode: str) -> None:
    getattr(optimizer, mode)()


@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("AdamWScheduleFree", {"lr": 0.05, "warmup_steps": 3, "weight_decay": 0.1}),
        ("AdamWScheduleFree", {"lr": 0.05, "foreach": False, "r": 1.0}),
        ("SGDScheduleFree", {"lr": 0.5, "warmup_steps": 2}),
        ("RAdamScheduleFree", {"lr": 0.05}),
        ("AdamWScheduleFreePaper", {"lr": 0.05}),
    ],
)
def test_schedule_free_with_checkpoints(name: str, kwargs: dict[str, Any], calls_step: bool) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="the published optimizers are in the test extra")
    optimizer_class = getattr(schedulefree, name)
    twins: Any = Twins(optimizer_class, group_by=two_groups, **kwargs)
    for _, optimizer in twins.each():
        in_mode(optimizer, "train")
    for seed in range(9):
        for params, optimizer in twins.each():
            used = FULL if seed < 2 else [index for index in FULL if (index + seed) % 4]
            loss_of(params, used, seed).backward()
            if calls_step or optimizer is twins.plain:
                optimizer.step()
            optimizer.zero_grad()
        twins.check(f"iteration {seed}")
        if seed % 3 == 2:
            for _, optimizer in twins.each():
                in_mode(optimizer, "eval")
            twins.check(f"eval {seed}")
            stored = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in twins.each()]
            twins.plain.load_state_dict(stored[1])
            twins.fused.load_state_dict(stored[0])
            for _, optimizer in twins.each():
                in_mode(optimizer, "train")
            twins.check(f"train {seed}")
