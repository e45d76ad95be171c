"""What the ordinary optimizer rejects comes out with its own type and message, and nothing is left behind."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import CountsInTheGroup
from torch.optim import Optimizer
from twins import assert_equal, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

Params = list[torch.nn.Parameter]
Build = Callable[[Any, Params], Any]
"""Builds an optimizer; takes what stands in for ``torch.optim`` first."""


class OrdinaryOptim:
    """``torch.optim`` itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.optim, name)


class FusedOptim:
    """``torch.optim`` with every class fused."""

    def __getattr__(self, name: str) -> Any:
        optimizer_class = getattr(torch.optim, name)
        return lambda *args, **kwargs: BackwardFusedOptimizer(optimizer_class, *args, **kwargs)


REJECTED_INSIDE: dict[str, Build] = {
    "negative lr": lambda optim, params: optim.Adam(params, lr=-1.0),
    "beta out of range": lambda optim, params: optim.Adam(params, betas=(1.0, 0.9)),
    "one beta": lambda optim, params: optim.Adam(params, betas=(0.9,)),
    "negative eps": lambda optim, params: optim.AdamW(params, eps=-1e-8),
    "lr as text": lambda optim, params: optim.SGD(params, lr="0.1"),
    "betas as number": lambda optim, params: optim.Adam(params, betas=0.9),
    "negative weight decay": lambda optim, params: optim.SGD(params, lr=0.1, weight_decay=-1),
    "nesterov without momentum": lambda optim, params: optim.SGD(params, lr=0.1, nesterov=True),
    "unknown argument": lambda optim, params: optim.Adam(params, momentum=0.9),
    "too many arguments": lambda optim, params: optim.SGD(params, *range(20)),
    "argument given twice": lambda optim, params: optim.SGD(params, 0.1, lr=0.1),
    "fused and foreach": lambda optim, params: optim.AdamW(params, fused=True, foreach=True),
    "tensor lr with foreach": lambda optim, params: optim.Adam(params, lr=torch.tensor(0.1), foreach=True),
    "tensor lr of two elements": lambda optim, params: optim.Adam(params, lr=torch.tensor([0.1, 0.2])),
    "empty list": lambda optim, params: optim.Adam([]),
    "empty iterator": lambda optim, params: optim.Adam(iter(())),
    "model without parameters": lambda optim, params: optim.SGD(torch.nn.ReLU().parameters(), lr=0.1),
    "a tensor": lambda optim, params: optim.SGD(params[0], lr=0.1),
    "None": lambda optim, params: optim.SGD(None, lr=0.1),
    "a number": lambda optim, params: optim.SGD(3, lr=0.1),
    "a list of numbers": lambda optim, params: optim.SGD([1.0, 2.0], lr=0.1),
    "a module": lambda optim, params: optim.SGD(torch.nn.Linear(2, 2), lr=0.1),
    "text": lambda optim, params: optim.SGD("weights", lr=0.1),
    "a tensor that is no leaf": lambda optim, params: optim.SGD([*params, params[0] * 2], lr=0.1),
    "a set as group": lambda optim, params: optim.SGD([{"params": set(params)}], lr=0.1),
    "a group without params": lambda optim, params: optim.SGD([{"lr": 0.1}]),
    "a group that is no dict": lambda optim, params: optim.SGD([{"params": params}, params], lr=0.1),
    "a parameter in two groups": lambda optim, params: optim.SGD([{"params": params}, {"params": params[:1]}], lr=0.1),
    "differentiable and fused": lambda optim, params: optim.Adam(params, differentiable=True, fused=True),
    "sparse Adam, dense layout": lambda optim, params: optim.SparseAdam([torch.zeros(3).to_sparse()]),
}

REJECTED_LATER: dict[str, Build] = {
    "late group: a parameter that is there": lambda optim, params: optim.SGD(params, lr=0.1).add_param_group(
        {"params": params[0]}
    ),
    "late group: no dict": lambda optim, params: optim.SGD(params, lr=0.1).add_param_group(params),
    "late group: a set": lambda optim, params: optim.SGD(params[:1], lr=0.1).add_param_group({"params": set(params)}),
    "late group: no leaf": lambda optim, params: optim.SGD(params, lr=0.1).add_param_group({"params": params[0] * 2}),
    "late group: no tensor": lambda optim, params: optim.SGD(params, lr=0.1).add_param_group({"params": [1.0]}),
    "state dict of another model": lambda optim, params: optim.SGD(params, lr=0.1).load_state_dict(
        torch.optim.SGD(params[:1], lr=0.1).state_dict()
    ),
    "state dict of two groups": lambda optim, params: optim.SGD(params, lr=0.1).load_state_dict(
        torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1).state_dict()
    ),
    "empty state dict": lambda optim, params: optim.SGD(params, lr=0.1).load_state_dict({}),
    "no state dict": lambda optim, params: optim.SGD(params, lr=0.1).load_state_dict(None),
}

