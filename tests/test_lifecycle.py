"""Birth, copies, failures and death: nothing leaks, nothing is left behind, and the next backward is sound."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import multiprocessing
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from programs import OPTIMIZERS, CountsInTheGroup, fused
from torch.optim import Optimizer
from twins import SHAPES, Twins, assert_equal, assert_twins, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

ALL = range(len(SHAPES))
GONE = "no longer exists"


def hooks_of(params: list[torch.nn.Parameter]) -> int:
    """How many post-accumulate hooks the parameters have."""
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in params)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def iterate(model: torch.nn.Module, opt: Optimizer, seed: int) -> None:
    data = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    opt.zero_grad()
    model(data).square().mean().backward()
    opt.step()


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Death


@pytest.mark.parametrize("after", ["construction", "step", "backward", "error", "hooks", "scheduler", "accumulate"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dropping_the_optimizer_frees_it_and_its_state_at_once(optimizer: str, after: str) -> None:
    params = make_params()
    opt: Any = fused(OPTIMIZERS[optimizer])(params)
    if after != "construction":
        loss_of(params, ALL, 0).backward()
        opt.step()
    if after == "backward":
        loss_of(params, ALL, 1).backward()
    if after == "error":
        opt.register_param_step_pre_hook(failing)
        with pytest.raises(Failure):
            loss_of(params, ALL, 1).backward()
    if after == "hooks":
        opt.register_step_post_hook(lambda *_: None)
    if after == "scheduler":
        torch.optim.lr_scheduler.StepLR(opt, 1)
    if after == "accumulate":
        with opt.accumulate():
            loss_of(params, ALL, 1).backward()
    with no_collector():
        state = [value for state in opt.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        watched = [weakref.ref(opt), weakref.ref(opt._whole), *(weakref.ref(value) for value in state)]
        del opt, state
        assert [ref() for ref in watched] == [None] * len(watched)


def test_dropping_the_model_frees_it_and_the_optimizer() -> None:
    with no_collector():
        model = network()
        opt = BackwardFusedOptimizer(torch.optim.AdamW, model.parameters())
        iterate(model, opt, 0)
        watched = [weakref.ref(opt), *(weakref.ref(param) for param in model.parameters())]
        del model, opt
        assert [ref() for ref in watched] == [None] * len(watched)


def test_many_optimizers_one_after_the_other_leave_one_set_of_hooks() -> None:
    params = make_params()
    for _ in range(20):
        opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
        loss_of(params, ALL, 0).backward()
        opt.unfuse()
        assert hooks_of(params) == 0
        del opt


def test_backward_after_the_optimizer_is_gone_warns_once_and_leaves_gradients() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    del opt
    with pytest.warns(UserWarning, match=GONE):
        loss_of(params, ALL, 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(params, ALL, 0).backward()
    assert all(param.grad is not None for param in params)


def test_no_warning_when_it_was_unfused_before_it_was_dropped() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    opt.unfuse()
    del opt
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(params, ALL, 0).backward()


def test_delete_and_rebuild_is_accepted_and_steps_once() -> None:
    models = [make_params(), make_params()]
    opts: list[Any] = [make(params) for make, params in zip((torch.optim.AdamW, fused(torch.optim.AdamW)), models)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for phase in range(3):
            for index, make in enumerate((torch.optim.SGD, fused(torch.optim.SGD))):
                opts[index] = None
                opts[index] = make(models[index], lr=0.1, momentum=0.9)
                for iteration in range(2):
                    loss_of(models[index], ALL, phase + iteration).backward()
                    opts[index].step()
                    opts[index].zero_grad()
            assert_twins(*opts)


def test_backward_of_a_graph_that_is_older_than_the_optimizer() -> None:
    """The graph was built while another optimizer's hooks were on."""
    models = [make_params(), make_params()]
    opt = BackwardFusedOptimizer(torch.optim.SGD, models[1], lr=0.1)
    losses = [loss_of(params, ALL, 0) for params in models]
    del opt
    opts = [torch.optim.SGD(models[0], lr=0.2), BackwardFusedOptimizer(torch.optim.SGD, models[1], lr=0.2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss, each in zip(losses, opts):
            loss.backward()
            each.step()
            each.zero_grad()
    assert_twins(*opts)


# Two optimizers


@pytest.mark.parametrize("how", ["constructor", "add_param_group", "from_optimizer", "fuse", "late parameter"])
def test_a_second_optimizer_over_the_same_parameter_is_refused_and_changes_nothing(how: str) -> None:
    params = make_params()
    first = BackwardFusedOptimizer(torch.optim.SGD, params[:2], lr=0.1)
    before = hooks_of(params)
    refused = pytest.raises(ValueError, match="already stepped inside backward.*another BackwardFusedOptimizer")
    if how == "constructor":
        with refused:
            BackwardFusedOptimizer(torch.optim.SGD, params[1:], lr=0.1)
    elif how == "from_optimizer":
        with refused:
            BackwardFusedOptimizer.from_optimizer(torch.optim.SGD(params[1:], lr=0.1))
    else:
        second = BackwardFusedOptimizer(torch.optim.SGD, params[2:], lr=0.1)
        if how == "add_param_group":
            with refused:
                second.add_param_group({"params": params[0]})
            assert len(second.param_groups) == 1
        elif how == "fuse":
            second.unfuse()
            third = BackwardFusedOptimizer(torch.optim.SGD, params[2:], lr=0.1)
            with refused:
                second.fuse()
            third.unfuse()
        else:
            second.param_groups[0]["params"].append(params[0])
            with refused:
                loss_of(params, [2, 3], 0).backward()
        second.unfuse()
    assert hooks_of(params) == before
    loss_of(params, [0, 1], 0).backward()
    first.step()


# Failed constructors


def raises_late(params: Any, **kwargs: Any) -> Any:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.add_param_group({"params": "no tensor"})
    return optimizer


class Coupled(Optimizer):
    """Every parameter is stepped by the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=0.1)


class NeedsClosure(torch.optim.SGD):
    """Its step cannot do without a closure."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def sharing() -> list[torch.nn.Parameter]:
    memory = torch.randn(6)
    return [torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[2:])]


FAILURES: dict[str, tuple[Callable[[list[torch.nn.Parameter]], Any], type[Exception]]] = {
    "inner constructor": (lambda p: fused(torch.optim.SGD)(p, lr=-1.0), ValueError),
    "unknown argument": (lambda p: fused(torch.optim.SGD)(p, lr=0.1, colour="red"), TypeError),
    "no class": (lambda p: BackwardFusedOptimizer("SGD", p, lr=0.1), TypeError),  # type: ignore[arg-type]
    "LBFGS": (lambda p: fused(torch.optim.LBFGS)(p), ValueError),
    "differentiable": (lambda p: fused(torch.optim.Adam)(p, differentiable=True), ValueError),
    "differentiable group": (
        lambda p: fused(torch.optim.Adam)([{"params": p[:1]}, {"params": p[1:], "differentiable": True}]),
        ValueError,
    ),
    "coupled": (lambda p: fused(Coupled)(p), ValueError),
    "closure": (lambda p: fused(NeedsClosure)(p, lr=0.1), ValueError),
    "option": (lambda p: fused(torch.optim.SGD, bucket_cap_mb=-1)(p, lr=0.1), ValueError),
    "scaler": (lambda p: fused(torch.optim.SGD, grad_scaler=1)(p, lr=0.1), TypeError),
    "same parameter twice": (
        lambda p: fused(torch.optim.SGD)([{"params": p}, {"params": p[:1]}], lr=0.1),
        ValueError,
    ),
    "no tensor": (lambda p: fused(torch.optim.SGD)([*p, 3], lr=0.1), TypeError),
    "no leaf": (lambda p: fused(torch.optim.SGD)([*p, p[0] * 2], lr=0.1), ValueError),
    "shared memory": (
        lambda p: fused(torch.optim.SGD)([*p, torch.nn.Parameter(p[0].data[:1])], lr=0.1),
        ValueError,
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_constructor_leaves_nothing_behind(name: str) -> None:
    build, expected = FAILURES[name]
    params = make_params()
    with pytest.raises(expected):
        build(params)
    assert hooks_of(params) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(params, ALL, 0).backward()
        assert all(param.grad is not None for param in params)
        for param in params:
            param.grad = None
        opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
        loss_of(params, ALL, 0).backward()
        opt.step()
    assert all(param.grad is None for param in params)


def test_a_hook_that_cannot_be_registered_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    registered = torch.Tensor.register_post_accumulate_grad_hook
    left = iter([True, True, False])

    def failing_registration(param: torch.Tensor, hook: Any) -> Any:
        if not next(left):
            raise MemoryError
        return registered(param, hook)

    monkeypatch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", failing_registration)
    with pytest.raises(MemoryError):
        BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    assert hooks_of(params) == 0


# Hooks off and on


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_unfused_it_is_an_ordinary_optimizer_and_fused_again_it_goes_on(optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    models = [make_params(), make_params()]
    plain, ours = make(models[0]), fused(make)(models[1])
    for iteration in range(9):
        if iteration == 3:
            ours.unfuse()
            ours.unfuse()
            assert hooks_of(models[1]) == 0
        if iteration == 6:
            ours.fuse()
            ours.fuse()
            assert hooks_of(models[1]) == len(SHAPES)
        for params, opt in zip(models, (plain, ours)):
            loss_of(params, ALL, iteration).backward()
            if iteration in (3, 4, 5):
                assert all(param.grad is not None for param in params)
                loss_of(params, [0, 1], iteration).backward()
            opt.step()
            opt.zero_grad()
        assert_twins(plain, ours)


def test_fused_again_with_gradients_that_were_made_while_unfused() -> None:
    twins = Twins(torch.optim.AdamW)
    twins.fused.unfuse()
    for params, _ in twins.each():
        loss_of(params, [0, 1], 0).backward()
    twins.fused.fuse()
    for params, opt in twins.each():
        loss_of(params, [1, 2], 1).backward()
        opt.step()
        opt.zero_grad()
    twins.check()


# Copies


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda both: pickle.loads(pickle.dumps(both)),
    "torch.save": lambda both: saved_and_loaded(both),
}


def saved_and_loaded(whatever: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(whatever, buffer)
    buffer.seek(0)
    trusted = {"weights_only": False}
    return torch.load(buffer, **trusted)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_model_and_optimizer_copied_together_are_a_working_independent_pair(optimizer: str, way: str) -> None:
    make = OPTIMIZERS[optimizer]
    plain_pair: Any = (network(), None)
    plain_pair = (plain_pair[0], make(plain_pair[0].parameters()))
    model = network()
    pair: Any = (model, fused(make)(model.parameters()))
    for seed in range(2):
        iterate(*plain_pair, seed)
        iterate(*pair, seed)
    copied, plain_copied = COPIES[way](pair), copy.deepcopy(plain_pair)
    assert_twins(plain_copied[1], copied[1])
    for seed in range(2, 5):
        iterate(*copied, seed)
        iterate(*plain_copied, seed)
        assert_twins(plain_copied[1], copied[1])
        assert all(param.grad is None for param in copied[0].parameters())
    assert_twins(plain_pair[1], pair[1])
    iterate(*pair, 7)
    iterate(*plain_pair, 7)
    assert_twins(plain_pair[1], pair[1])


@pytest.mark.parametrize("way", COPIES)
def test_options_and_an_unfused_state_survive_a_copy(way: str) -> None:
    model = network()
    opt = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, bucket_cap_mb=0, track_grad_norm=True)
    opt.unfuse()
    copied_model, copied = COPIES[way]((model, opt))
    assert copied._engine.options == opt._engine.options
    assert hooks_of(list(copied_model.parameters())) == 0
    iterate(copied_model, copied, 0)
    copied.fuse()
    iterate(copied_model, copied, 1)
    assert copied.grad_norm is not None


@pytest.mark.parametrize("way", COPIES)
def test_the_optimizer_copied_alone_has_its_own_parameters(way: str) -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.AdamW, params)
    loss_of(params, ALL, 0).backward()
    opt.step()
    copied = COPIES[way](opt)
    own = [param for group in copied.param_groups for param in group["params"]]
    assert all(one is not other for one, other in zip(own, params))
    before = [param.detach().clone() for param in params]
    loss_of(own, ALL, 1).backward()
    copied.step()
    assert_equal(before, [param.detach() for param in params])
    loss_of(params, ALL, 1).backward()
    opt.step()
    assert_twins(opt, copied)


def test_a_model_copied_alone_has_no_hooks() -> None:
    model = network()
    opt = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    average = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average(torch.ones(2, 3)).sum().backward()
    assert all(param.grad is not None for param in average.parameters())
    iterate(model, opt, 0)


def test_copied_while_a_scheduler_is_attached() -> None:
    model = network()
    opt = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    iterate(model, opt, 0)
    scheduler.step()
    other_model, other, other_scheduler = copy.deepcopy((model, opt, scheduler))
    assert other_scheduler.optimizer is other
    for each_model, each_opt, each_scheduler in ((model, opt, scheduler), (other_model, other, other_scheduler)):
        iterate(each_model, each_opt, 1)
        each_scheduler.step()
        iterate(each_model, each_opt, 2)
    assert_twins(opt, other)


def trained_elsewhere(pair: Any, results: Any) -> None:
    torch.set_num_threads(1)
    model, opt = pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(model, opt, 1)
    results.put([param.detach().tolist() for param in model.parameters()])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_trains_in_another_process(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    context = multiprocessing.get_context(method)
    model = network()
    opt = BackwardFusedOptimizer(torch.optim.AdamW, model.parameters())
    if method == "spawn":
        iterate(model, opt, 0)
    results = context.Queue()
    process = context.Process(target=trained_elsewhere, args=(pickled(model, opt, method), results))
    process.start()
    process.join()
    assert process.exitcode == 0
    found = results.get(timeout=10)
    iterate(model, opt, 1)
    assert found == [param.detach().tolist() for param in model.parameters()]


def pickled(model: torch.nn.Module, opt: Any, method: str) -> Any:
    # Sending parameters to another process shares their memory; a copy keeps the twins apart.
    return (model, opt) if method == "fork" else copy.deepcopy((model, opt))


# Exceptions


class Failure(Exception):
    """Raised on purpose."""


def failing(*_: Any) -> None:
    raise Failure


class FailsOnDemand(torch.optim.SGD):
    """Its step raises what it is told to."""

    error: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        if type(self).error is not None:
            raise type(self).error
        return super().step(closure)


@pytest.mark.parametrize("error", [Failure(), KeyboardInterrupt(), MemoryError(), RuntimeError("mine")], ids=repr)
def test_an_exception_inside_a_step_comes_out_as_it_is_and_the_next_backward_is_sound(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(FailsOnDemand, lr=0.1, momentum=0.9)
    for seed in range(3):
        twins.iterate(seed)
    monkeypatch.setattr(FailsOnDemand, "error", error)
    with pytest.raises(type(error)) as caught:
        loss_of(twins.models[1], ALL, 3).backward()
    assert caught.value is error or str(caught.value) == str(error)
    monkeypatch.setattr(FailsOnDemand, "error", None)
    for param in twins.models[1]:
        param.grad = None
    twins.fused.zero_grad()
    for seed in range(3, 6):
        twins.iterate(seed)
        twins.check(f"iteration {seed}")


class Exploding(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Failure


@pytest.mark.parametrize("calls_step", [True, False], ids=["with step()", "without step()"])
def test_an_exception_in_autograd_before_any_gradient_changes_nothing(calls_step: bool) -> None:
    twins = Twins(torch.optim.AdamW, lr=0.1)
    for seed in range(4):
        if seed == 2:
            for params, opt in twins.each():
                with pytest.raises(Failure):
                    Exploding.apply(loss_of(params, ALL, seed)).backward()
                if calls_step or opt is twins.plain:
                    opt.zero_grad()
        for params, opt in twins.each():
            loss_of(params, ALL, seed).backward()
            if calls_step or opt is twins.plain:
                opt.step()
                opt.zero_grad()
        twins.check(f"iteration {seed}")


def test_after_an_exception_in_mid_backward_later_iterations_are_ordinary_ones() -> None:
    """What was stepped stays stepped, once; the plain twin continues from the same weights and state."""
    params = make_params([(3,), (3,)])
    opt = BackwardFusedOptimizer(torch.optim.AdamW, params, lr=0.1, bucket_cap_mb=0)

    def loss(explode: bool, seed: int) -> torch.Tensor:
        first = loss_of(params, [0], seed)
        return (Exploding.apply(first) if explode else first) + loss_of(params, [1], seed)

    loss(False, 0).backward()
    opt.step()
    with pytest.raises(Failure):
        loss(True, 1).backward()
    with contextlib.suppress(RuntimeError):
        opt.zero_grad()
    plain_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    plain = torch.optim.AdamW(plain_params, lr=0.1)
    plain.load_state_dict(copy.deepcopy(opt.state_dict()))
    for seed in range(2, 5):
        loss(False, seed).backward()
        opt.step()
        loss_of(plain_params, ALL[:2], seed).backward()
        plain.step()
        plain.zero_grad()
        opt.zero_grad()
        assert_twins(plain, opt)


def backward_and_step(params: list[torch.nn.Parameter], opt: Optimizer) -> None:
    loss_of(params, ALL, 0).backward()
    opt.step()


@pytest.mark.parametrize("which", ["param pre", "param post", "step pre", "step post", "tensor"])
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
def test_an_exception_inside_a_user_hook_leaves_the_next_backward_sound(which: str, error: type[BaseException]) -> None:
    def hook(*_: Any) -> None:
        raise error

    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.AdamW, params, lr=0.1)
    loss_of(params, ALL, 0).backward()
    opt.step()
    register = {
        "param pre": opt.register_param_step_pre_hook,
        "param post": opt.register_param_step_post_hook,
        "step pre": opt.register_step_pre_hook,
        "step post": opt.register_step_post_hook,
        "tensor": params[1].register_hook,
    }[which]
    handle = register(hook)
    with pytest.raises(error):
        backward_and_step(params, opt)
    handle.remove()
    with contextlib.suppress(RuntimeError):
        opt.zero_grad()
    plain_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    plain = torch.optim.AdamW(plain_params, lr=0.1)
    plain.load_state_dict(copy.deepcopy(opt.state_dict()))
    for seed in range(1, 4):
        for each, optimizer in ((plain_params, plain), (params, opt)):
            loss_of(each, ALL, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_twins(plain, opt)


def test_an_exception_in_a_closure_leaves_the_next_step_sound() -> None:
    twins = Twins(torch.optim.AdamW, lr=0.1)
    for _, opt in twins.each():
        with pytest.raises(Failure):
            opt.step(failing)
    for seed in range(3):
        twins.iterate(seed)
        twins.check(f"iteration {seed}")


# Threads


def in_threads(work: list[Callable[[], None]]) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_threads_with_models_and_optimizers_of_their_own_are_exact(optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]

    def train(params: list[torch.nn.Parameter], opt: Optimizer, shift: int) -> None:
        for seed in range(20):
            loss_of(params, ALL, seed + shift).backward()
            opt.step()
            opt.zero_grad()

    plain = [make_params(seed=number) for number in range(4)]
    ours = [make_params(seed=number) for number in range(4)]
    plain_opts, opts = [make(params) for params in plain], [fused(make)(params) for params in ours]
    assert in_threads([partial(train, ours[number], opts[number], number) for number in range(4)]) == []
    for number in range(4):
        train(plain[number], plain_opts[number], number)
        assert_twins(plain_opts[number], opts[number])


@pytest.mark.parametrize("calls_step", [True, False], ids=["with step()", "without step()"])
def test_threads_over_parts_of_one_optimizer_are_exact(calls_step: bool) -> None:
    """Each thread differentiates a loss of its own over other parameters; then step() ends the round."""
    twins = Twins(torch.optim.AdamW, lr=0.1)
    for seed in range(10):
        for params, opt in twins.each():
            barrier = threading.Barrier(4)

            def part(index: int, params: Any = params, seed: int = seed, barrier: Any = barrier) -> None:
                loss = loss_of(params, [index], seed)
                barrier.wait()
                loss.backward()

            assert in_threads([partial(part, index) for index in ALL]) == []
            if calls_step or opt is twins.plain:
                opt.step()
                opt.zero_grad()
        twins.check(f"iteration {seed}")


def test_threads_over_the_same_parameters_are_refused_in_a_loop_that_calls_step() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    loss_of(params, ALL, 0).backward()
    opt.step()
    errors = in_threads([partial(lambda seed: loss_of(params, ALL, seed).backward(), seed) for seed in range(3)])
    assert errors
    assert all("second gradient" in str(error) for error in errors)


def test_threads_over_the_same_parameters_are_exact_when_they_accumulate() -> None:
    twins = Twins(torch.optim.SGD, lr=0.1, shapes=[(4, 4)])
    for seed in range(3):
        for params, opt in twins.each():
            guard = opt.accumulate() if isinstance(opt, BackwardFusedOptimizer) else contextlib.nullcontext()
            with guard:
                work = [partial(lambda p: (p[0] * 2.0).sum().backward(), params) for _ in range(3)]
                assert in_threads(work) == []
            opt.step()
            opt.zero_grad()
        twins.check(f"iteration {seed}")


# Parameters that are converted or replaced


def test_model_converted_before_construction() -> None:
    models = [network().to(torch.bfloat16), network().to(torch.bfloat16)]
    plain = torch.optim.AdamW(models[0].parameters())
    ours = BackwardFusedOptimizer(torch.optim.AdamW, models[1].parameters())
    data = torch.randn(4, 3, dtype=torch.bfloat16)
    for _ in range(3):
        for model, opt in zip(models, (plain, ours)):
            opt.zero_grad()
            model(data).square().mean().backward()
            opt.step()
        assert_twins(plain, ours)


@pytest.mark.parametrize("swaps", [False, True], ids=["replaces data", "swaps tensors"])
@pytest.mark.parametrize("when", ["before training", "in mid-training"])
def test_model_converted_after_construction(when: str, swaps: bool) -> None:
    future = torch.__future__
    if swaps and not hasattr(future, "set_swap_module_params_on_conversion"):
        pytest.skip("swapping came with torch 2.3")
    models = [network(), network()]
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    ours = BackwardFusedOptimizer(torch.optim.SGD, models[1].parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(4, 3)

    def step(dtype: torch.dtype) -> None:
        for model, opt in zip(models, (plain, ours)):
            opt.zero_grad()
            model(data.to(dtype)).square().mean().backward()
            opt.step()
        assert_twins(plain, ours)

    if when == "in mid-training":
        step(torch.float32)
    for model, opt in zip(models, (plain, ours)):
        opt.zero_grad()
        if swaps:
            future.set_swap_module_params_on_conversion(True)
        try:
            model.to(torch.float64)
        finally:
            if swaps:
                future.set_swap_module_params_on_conversion(False)
    for state in (plain.state, ours.state):
        for values in state.values():
            values["momentum_buffer"] = values["momentum_buffer"].double()
    for _ in range(3):
        step(torch.float64)


@pytest.mark.skipif(torch.__version__ < "2.1", reason="assign=True came with torch 2.1")
def test_parameters_replaced_by_assignment_are_told_of_once() -> None:
    model = network()
    opt = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    iterate(model, opt, 0)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    with pytest.warns(UserWarning, match="no parameter of this BackwardFusedOptimizer had a gradient"):
        iterate(model, opt, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(model, opt, 2)


def test_weights_loaded_in_place_go_on_training() -> None:
    models = [network(), network()]
    checkpoint = {key: torch.randn_like(value) for key, value in network().state_dict().items()}
    opts = [torch.optim.AdamW(models[0].parameters()), fused(torch.optim.AdamW)(models[1].parameters())]
    for seed in range(4):
        for model, opt in zip(models, opts):
            if seed == 2:
                model.load_state_dict(checkpoint)
            iterate(model, opt, seed)
        assert_twins(*opts)


def test_counter_of_a_round_survives_a_copy_in_its_middle() -> None:
    """Copied between backward() and step(): the copy's round is over, the original's still ends."""
    params = make_params()
    opt = BackwardFusedOptimizer(CountsInTheGroup, params)
    loss_of(params, ALL, 0).backward()
    opt.step()
    loss_of(params, ALL, 1).backward()
    copied = copy.deepcopy(opt)
    opt.step()
    assert opt.param_groups[0]["step"] == 2
    assert copied.param_groups[0]["step"] in (1, 2)
