"""Schedulers and plain assignment reach the next step: in any kind of loop, and after any kind of resume."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils
from twins import Twins, assert_equal, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # SequentialLR and CosineAnnealingWarmRestarts themselves still call step(epoch).
    pytest.mark.filterwarnings("ignore:The epoch parameter in"),
    # torch.load(weights_only=True) of old releases says so of itself.
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

CYCLES_BETAS = torch.__version__ >= "2.2"
"""CyclicLR of torch 2.1 cycles only what is called momentum."""
ITERATIONS = 8
RESUMED_AT = 4


def halved(epoch: int) -> float:
    return 0.5 ** (epoch % 3)


def shrunk(epoch: int) -> float:
    return 0.9 if epoch % 2 else 1.1


def sequence(opt: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=2),
        lr_scheduler.CosineAnnealingLR(opt, T_max=3),
        lr_scheduler.ExponentialLR(opt, 0.7),
    ]
    return lr_scheduler.SequentialLR(opt, parts, milestones=[2, 5])


def chain(opt: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, total_iters=3), lr_scheduler.StepLR(opt, 2, 0.3)]
    )


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [halved, shrunk]),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, shrunk),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3, 5], 0.4),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.25, total_iters=3),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.2, total_iters=5),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 6, 2.0),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4, 1e-4),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 0.1, 2, 3, cycle_momentum=True),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, [0.1, 0.05], total_steps=ITERATIONS + 2),
    "OneCycleLR-three_phase": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.1, total_steps=ITERATIONS + 2, three_phase=True, anneal_strategy="linear"
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=10.0),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": lambda opt: swa_utils.SWALR(opt, [0.02, 0.01], anneal_epochs=4),
}

Kwargs = dict[str, Any]
OPTIMIZERS: dict[str, tuple[type[Optimizer], Kwargs]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
}


def two_groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]


def cases() -> list[Any]:
    return [
        pytest.param(optimizer, name, id=f"{optimizer}-{name}")
        for optimizer in OPTIMIZERS
        for name in SCHEDULERS
        if not (optimizer == "AdamW" and name == "CyclicLR" and not CYCLES_BETAS)
    ]


def build(optimizer: str, name: str) -> tuple[Twins, list[Any]]:
    optimizer_class, kwargs = OPTIMIZERS[optimizer]
    twins = Twins(optimizer_class, group_by=two_groups, **kwargs)
    return twins, [SCHEDULERS[name](each) for each in (twins.plain, twins.fused)]


def advance(scheduler: Any, iteration: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float(iteration))
    else:
        scheduler.step()


def train(twins: Twins, schedulers: list[Any], iterations: range, calls_step: bool) -> None:
    for iteration in iterations:
        for (params, optimizer), scheduler in zip(twins.each(), schedulers):
            if calls_step or optimizer is twins.plain:
                optimizer.zero_grad()
            loss_of(params, range(len(params)), iteration).backward()
            if calls_step or optimizer is twins.plain:
                optimizer.step()
            advance(scheduler, iteration)
        twins.check(f"iteration {iteration}")


def scheduler_classes() -> set[str]:
    return {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and value.__module__ == lr_scheduler.__name__
        and "step" in dir(value)
        and name.lstrip("_") != "LRScheduler"
    }


def test_no_scheduler_is_left_out() -> None:
    assert scheduler_classes() | {"SWALR"} == {name.partition("-")[0] for name in SCHEDULERS}


@pytest.mark.parametrize("calls_step", [True, False], ids=["with step()", "without step()"])
@pytest.mark.parametrize(("optimizer", "name"), cases())
def test_scheduler_reaches_the_next_step(optimizer: str, name: str, calls_step: bool) -> None:
    twins, schedulers = build(optimizer, name)
    train(twins, schedulers, range(ITERATIONS), calls_step)


def test_these_schedules_change_what_is_trained() -> None:
    """Or the tests here would show nothing."""
    for name in SCHEDULERS:
        twins, schedulers = build("SGD", name)
        unscheduled = Twins(torch.optim.SGD, group_by=two_groups, **OPTIMIZERS["SGD"][1])
        for iteration in range(ITERATIONS):
            unscheduled.iterate(iteration)
        train(twins, schedulers, range(ITERATIONS), calls_step=True)
        assert not torch.equal(twins.models[1][0], unscheduled.models[1][0]), name


@pytest.mark.parametrize("calls_step", [True, False], ids=["with step()", "without step()"])
@pytest.mark.parametrize(("optimizer", "name"), cases())
def test_schedule_continues_after_a_resume_from_the_other_twin(optimizer: str, name: str, calls_step: bool) -> None:
    twins, schedulers = build(optimizer, name)
    train(twins, schedulers, range(RESUMED_AT), calls_step)
    resumed, resumed_schedulers = build(optimizer, name)
    for number, source in enumerate((1, 0)):
        for old, new in zip(twins.models[source], resumed.models[number]):
            new.data.copy_(old.data)
        state_dict = stored((twins.plain, twins.fused)[source].state_dict())
        (resumed.plain, resumed.fused)[number].load_state_dict(state_dict)
        resumed_schedulers[number].load_state_dict(copy.deepcopy(schedulers[source].state_dict()))
    resumed.check("resumed")
    train(resumed, resumed_schedulers, range(RESUMED_AT, ITERATIONS), calls_step)


def stored(state_dict: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedule_continues_on_an_optimizer_taken_over(name: str) -> None:
    """The scheduler knows only the ordinary optimizer; it must not warn that this one was never stepped."""
    twins, schedulers = build("SGD", name)
    twins.fused.unfuse()
    taken_over = torch.optim.SGD(two_groups(twins.models[1]), **OPTIMIZERS["SGD"][1])
    scheduler = SCHEDULERS[name](taken_over)
    twins.fused = BackwardFusedOptimizer.from_optimizer(taken_over)
    train(twins, [schedulers[0], scheduler], range(RESUMED_AT), calls_step=True)
    later = [lr_scheduler.ExponentialLR(each, 0.5) for each in (twins.plain, taken_over)]
    train(twins, later, range(RESUMED_AT, ITERATIONS), calls_step=True)


def test_no_warning_when_accumulated_gradients_are_stepped_on_an_optimizer_taken_over() -> None:
    params = make_params()
    taken_over = torch.optim.SGD(params, lr=0.1)
    scheduler = lr_scheduler.StepLR(taken_over, 2, 0.5)
    fused = BackwardFusedOptimizer.from_optimizer(taken_over)
    with fused.accumulate():
        loss_of(params, range(4), 0).backward()
    fused.step()
    scheduler.step()


class CountsUnderTheNameSchedulersUse(torch.optim.SGD):
    """Its own counter has the name under which schedulers of old releases count calls of ``step``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self._step_count = 0

    def step(self, closure: Any = None) -> Any:
        self._step_count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=group["lr"] / self._step_count)


