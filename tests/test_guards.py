"""Every refusal: a program that would have diverged, its message, and the neighbour that must stay silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from twins import Twins, assert_no_gradients, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

FULL = range(4)
Program = Callable[[Sequence[Tensor], Optimizer], None]


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def twins_with(strict: bool = True, optimizer_class: Any = torch.optim.SGD, **kwargs: Any) -> Twins:
    return Twins(optimizer_class, options={"strict": strict}, **{"lr": 0.1, **kwargs})


def diverged(twins: Twins) -> bool:
    return any(not torch.equal(*pair) for pair in zip(*twins.models))


# Guards of loops that call step(): each program diverges with strict=False


def accumulates_unannounced(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(params, FULL, 0).backward()
    loss_of(params, FULL, 1).backward()
    optimizer.step()


def several_losses_through_one_network(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    first, second = loss_of(params, (0, 1, 2), 0), loss_of(params, (2, 3), 1)
    second.backward()
    first.backward()
    optimizer.step()


def walks_a_graph_twice(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss = sum((param * 2).sum() for param in params)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def sets_a_gradient_by_hand_after_backward(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(params, FULL, 0).backward()
    for param in params[:2]:
        grad = torch.ones_like(param)
        param.grad = grad if param.grad is None else param.grad + grad
    optimizer.step()


def skips_a_step_on_nan(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    for seed in range(3):
        optimizer.zero_grad()
        loss = loss_of(params, FULL, seed) * (float("nan") if seed == 1 else 1.0)
        loss.backward()
        if not loss.isnan():
            optimizer.step()


def trains_a_generator_through_a_discriminator(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    """The discriminator is the optimizer's; the generator's loss flows through it."""
    for seed in range(2):
        optimizer.zero_grad()
        loss_of(params, FULL, seed).backward()
        optimizer.step()
        loss_of(params, FULL, 10 + seed).backward()


def changes_lr_between_backward_and_step(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    loss_of(params, FULL, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()


def changes_a_tensor_lr_in_place(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    loss_of(params, FULL, 0).backward()
    optimizer.param_groups[0]["lr"].mul_(0.1)
    optimizer.step()


def changes_lr_between_two_losses(params: Sequence[Tensor], optimizer: Optimizer) -> None:
    loss_of(params, (0, 1), 0).backward()
    optimizer.param_groups[0]["lr"] = 0.01
    loss_of(params, (2, 3), 1).backward()
    optimizer.step()


SECOND = r"parameter \d of group 0, of shape .* second gradient before opt.step\(\).*accumulate\(\).*strict=False"
DISCARDS = r"zero_grad\(\) would discard.*requires_grad_\(False\).*strict=False"
CHANGED = r"'lr' of parameter group 0 was changed between backward\(\) and opt.step\(\).*strict=False"
STRICT: list[tuple[Program, str]] = [
    (accumulates_unannounced, SECOND),
    (several_losses_through_one_network, SECOND),
    (walks_a_graph_twice, SECOND),
    (sets_a_gradient_by_hand_after_backward, SECOND),
    (skips_a_step_on_nan, DISCARDS),
    (trains_a_generator_through_a_discriminator, DISCARDS),
    (changes_lr_between_backward_and_step, CHANGED),
    (changes_lr_between_two_losses, CHANGED),
]
NAMES = [program.__name__ for program, _ in STRICT]
BY_PROGRAM = pytest.mark.parametrize(("program", "message"), STRICT, ids=NAMES)


@BY_PROGRAM
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_refused_in_a_loop_that_calls_step(program: Program, message: str, later: bool) -> None:
    twins = twins_with(momentum=0.9)
    if later:
        twins.iterate(9)
        twins.fused.zero_grad()
    with pytest.raises(RuntimeError, match=message):
        program(twins.models[1], twins.fused)


@BY_PROGRAM
def test_would_have_diverged_with_the_guard_off(program: Program, message: str) -> None:
    twins = twins_with(strict=False, momentum=0.9)
    for params, optimizer in twins.each():
        program(params, optimizer)
    assert diverged(twins)


@BY_PROGRAM
def test_training_goes_on_after_a_refusal_that_was_caught(program: Program, message: str) -> None:
    twins = twins_with(momentum=0.9)
    with pytest.raises(RuntimeError):
        program(twins.models[1], twins.fused)
    twins.fused.zero_grad()
    twins.fused.param_groups[0]["lr"] = 0.1
    twins.plain.load_state_dict(twins.fused.state_dict())
    twins.plain.load_state_dict({**twins.plain.state_dict()})
    for source, target in zip(twins.models[1], twins.models[0]):
        target.data.copy_(source.data)
    for param in twins.models[0]:
        state = twins.plain.state[param]
        state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})
    for seed in range(3):
        twins.iterate(seed)
        twins.check(f"iteration {seed}")
        assert_no_gradients(twins.fused)


def test_a_tensor_lr_changed_in_place_is_refused() -> None:
    twins = twins_with(optimizer_class=torch.optim.Adam, lr=torch.tensor(0.1))
    with pytest.raises(RuntimeError, match=CHANGED):
        changes_a_tensor_lr_in_place(twins.models[1], twins.fused)


def test_names_are_used_where_they_are_known() -> None:
    model = nn.Linear(3, 2)
    try:
        optimizer = BackwardFusedOptimizer(torch.optim.SGD, model.named_parameters(), lr=0.1)
    except TypeError:
        pytest.skip("this torch takes no named parameters")
    model(torch.ones(1, 3)).sum().backward()
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="parameter '(weight|bias)' received a second gradient"):
        optimizer.step()


# Neighbours: none raises or warns, and all are exact


def ordinary(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(params, FULL, seed).backward()
    optimizer.step()


def zeroes_after_the_step(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    loss_of(params, FULL, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroes_twice(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    zeroes_after_the_step(params, optimizer, seed)


def frozen_during_the_loss_of_another_network(params: Sequence[Any], optimizer: Optimizer, seed: int) -> None:
    ordinary(params, optimizer, seed)
    for param in params:
        param.requires_grad_(False)
    other = torch.ones(3, requires_grad=True)
    (loss_of(params, FULL, seed) + other.sum()).backward()
    for param in params:
        param.requires_grad_(True)


def validates(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    ordinary(params, optimizer, seed)
    with torch.no_grad():
        loss_of(params, FULL, 10 + seed)


def asks_for_gradients_with_autograd_grad(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss = loss_of(params, FULL, seed)
    grads = torch.autograd.grad(loss, list(params), create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    (loss + penalty).backward()
    torch.autograd.grad(loss_of(params, FULL, seed), params[0])
    optimizer.step()


def sums_its_losses(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    torch.autograd.backward([loss_of(params, FULL, seed), loss_of(params, (1, 2), 10 + seed)])
    optimizer.step()


def loses_over_disjoint_parameters(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(params, (0, 2), seed).backward()
    loss_of(params, (1, 3), seed).backward()
    optimizer.step()


def announces_accumulation(params: Sequence[Tensor], optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    if isinstance(optimizer, BackwardFusedOptimizer):
        with optimizer.accumulate():
            loss_of(params, FULL, seed).backward()
    else:
        loss_of(params, FULL, seed).backward()
    loss_of(params, FULL, 10 + seed).backward()
    optimizer.step()


def schedules_after_the_step(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    ordinary(params, optimizer, seed)
    optimizer.param_groups[0]["lr"] *= 0.9


def schedules_before_backward(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9
    ordinary(params, optimizer, seed)


def takes_a_closure(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params, FULL, seed)
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None


def skips_before_backward_on_nan(params: Sequence[Tensor], optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss = loss_of(params, FULL, seed) * (float("nan") if seed == 1 else 1.0)
    if not loss.isnan():
        loss.backward()
        optimizer.step()


SILENT = [
    ordinary,
    zeroes_after_the_step,
    zeroes_twice,
    frozen_during_the_loss_of_another_network,
    validates,
    asks_for_gradients_with_autograd_grad,
    sums_its_losses,
    loses_over_disjoint_parameters,
    announces_accumulation,
    schedules_after_the_step,
    schedules_before_backward,
    takes_a_closure,
    skips_before_backward_on_nan,
]


@pytest.mark.parametrize("cap", [0, 1.0], ids=["alone", "in runs"])
@pytest.mark.parametrize("iteration", SILENT, ids=lambda value: value.__name__)
def test_neighbours_are_silent_and_exact(iteration: Callable[..., None], cap: float) -> None:
    twins = Twins(torch.optim.AdamW, lr=0.01, options={"bucket_cap_mb": cap})
    for seed in range(4):
        for params, optimizer in twins.each():
            iteration(params, optimizer, seed)
        twins.check(f"iteration {seed}")


def test_two_optimizers_on_disjoint_parameters_of_one_loss() -> None:
    params, other_params = make_params(), make_params()
    plain = [torch.optim.AdamW(params[:2]), torch.optim.SGD(params[2:], lr=0.1)]
    fused = [
        BackwardFusedOptimizer(torch.optim.AdamW, other_params[:2]),
        BackwardFusedOptimizer(torch.optim.SGD, other_params[2:], lr=0.1),
    ]
    for seed in range(4):
        for chosen, optimizers in ((params, plain), (other_params, fused)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(chosen, FULL, seed).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(params, other_params))


def test_gan_with_the_other_network_frozen_is_exact_and_unfrozen_is_refused() -> None:
    def run(build: Callable[..., Any], freeze: bool) -> list[Tensor]:
        torch.manual_seed(0)
        generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizers = [build(torch.optim.SGD, net.parameters(), lr=0.1) for net in (generator, critic)]
        for _ in range(3):
            noise = torch.randn(4, 3)
            optimizers[1].zero_grad()
            (critic(generator(noise).detach()).mean() - critic(noise).mean()).backward()
            optimizers[1].step()
            critic.requires_grad_(not freeze)
            optimizers[0].zero_grad()
            (-critic(generator(noise)).mean()).backward()
            optimizers[0].step()
            critic.requires_grad_(True)
        return [*generator.parameters(), *critic.parameters()]

    def plain(optimizer_class: Any, params: Any, **kwargs: Any) -> Optimizer:
        return optimizer_class(params, **kwargs)

    expected = run(plain, False)
    assert all(map(torch.equal, expected, run(BackwardFusedOptimizer, True)))
    with pytest.raises(RuntimeError, match=DISCARDS):
        run(BackwardFusedOptimizer, False)


# Guards of every loop


@pytest.mark.parametrize("strict", [True, False])
def test_double_wrapping_is_refused_until_the_first_lets_go(strict: bool) -> None:
    params = make_params()
    first = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    with pytest.raises(ValueError, match="parameter 0 of group 0.* another BackwardFusedOptimizer.*unfuse"):
        BackwardFusedOptimizer(torch.optim.SGD, params[2:], lr=0.1, strict=strict)
    other = BackwardFusedOptimizer(torch.optim.SGD, make_params()[:1], lr=0.1)
    with pytest.raises(ValueError, match="parameter 0 of group 1.* another BackwardFusedOptimizer"):
        other.add_param_group({"params": params[1]})
    assert len(other.param_groups) == 1
    first.unfuse()
    second = BackwardFusedOptimizer(torch.optim.SGD, params[2:], lr=0.1)
    with pytest.raises(ValueError, match="another BackwardFusedOptimizer"):
        first.fuse()
    loss_of(params, (2,), 0).backward()
    assert params[2].grad is None
    del second


def test_double_wrapping_would_have_stepped_twice() -> None:
    twins = twins_with()
    second = torch.optim.SGD(twins.models[1], lr=0.1)
    for params, optimizer in twins.each():
        if optimizer is twins.fused:
            params[0].register_post_accumulate_grad_hook(lambda _: second.step())
        ordinary(params, optimizer, 0)
    assert diverged(twins)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "views",
    [
        lambda base: [base, base.view(6)],
        lambda base: [base[:2], base[1:]],
        lambda base: [base.view(6)[2:], torch.zeros(2), base],
    ],
    ids=["same", "overlapping", "third"],
)
def test_shared_storage_is_refused(views: Callable[[Tensor], list[Tensor]], strict: bool) -> None:
    params = [nn.Parameter(view) for view in views(torch.zeros(3, 2))]
    with pytest.raises(ValueError, match="share memory.*tied"):
        BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1, strict=strict)
    assert not any(param._post_accumulate_grad_hooks for param in params if param._post_accumulate_grad_hooks)


def test_neighbours_in_one_storage_are_not_shared() -> None:
    base = torch.zeros(6)
    params = [nn.Parameter(base[:3]), nn.Parameter(base[3:])]
    BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)


def test_a_tied_weight_given_once_is_exact() -> None:
    twins = twins_with(shapes=[(3, 3)])
    for seed in range(3):
        for (weight,), optimizer in twins.each():
            optimizer.zero_grad()
            (torch.tanh(torch.ones(1, 3) @ weight) @ weight).square().sum().backward()
            optimizer.step()
        twins.check(f"iteration {seed}")


def test_replaced_parameters_are_told_of_once() -> None:
    model = nn.Linear(3, 2)
    optimizer = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model.weight, model.bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.warns(UserWarning, match="no parameter of this BackwardFusedOptimizer had .*fully_shard"):
        optimizer.step()
    optimizer.step()


def test_step_with_nothing_warns_once_where_it_was_called() -> None:
    twins = twins_with()
    with pytest.warns(UserWarning, match="so nothing was trained") as record:
        twins.fused.step()
    assert [warning.filename for warning in record] == [__file__]
    twins.fused.step()


@pytest.mark.skipif(not hasattr(torch.__future__, "set_swap_module_params_on_conversion"), reason="cannot swap")
def test_conversion_by_swap_tensors_is_exact_and_goes_on_inside_backward() -> None:
    """Autograd forgets the hook: the first gradient after it is applied by step(), which renews the hook."""
    models, optimizers = [], []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        build = BackwardFusedOptimizer if fused else lambda cls, *args, **kwargs: cls(*args, **kwargs)
        optimizers.append(build(torch.optim.SGD, model.parameters(), lr=0.1))
        models.append(model)

    def iterate(seed: int) -> None:
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.ones(1, 3, dtype=model.weight.dtype) * seed).square().sum().backward()
            optimizer.step()

    iterate(1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for model in models:
            model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for seed in range(2, 5):
        iterate(seed)
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert all(param.grad is None for param in models[1].parameters())


def test_an_ordinary_conversion_keeps_the_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model.double()
    before = model.weight.detach().clone()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_dropping_the_optimizer_is_told_of_at_the_next_backward() -> None:
    params = make_params()
    BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    with pytest.warns(UserWarning, match="no longer exists.*Keep a reference"):
        loss_of(params, FULL, 0).backward()
    loss_of(params, FULL, 0).backward()


def test_a_first_step_by_hand_then_a_loop_without_step() -> None:
    """As torch.distributed.checkpoint makes the state of an optimizer exist, before frameworks that never step."""
    twins = twins_with(optimizer_class=torch.optim.AdamW, lr=0.0)
    for params, optimizer in twins.each():
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.01
    twins.check("state made")
    for seed in range(4):
        for params in twins.models:
            loss_of(params, [index for index in FULL if (index + seed) % 3], seed).backward()
        twins.plain.step()
        twins.plain.zero_grad()
        twins.check(f"iteration {seed}")
        assert_no_gradients(twins.fused)


def test_loops_without_step_may_do_what_only_loops_with_step_may_not() -> None:
    twins = twins_with(optimizer_class=torch.optim.AdamW, lr=0.01)
    for seed in range(4):
        for params, optimizer in twins.each():
            optimizer.zero_grad()
            loss_of(params, FULL, seed).backward()
        twins.plain.step()
        for optimizer in (twins.plain, twins.fused):
            optimizer.param_groups[0]["lr"] *= 0.9
        twins.check(f"iteration {seed}")


# Classes that cannot be stepped parameter by parameter


class Normalising(Optimizer):
    """Divides every gradient by the norm of all: couples its parameters through the state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=0.1)


