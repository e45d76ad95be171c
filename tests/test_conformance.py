"""Every optimizer of torch.optim in every configuration: the same bits as the ordinary one, step by step."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from configurations import Configuration, configurations
from torch.optim import Optimizer
from twins import Twins, assert_equal, assert_no_gradients, assert_twins, loss_of, make_params

from fused_optim import BackwardFusedOptimizer
from fused_optim._shared import hyperparameters

CONFIGURATIONS = [each for each in configurations() if not each.is_coupled()]
STEPS = 9
fused_runs_on_cpu = torch.__version__ >= "2.5"


@pytest.fixture(autouse=True)
def idle_rounds_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="opt.step\\(\\) ended a round")
        yield


def test_the_matrix_is_as_large_as_it_should_be() -> None:
    least = 150 if torch.__version__ >= "2.5" else 90
    assert len(CONFIGURATIONS) >= least
    assert len({configuration.optimizer_class for configuration in CONFIGURATIONS}) >= 11


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_same_bits_step_by_step(configuration: Configuration) -> None:
    twins = configuration.twins()
    for step in range(STEPS):
        twins.iterate(step, configuration.used(step, len(twins.models[0])))
        twins.check(f"step {step}")
        assert_no_gradients(twins.fused)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_one_instance_a_parameter_and_no_step_call(configuration: Configuration) -> None:
    twins = configuration.twins(options={"bucket_cap_mb": 0})
    for step in range(STEPS):
        for params, optimizer in twins.each():
            optimizer.zero_grad()
            loss_of(params, range(len(params)), step).backward()
        twins.plain.step()
        twins.check(f"step {step}")


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_checkpoints_load_both_ways_in_mid_training(configuration: Configuration) -> None:
    twins = configuration.twins()
    for step in range(3):
        twins.iterate(step)
    crossed = configuration.twins()
    for source, target in zip(twins.models, crossed.models):
        for old, new in zip(source, target):
            new.data.copy_(old.data)
    crossed.plain.load_state_dict(stored(twins.fused.state_dict()))
    crossed.fused.load_state_dict(stored(twins.plain.state_dict()))
    crossed.check("after loading")
    for step in range(3, 3 + STEPS):
        crossed.iterate(step, configuration.used(step, len(crossed.models[0])))
        crossed.check(f"step {step}")


def stored(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_step_writes_nothing_but_the_state_of_its_parameters(configuration: Configuration) -> None:
    """What lets these classes step on the whole's own state, without isolation."""
    twins = configuration.twins()
    before = copy.deepcopy([hyperparameters(group) for group in twins.plain.param_groups])
    for step in range(3):
        twins.iterate(step)
    assert_equal(before, [hyperparameters(group) for group in twins.plain.param_groups])
    assert all(isinstance(key, torch.Tensor) for key in twins.plain.state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("flags", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta", "NAdam"])
def test_other_dtypes(name: str, flags: dict[str, bool], dtype: torch.dtype) -> None:
    kwargs: dict[str, Any] = {"lr": 0.01, **flags}
    kwargs.update({"momentum": 0.9} if name == "SGD" else {})
    optimizer_class = getattr(torch.optim, name)
    try:
        probe_params = make_params([(3, 2)], dtype)
        probe = optimizer_class(probe_params, **kwargs)
        loss_of(probe_params, [0], 0).backward()
        probe.step()
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error)):
            fused_first_step(optimizer_class, dtype, kwargs)
        return
    twins = Twins(optimizer_class, dtype=dtype, **kwargs)
    for step in range(8):
        twins.iterate(step, [index for index in range(4) if (index + step) % 4 or step == 0])
        twins.check(f"step {step}")


def fused_first_step(optimizer_class: type[Optimizer], dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    params = make_params([(3, 2)], dtype)
    fused = BackwardFusedOptimizer(optimizer_class, params, **kwargs)
    loss_of(params, [0], 0).backward()
    fused.step()


def test_sparse_gradients() -> None:
    for optimizer_class in (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad):
        torch.manual_seed(0)
        plain_model = torch.nn.Embedding(10, 3, sparse=True)
        fused_model = copy.deepcopy(plain_model)
        plain = optimizer_class(plain_model.parameters(), lr=0.1)
        fused = BackwardFusedOptimizer(optimizer_class, fused_model.parameters(), lr=0.1)
        for step in range(8):
            rows = torch.tensor([step % 10, 3, 3])
            for model, optimizer in ((plain_model, plain), (fused_model, fused)):
                optimizer.zero_grad()
                model(rows).square().sum().backward()
                optimizer.step()
            assert_twins(plain, fused)
        assert fused_model.weight.grad is None


@pytest.mark.parametrize("configuration", [each for each in configurations() if each.is_coupled()] or [None], ids=str)
def test_coupled_foreach_asgd_of_old_torch_is_refused(configuration: Configuration | None) -> None:
    if configuration is None:
        BackwardFusedOptimizer(torch.optim.ASGD, make_params(), foreach=True)
        return
    with pytest.raises(ValueError, match="ASGD couples its parameters.*foreach=False"):
        configuration.twins()


@pytest.mark.parametrize("flags", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cap", [0, 0.1, 1.0])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_small_parameters_share_steps_with_each_other_and_with_large_ones(
    name: str, cap: float, flags: dict[str, bool]
) -> None:
    optimizer_class = getattr(torch.optim, name)
    if "fused" in flags and "fused" not in inspect.signature(optimizer_class).parameters:
        pytest.skip(f"this torch has no fused {name}")
    shapes = [(200, 100), *[(5,)] * 140, (130, 130), (7, 3), (3,), (150, 150)]
    if "fused" in flags and not fused_runs_on_cpu:
        pytest.skip("this torch has fused optimizers for CUDA only")
    twins = Twins(optimizer_class, shapes, lr=0.01, options={"bucket_cap_mb": cap}, **flags)
    for step in range(4):
        twins.iterate(step, [index for index in range(len(shapes)) if step == 0 or (index + step) % 5])
        twins.check(f"step {step}")
        assert_no_gradients(twins.fused)