SELDOM_REJECTED = {"fused and foreach", "tensor lr of two elements", "empty iterator"}
"""What some releases of torch accept, or reject only as they step."""


def outcome(build: Build, optim: Any, params: Params) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            build(optim, params)
        except Exception as error:
            return type(error), str(error)
    return "accepted", [str(warning.message) for warning in caught]


def assert_no_hook(params: Params) -> None:
    assert not any(param._post_accumulate_grad_hooks for param in params)


@pytest.mark.parametrize("name", REJECTED_INSIDE)
def test_what_the_inner_class_rejects_is_rejected_in_its_words(name: str) -> None:
    ordinary = outcome(REJECTED_INSIDE[name], OrdinaryOptim(), make_params())
    params = make_params()
    assert outcome(REJECTED_INSIDE[name], FusedOptim(), params) == ordinary
    assert ordinary[0] != "accepted" or name in SELDOM_REJECTED
    assert_no_hook(params)
    loss_of(params, range(4), 0).backward()
    assert all(param.grad is not None for param in params)


@pytest.mark.parametrize("name", REJECTED_LATER)
def test_what_a_method_of_the_inner_class_rejects_is_rejected_in_its_words(name: str) -> None:
    ordinary = outcome(REJECTED_LATER[name], OrdinaryOptim(), make_params())
    assert outcome(REJECTED_LATER[name], FusedOptim(), make_params()) == ordinary
    assert ordinary[0] != "accepted"


def test_missing_params_are_missed_by_name() -> None:
    with pytest.raises(TypeError, match="params"):
        BackwardFusedOptimizer(torch.optim.Adam, lr=0.1)  # type: ignore[call-arg]


REFUSED_HERE: dict[str, tuple[Callable[[Params], Any], type[Exception], str]] = {
    "an instance for a class": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD(params, lr=0.1), params),  # type: ignore[arg-type]
        TypeError,
        "from_optimizer",
    ),
    "a name for a class": (
        lambda params: BackwardFusedOptimizer("Adam", params),  # type: ignore[arg-type]
        TypeError,
        "subclass of torch.optim.Optimizer.*'Adam'",
    ),
    "another class": (
        lambda params: BackwardFusedOptimizer(torch.nn.Linear, params),  # type: ignore[arg-type]
        TypeError,
        "subclass of torch.optim.Optimizer",
    ),
    "a function for a class": (
        lambda params: BackwardFusedOptimizer(lambda params: None, params),  # type: ignore[arg-type]
        TypeError,
        "subclass of torch.optim.Optimizer",
    ),
    "itself": (
        lambda params: BackwardFusedOptimizer(BackwardFusedOptimizer, torch.optim.SGD, params, lr=0.1),
        ValueError,
        "BackwardFusedOptimizer already steps inside backward",
    ),
    "LBFGS": (lambda params: BackwardFusedOptimizer(torch.optim.LBFGS, params), ValueError, "LBFGS.*closure"),
    "a parameter that is listed twice": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD, [*params, params[0]], lr=0.1),
        ValueError,
        "parameter 0 of group 0.* is listed twice",
    ),
    "differentiable": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, differentiable=True),
        ValueError,
        "differentiable=True",
    ),
    "negative bucket": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, bucket_cap_mb=-1),
        ValueError,
        "bucket_cap_mb",
    ),
    "bucket that is not a number": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, bucket_cap_mb=float("nan")),
        ValueError,
        "bucket_cap_mb",
    ),
    "bucket as text": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, bucket_cap_mb="1"),  # type: ignore[arg-type]
        TypeError,
        "bucket_cap_mb",
    ),
    "accumulate_when as flag": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, accumulate_when=True),  # type: ignore[arg-type]
        TypeError,
        "accumulate_when must be a function",
    ),
    "grad_scaler as flag": (
        lambda params: BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, grad_scaler=True),
        TypeError,
        "grad_scaler must be",
    ),
    "from_optimizer of a class": (
        lambda params: BackwardFusedOptimizer.from_optimizer(torch.optim.SGD),  # type: ignore[arg-type]
        TypeError,
        "ordinary torch.optim.Optimizer",
    ),
    "from_optimizer of LBFGS": (
        lambda params: BackwardFusedOptimizer.from_optimizer(torch.optim.LBFGS(params)),
        ValueError,
        "closure",
    ),
    "from_optimizer with an unknown option": (
        lambda params: BackwardFusedOptimizer.from_optimizer(torch.optim.SGD(params, lr=0.1), lr=0.2),
        TypeError,
        "unknown option 'lr'",
    ),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("name", REFUSED_HERE)