class NeedsClosure(Normalising):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()


class Replaced(Normalising):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.step = lambda closure=None: None  # type: ignore[method-assign]


class Wrapping(Optimizer):
    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "message"),
    [
        (Normalising, {}, "Normalising couples its parameters.*use Normalising itself"),
        (NeedsClosure, {}, "NeedsClosure.step.* needs a closure.*Use NeedsClosure itself"),
        (torch.optim.LBFGS, {}, "LBFGS.step.* needs a closure.*Use LBFGS itself"),
        (Replaced, {}, "this Replaced was replaced on the instance.*subclass"),
        (Wrapping, {}, "Wrapping wraps another optimizer .inner.*inner optimizer's class"),
        (torch.optim.SGD, {"lr": 0.1, "differentiable": True}, "group 0 has differentiable=True.*False"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_classes_leave_no_hook(optimizer_class: Any, kwargs: dict[str, Any], message: str) -> None:
    params = make_params()
    with pytest.raises(ValueError, match=message):
        BackwardFusedOptimizer(optimizer_class, params, **kwargs)
    loss_of(params, FULL, 0).backward()
    assert all(param.grad is not None for param in params)


def test_a_coupled_class_would_have_diverged() -> None:
    params, apart = make_params(), make_params()
    loss_of(params, FULL, 0).backward()
    Normalising(params).step()
    for index in FULL:
        loss_of(apart, (index,), 0).backward()
        Normalising([apart[index]]).step()
    assert not all(map(torch.equal, params, apart))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb must be 0 or more"),
        ({"accumulate_when": True}, TypeError, "accumulate_when must be a function"),
        ({"grad_scaler": True}, TypeError, "grad_scaler must be a torch.amp.GradScaler"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BackwardFusedOptimizer(torch.optim.SGD, make_params(), lr=0.1, **options)


@pytest.mark.parametrize("wrong", [torch.nn.Linear, "SGD", None])
def test_what_is_no_optimizer_class(wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be a subclass of torch.optim.Optimizer"):
        BackwardFusedOptimizer(wrong, make_params())


class Failing(torch.autograd.Function):
    """Fails once its neighbours have their gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("backward fails here")


def test_step_after_a_backward_that_failed_is_refused() -> None:
    def fail(params: Sequence[Tensor]) -> None:
        loss = Failing.apply(params[0] * 2).sum()
        for param in params[1:]:
            loss = loss + (param * 2).sum()
        with pytest.raises(ArithmeticError):
            loss.backward()

    twins, lenient = twins_with(), twins_with(strict=False)
    for each in (twins, lenient):
        each.iterate(0)
        for params in each.models:
            fail(params)
        each.plain.step()
    with pytest.raises(RuntimeError, match="parameter . of group 0.* was not stepped.*strict=False"):
        twins.fused.step()
    lenient.fused.step()
    assert diverged(lenient)
    assert_no_gradients(twins.fused)


class Counting(Optimizer):
    """Divides its rate by a counter in the group."""

    moves_idle = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0 if not self.moves_idle else 1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not self.moves_idle:
                group["k"] += 1
            for param in group["params"]:
                if self.moves_idle:
                    param.mul_(0.9)
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])


class MovingIdle(Counting):
    """Decays parameters without gradient, too."""

    moves_idle = True


@pytest.mark.parametrize("optimizer_class", [Counting, MovingIdle])
def test_losses_over_disjoint_parameters_before_the_first_step_are_refused_if_it_matters(
    optimizer_class: type[Optimizer],
) -> None:
    """Later on they make one round: that the loop calls step() is known then."""
    refused = twins_with(optimizer_class=optimizer_class)
    with pytest.raises(RuntimeError, match=f"several backward.*{optimizer_class.__name__} counts.*accumulate"):
        loses_over_disjoint_parameters(refused.models[1], refused.fused, 0)
    lenient = twins_with(strict=False, optimizer_class=optimizer_class)
    for params, optimizer in lenient.each():
        loses_over_disjoint_parameters(params, optimizer, 0)
    assert diverged(lenient)
    twins = twins_with(optimizer_class=optimizer_class)
    twins.iterate(9)
    for seed in range(3):
        for params, optimizer in twins.each():
            loses_over_disjoint_parameters(params, optimizer, seed)
        twins.check(f"iteration {seed}")


def test_a_pending_gradient_after_a_round_that_moved_its_parameter_is_refused() -> None:
    twins = twins_with(optimizer_class=MovingIdle)
    loss_of(twins.models[1], (0, 1), 0).backward()
    with twins.fused.accumulate():
        loss_of(twins.models[1], (2, 3), 0).backward()
    with pytest.raises(RuntimeError, match="MovingIdle counts rounds or moves parameters"):
        twins.fused.step()


def test_a_weight_written_between_backward_and_step_is_refused() -> None:
    def clamped(opt: Any, params: list[torch.nn.Parameter]) -> None:
        for _ in range(2):
            opt.zero_grad()
            sum((param - 2).square().sum() for param in params).backward()
            with torch.no_grad():
                params[0].mul_(0.9)
            opt.step()

    plain_params, fused_params, loose_params = make_params(), make_params(), make_params()
    clamped(torch.optim.SGD(plain_params, lr=0.1), plain_params)
    with pytest.raises(RuntimeError, match="written in place between backward.* and opt.step"):
        clamped(BackwardFusedOptimizer(torch.optim.SGD, fused_params, lr=0.1), fused_params)
    clamped(BackwardFusedOptimizer(torch.optim.SGD, loose_params, lr=0.1, strict=False), loose_params)
    assert not torch.equal(plain_params[0], loose_params[0])


def test_a_step_after_loading_over_what_backward_did_is_refused() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.Adam, params, lr=0.1)
    for _ in range(2):
        sum(param.square().sum() for param in params).backward()
        opt.step()
    saved = opt.state_dict()
    sum(param.square().sum() for param in params).backward()
    opt.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="after load_state_dict.*without a backward pass"):
        opt.step()
    opt.load_state_dict(saved)
    sum(param.square().sum() for param in params).backward()
    opt.step()


@pytest.mark.skipif(not hasattr(torch.__future__, "set_swap_module_params_on_conversion"), reason="cannot swap")
def test_zero_grad_warns_of_gradients_that_no_hook_saw_and_the_next_ones_are_applied() -> None:
    model = nn.Linear(3, 2)
    opt = BackwardFusedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    opt.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(model.weight, before)
    with pytest.warns(UserWarning, match="zero_grad.. drops gradients.*never applied"):
        opt.zero_grad()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert not torch.equal(model.weight, before)
    opt.zero_grad()


def test_zero_grad_is_silent_about_gradients_that_were_seen() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.zero_grad()
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
        opt.zero_grad()
        with opt.accumulate():
            loss_of(params, range(len(params)), 0).backward()
        opt.zero_grad()
        loss_of(params, range(len(params)), 0).backward()
        opt.zero_grad()