@pytest.mark.parametrize("calls_step", [True, False], ids=["with step()", "without step()"])
def test_a_counter_of_the_optimizers_own_is_left_alone(calls_step: bool) -> None:
    twins = Twins(CountsUnderTheNameSchedulersUse, lr=0.1)
    for iteration in range(4):
        for params, optimizer in twins.each():
            loss_of(params, range(4), iteration).backward()
            if calls_step or optimizer is twins.plain:
                optimizer.step()
                optimizer.zero_grad()
        twins.check(f"iteration {iteration}")


@pytest.mark.parametrize("calls_step", [True, False], ids=["with step()", "without step()"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_tensor_lr(name: str, calls_step: bool) -> None:
    if name == "CyclicLR" and not CYCLES_BETAS:
        pytest.skip("CyclicLR of torch 2.1 does not take AdamW")
    twins = Twins(torch.optim.AdamW, lr=torch.tensor(0.05), foreach=False)
    if name in ("LambdaLR", "SWALR", "OneCycleLR"):
        # These take one value a group.
        make = {
            "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, halved),
            "SWALR": lambda opt: swa_utils.SWALR(opt, 0.02, anneal_epochs=4),
            "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=ITERATIONS + 2),
        }[name]
    else:
        make = SCHEDULERS[name]
    schedulers = [make(each) for each in (twins.plain, twins.fused)]
    train(twins, schedulers, range(ITERATIONS), calls_step)


@pytest.mark.parametrize("calls_step", [True, False], ids=["with step()", "without step()"])
@pytest.mark.parametrize("how", ["assign", "fill tensor", "rebind groups", "rebind state", "replace group"])
def test_what_the_loop_writes_itself_reaches_the_next_step(how: str, calls_step: bool) -> None:
    twins = Twins(torch.optim.AdamW, group_by=two_groups, lr=torch.tensor(0.05), foreach=False)
    for iteration in range(ITERATIONS):
        for params, optimizer in twins.each():
            if calls_step or optimizer is twins.plain:
                optimizer.zero_grad()
            loss_of(params, range(len(params)), iteration).backward()
            if calls_step or optimizer is twins.plain:
                optimizer.step()
            write(optimizer, how, iteration)
        twins.check(f"iteration {iteration}")


def write(optimizer: Optimizer, how: str, iteration: int) -> None:
    rate = 0.1 / (iteration + 1)
    if how == "assign":
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(rate)
            group["betas"] = (0.5, 0.9 + 0.01 * iteration)
    elif how == "fill tensor":
        for group in optimizer.param_groups:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                lr.fill_(rate)
            group["weight_decay"] = rate
    elif how == "rebind groups":
        optimizer.param_groups = [{**group, "lr": torch.tensor(rate)} for group in optimizer.param_groups]
    elif how == "rebind state":
        kept = {param: {**values, "exp_avg": values["exp_avg"] * 0.5} for param, values in optimizer.state.items()}
        optimizer.state = type(optimizer.state)(dict, kept)
    else:
        optimizer.param_groups[1] = {**optimizer.param_groups[1], "lr": torch.tensor(rate)}


def test_swa_training_with_averaged_model_and_update_bn() -> None:
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    models = [first, copy.deepcopy(first)]
    averages, data = [], [torch.randn(8, 4) for _ in range(3)]
    for model, make in zip(models, (torch.optim.SGD, fused_sgd)):
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
        scheduler, swa = lr_scheduler.CosineAnnealingLR(optimizer, 4), swa_utils.SWALR(optimizer, 0.03, 2)
        average = swa_utils.AveragedModel(model)
        for epoch in range(ITERATIONS):
            for batch in data:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            if epoch > 3:
                average.update_parameters(model)
                swa.step()
            else:
                scheduler.step()
        swa_utils.update_bn(data, average)
        averages.append(average)
    assert_equal(dict(averages[0].state_dict()), dict(averages[1].state_dict()))


def fused_sgd(*args: Any, **kwargs: Any) -> BackwardFusedOptimizer:
    return BackwardFusedOptimizer(torch.optim.SGD, *args, **kwargs)


def test_scheduler_can_be_built_in_mid_training_and_restarted_by_last_epoch() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1, momentum=0.9)
    schedulers = [lr_scheduler.StepLR(each, 2, 0.5) for each in (twins.plain, twins.fused)]
    train(twins, schedulers, range(3), calls_step=True)
    again = [lr_scheduler.StepLR(each, 2, 0.5, last_epoch=2) for each in (twins.plain, twins.fused)]
    train(twins, again, range(3, 6), calls_step=True)
    without_step = [lr_scheduler.ExponentialLR(each, 0.5) for each in (twins.plain, twins.fused)]
    train(twins, without_step, range(6, 9), calls_step=True)


def test_lr_changed_between_backward_and_step_is_refused_and_otherwise_differs() -> None:
    def program(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> None:
        for iteration in range(3):
            optimizer.zero_grad()
            loss_of(params, range(len(params)), iteration).backward()
            optimizer.param_groups[0]["lr"] = 0.1 / (iteration + 2)
            optimizer.step()

    twins = Twins(torch.optim.SGD, lr=0.1, options={"strict": False})
    program(twins.plain, twins.models[0])
    program(twins.fused, twins.models[1])
    assert not torch.equal(twins.models[0][0], twins.models[1][0])
    params = make_params()
    with pytest.raises(RuntimeError, match="'lr' of parameter group 0 was changed between"):
        program(BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1), params)