def test_what_cannot_be_stepped_in_backward_is_refused_clearly(name: str) -> None:
    build, error, message = REFUSED_HERE[name]
    params = make_params()
    with pytest.raises(error, match=message):
        build(params)
    assert_no_hook(params)


def test_a_fused_optimizer_is_not_taken_over_again() -> None:
    opt = BackwardFusedOptimizer(torch.optim.SGD, make_params(), lr=0.1)
    with pytest.raises(TypeError, match="ordinary torch.optim.Optimizer.*but got BackwardFusedOptimizer"):
        BackwardFusedOptimizer.from_optimizer(opt)


def test_a_bucket_without_limit_is_accepted() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, bucket_cap_mb=float("inf"))
    loss_of(params, range(4), 0).backward()
    opt.step()


def test_a_refused_late_group_leaves_the_optimizer_as_it_was() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params[:2], lr=0.1, momentum=0.9)
    loss_of(params, [0, 1], 0).backward()
    opt.step()
    before = copy.deepcopy(opt.state_dict())
    shared = torch.nn.Parameter(params[0].data.view(-1)[:2])
    for group in (
        {"params": params[0]},
        {"params": shared},
        {"params": params[2], "differentiable": True},
        {"params": [params[2], 3]},
    ):
        with pytest.raises((TypeError, ValueError)):
            opt.add_param_group(group)
        assert_equal(before, opt.state_dict())
    assert not params[2]._post_accumulate_grad_hooks
    opt.add_param_group({"params": params[2]})
    loss_of(params, [0, 1, 2], 1).backward()
    assert all(param.grad is None for param in params)


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.AdamW, params)
    loss_of(params, range(4), 0).backward()
    opt.step()
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        opt.load_state_dict(torch.optim.AdamW(params[:1]).state_dict())
    assert_equal(before, opt.state_dict())
    loss_of(params, range(4), 1).backward()
    opt.step()


@pytest.mark.parametrize("loss", [None, 3.0, "loss", [torch.zeros(())]], ids=repr)
def test_a_loss_that_is_no_tensor_is_refused(loss: Any) -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    with pytest.raises(TypeError, match="loss must be a tensor"):
        opt.clip_grad_norm_(loss, 1.0)
    loss_of(params, range(4), 0).backward()
    opt.step()


@pytest.mark.parametrize(
    ("error", "make_loss"),
    [
        (RuntimeError, lambda params: torch.zeros((), requires_grad=False)),
        (RuntimeError, lambda params: params[0] * 2),
    ],
    ids=["no graph", "no scalar"],
)
def test_a_loss_that_cannot_be_walked_backward_leaves_the_optimizer_sound(
    error: type[Exception], make_loss: Callable[[Params], torch.Tensor]
) -> None:
    models = [make_params(), make_params()]
    opts: list[Any] = [torch.optim.AdamW(models[0]), BackwardFusedOptimizer(torch.optim.AdamW, models[1])]
    measure: Any = operator.methodcaller("clip_grad_norm_", make_loss(models[1]), 1.0)
    with pytest.raises(error):
        measure(opts[1])
    with pytest.raises(error):
        make_loss(models[1]).backward()
    for seed in range(3):
        for params, opt in zip(models, opts):
            loss_of(params, range(4), seed).backward()
            opt.step()
            opt.zero_grad()
        assert_equal([list(models[0]), opts[0].state_dict()], [list(models[1]), opts[1].state_dict()])


def test_attributes_that_nobody_has_are_reported_as_usual() -> None:
    opt = BackwardFusedOptimizer(CountsInTheGroup, make_params())
    for name in ("nothing", "train", "__wrapped__"):
        with pytest.raises(AttributeError, match=name):
            getattr(opt, name)
    assert not hasattr(opt, "eval")
    assert isinstance(opt, Optimizer)
