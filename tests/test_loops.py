"""What training loops do with an optimizer: the same bits as with the ordinary one, whatever they do."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from programs import OPTIMIZERS, Make, Program, assert_same_run, fused, record
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from twins import SHAPES, Twins, assert_equal, assert_no_gradients, assert_twins, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

ALL = range(len(SHAPES))
IDLE = "ignore:opt.step\\(\\) ended a round"


def closure_step(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(5):

        def closure(iteration: int = iteration) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(params, ALL, iteration)
            loss.backward()
            return loss

        yield opt.step(closure), opt


def unused_with_zeros(make: Make, set_to_none: bool) -> Iterator[Any]:
    """After zero_grad(set_to_none=False) an unused parameter holds zeros, and momentum or decay move it."""
    params = make_params()
    opt = make(params)
    for iteration, used in enumerate([[0, 1], [2], [0, 3], [1, 2, 3], [0], [3]]):
        loss_of(params, used, iteration).backward()
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)
        yield opt


def zeroing_by_turns(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration, (used, to_none) in enumerate(
        [([0, 1], False), ([0, 2], False), ([1], True), ([2, 3], False), ([0], False), ([1], True), ([0], True)]
    ):
        loss_of(params, used, iteration).backward()
        opt.step()
        opt.zero_grad(set_to_none=to_none)
        yield opt


def zeroing_by_the_model(make: Make) -> Iterator[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    opt = make(model.parameters())
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        opt.step()
        yield opt


def zero_grad_at_each_usual_place(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(5):
        opt.zero_grad()
        opt.zero_grad()
        loss = loss_of(params, ALL, iteration)
        opt.zero_grad()
        loss.backward()
        opt.step()
        opt.zero_grad()
        yield opt


def late_group(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params[:2])
    for iteration in range(6):
        if iteration == 2:
            opt.add_param_group({"params": params[2], "lr": 0.2})
        if iteration == 4:
            opt.add_param_group({"params": params[3:]})
        used = range(2 if iteration < 2 else 3 if iteration < 4 else 4)
        loss_of(params, used, iteration).backward()
        opt.step()
        opt.zero_grad()
        yield opt


def group_added_between_backward_and_step(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params[:2])
    for iteration in range(5):
        for param in params:
            param.grad = None
        loss_of(params, ALL if iteration < 4 else [0, 1], iteration).backward()
        if iteration == 2:
            opt.add_param_group({"params": params[2]})
        if iteration == 4:
            opt.add_param_group({"params": params[3]})
        opt.step()
        yield opt


def group_list_grows_in_place(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params[:2])
    for iteration in range(4):
        if iteration == 2:
            opt.param_groups[0]["params"].append(params[2])
        loss_of(params, range(3 if iteration >= 2 else 2), iteration).backward()
        opt.step()
        opt.zero_grad()
        yield opt


def group_removed_in_place(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make([{"params": params[:2]}, {"params": params[2:]}])
    for iteration in range(4):
        if iteration == 2:
            del opt.param_groups[0]
        loss_of(params, ALL, iteration).backward()
        opt.step()
        for param in params:
            param.grad = None
        yield params


def frozen_at_construction(make: Make) -> Iterator[Any]:
    params = make_params()
    params[1].requires_grad_(False)
    opt = make(params)
    for iteration in range(6):
        if iteration == 2:
            params[1].requires_grad_(True)
        if iteration == 3:
            params[0].requires_grad_(False)
        if iteration == 5:
            params[0].requires_grad_(True)
        loss_of(params, ALL, iteration).backward()
        opt.step()
        opt.zero_grad()
        yield opt


def frozen_while_holding_a_gradient(make: Make) -> Iterator[Any]:
    """As an ordinary step does, a gradient left on a frozen parameter is applied again and again."""
    params = make_params()
    opt = make(params)
    params[0].grad = torch.ones_like(params[0])
    params[0].requires_grad_(False)
    for iteration in range(3):
        loss_of(params, [1, 2], iteration).backward()
        opt.step()
        for param in params[1:]:
            param.grad = None
        yield opt
        params[0].grad = torch.ones_like(params[0])


def tied_weights(make: Make) -> Iterator[Any]:
    embedding, out = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
    out.weight = embedding.weight
    opt = make(torch.nn.ModuleList([embedding, out]).parameters())
    for iteration in range(4):
        tokens = torch.tensor([iteration, 1, 6])
        opt.zero_grad()
        torch.nn.functional.cross_entropy(out(embedding(tokens)), tokens).backward()
        opt.step()
        yield opt


def backward_for_some_inputs(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(4):
        opt.zero_grad()
        loss_of(params, ALL, iteration).backward(inputs=[params[iteration], params[0]])
        opt.step()
        yield opt


def backward_in_parts_by_inputs(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(4):
        opt.zero_grad()
        loss = linear_loss(params, iteration)
        loss.backward(inputs=params[:2], retain_graph=True)
        loss.backward(inputs=params[2:])
        opt.step()
        yield opt


def linear_loss(params: list[torch.nn.Parameter], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = [(param * torch.randn(param.shape, generator=generator)).sum() for param in params]
    return torch.stack(parts).sum()


def same_graph_twice(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(4):
        loss = linear_loss(params, iteration)
        for again in (True, False):
            opt.zero_grad()
            loss.backward(retain_graph=again)
            opt.step()
        yield opt


def backward_with_create_graph(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(4):
        opt.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(params, ALL, iteration).backward(create_graph=True)
        opt.step()
        assert all(
            not value.requires_grad
            for state in opt.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        yield opt


def gradient_penalty(make: Make) -> Iterator[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    opt = make(model.parameters())
    for _ in range(4):
        opt.zero_grad()
        inputs = torch.randn(6, 3, requires_grad=True)
        loss = model(inputs).mean()
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + (slope.norm() - 1).square()).backward()
        opt.step()
        yield opt, loss


def penalty_on_weight_gradients(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(4):
        opt.zero_grad()
        loss = loss_of(params, ALL, iteration)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
        opt.step()
        yield opt


def gradients_set_by_hand(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(5):
        opt.zero_grad()
        for index, param in enumerate(params):
            if (index + iteration) % 3:
                param.grad = torch.randn(param.shape)
        opt.step()
        yield opt


def one_gradient_stepped_several_times(make: Make) -> Iterator[Any]:
    """Without zero_grad() an ordinary step() applies a gradient that is still there once more."""
    params = make_params()
    opt = make(params)
    for param in params:
        param.grad = torch.randn(param.shape)
    for _ in range(3):
        opt.step()
        yield opt


def gradients_of_autograd_grad(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(4):
        grads = torch.autograd.grad(loss_of(params, ALL, iteration), params)
        yield opt
        for param, grad in zip(params, grads):
            param.grad = grad
        opt.step()
        yield opt


def some_by_hand_some_by_backward(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(5):
        opt.zero_grad()
        params[0].grad = torch.randn(params[0].shape)
        params[1].grad = torch.randn(params[1].shape)
        loss_of(params, [1, 2], iteration).backward()
        opt.step()
        yield opt


def hand_set_after_backward(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(5):
        opt.zero_grad()
        loss_of(params, [1, 2], iteration).backward()
        params[0].grad = torch.randn(params[0].shape)
        opt.step()
        yield opt


def two_optimizers_one_loss(make: Make) -> Iterator[Any]:
    params = make_params()
    opts = [make(params[:2]), make(params[2:])]
    for iteration in range(4):
        for opt in opts:
            opt.zero_grad()
        loss_of(params, ALL, iteration).backward()
        for opt in opts:
            opt.step()
        yield opts


def skipped_first_iterations(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    opt.step()
    opt.zero_grad()
    for iteration in range(3):
        loss_of(params, ALL, iteration).backward()
        opt.step()
        opt.step() if iteration == 99 else None
        opt.zero_grad()
        yield opt


def state_cleared_in_mid_training(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(6):
        if iteration == 3:
            opt.state.clear()
        loss_of(params, ALL, iteration).backward()
        opt.step()
        opt.zero_grad()
        yield opt


def state_of_one_parameter_edited(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(5):
        if iteration == 3:
            for value in opt.state[params[0]].values():
                if isinstance(value, torch.Tensor):
                    value.mul_(0.5)
            opt.state.pop(params[1], None)
        loss_of(params, ALL, iteration).backward()
        opt.step()
        opt.zero_grad()
        yield opt


def weights_overwritten_between_steps(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(4):
        with torch.no_grad():
            params[0].copy_(torch.randn(params[0].shape))
            params[1].data = torch.randn(params[1].shape)
            torch.nn.init.zeros_(params[2])
        loss_of(params, ALL, iteration).backward()
        opt.step()
        opt.zero_grad()
        yield opt


def nothing_used_now_and_then(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(6):
        opt.zero_grad()
        if iteration not in (0, 3):
            loss_of(params, [iteration % 4], iteration).backward()
        opt.step()
        yield opt


def tensor_hooks_and_post_accumulate_hooks(make: Make) -> Iterator[Any]:
    params = make_params()
    params[0].register_hook(lambda grad: grad * 2)
    seen = []
    params[1].register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    opt = make(params)
    params[2].register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    for iteration in range(4):
        opt.zero_grad()
        loss_of(params, ALL, iteration).backward()
        opt.step()
        yield opt, list(seen)


def inside_inference_of_another_model(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make(params)
    for iteration in range(3):
        loss_of(params, ALL, iteration).backward()
        with torch.no_grad():
            opt.step()
            yield loss_of(params, ALL, 0)
        with torch.inference_mode():
            yield loss_of(params, ALL, 1)
        opt.zero_grad()
        yield opt


def set_of_none_and_generators(make: Make) -> Iterator[Any]:
    params = make_params()
    opt = make({"params": iter(pair), "lr": lr} for pair, lr in ((params[:2], 0.1), (params[2:], 0.01)))
    for iteration in range(3):
        loss_of(params, ALL, iteration).backward()
        opt.step()
        opt.zero_grad()
        yield opt


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        closure_step,
        zeroing_by_turns,
        zeroing_by_the_model,
        zero_grad_at_each_usual_place,
        late_group,
        group_added_between_backward_and_step,
        group_list_grows_in_place,
        group_removed_in_place,
        frozen_at_construction,
        frozen_while_holding_a_gradient,
        tied_weights,
        backward_for_some_inputs,
        backward_in_parts_by_inputs,
        same_graph_twice,
        backward_with_create_graph,
        gradient_penalty,
        penalty_on_weight_gradients,
        gradients_set_by_hand,
        one_gradient_stepped_several_times,
        gradients_of_autograd_grad,
        some_by_hand_some_by_backward,
        hand_set_after_backward,
        two_optimizers_one_loss,
        skipped_first_iterations,
        state_cleared_in_mid_training,
        state_of_one_parameter_edited,
        weights_overwritten_between_steps,
        nothing_used_now_and_then,
        tensor_hooks_and_post_accumulate_hooks,
        inside_inference_of_another_model,
        set_of_none_and_generators,
    )
}
PROGRAMS["unused_with_zeros"] = partial(unused_with_zeros, set_to_none=False)
PROGRAMS["unused_with_none"] = partial(unused_with_zeros, set_to_none=True)


REFUSED = {("backward_in_parts_by_inputs", "counter"): "several backward\\(\\) calls before the first opt.step"}
"""Before the first step() call, a counter cannot know that both passes are of one round."""


@pytest.mark.filterwarnings("error", IDLE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_loop_gives_the_same_bits(name: str, optimizer: str) -> None:
    if (name, optimizer) not in REFUSED:
        assert_same_run(PROGRAMS[name], OPTIMIZERS[optimizer])
        return
    with pytest.raises(RuntimeError, match=REFUSED[name, optimizer]):
        record(PROGRAMS[name], fused(OPTIMIZERS[optimizer]))


@pytest.mark.filterwarnings("error", IDLE)
@pytest.mark.parametrize("name", PROGRAMS)
def test_loop_gives_the_same_bits_one_unit_a_parameter(name: str) -> None:
    assert_same_run(PROGRAMS[name], OPTIMIZERS["AdamW"], bucket_cap_mb=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_from_optimizer_continues_with_groups_and_state(optimizer: str) -> None:
    models = [make_params(), make_params()]
    plain, taken_over = (OPTIMIZERS[optimizer](model) for model in models)
    for iteration in range(3):
        for params, opt in zip(models, (plain, taken_over)):
            loss_of(params, [0, 2, 3], iteration).backward()
            opt.step()
            opt.zero_grad()
    ours = BackwardFusedOptimizer.from_optimizer(taken_over)
    assert ours.param_groups is taken_over.param_groups
    for iteration in range(4):
        for params, opt in zip(models, (plain, ours)):
            loss_of(params, [0, 1, iteration % 4], iteration).backward()
            opt.step()
            opt.zero_grad()
        assert_twins(plain, ours)
        assert_equal(ours.state_dict(), taken_over.state_dict())


def test_from_optimizer_keeps_hooks_and_fires_them_once_a_step() -> None:
    params = make_params()
    plain = torch.optim.AdamW(params)
    calls: list[str] = []
    plain.register_step_pre_hook(lambda opt, args, kwargs: calls.append("pre"))
    plain.register_step_post_hook(lambda opt, args, kwargs: calls.append("post"))
    plain.register_state_dict_post_hook(lambda opt, state_dict: calls.append("saved"))
    plain.register_load_state_dict_pre_hook(lambda opt, state_dict: calls.append("loading"))
    opt = BackwardFusedOptimizer.from_optimizer(plain)
    loss_of(params, ALL, 0).backward()
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert calls == ["pre", "post", "saved", "loading"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_that_was_taken_over_steps_no_more_while_the_new_one_is_fused(optimizer: str) -> None:
    params = make_params()
    plain = OPTIMIZERS[optimizer](params)
    ours = BackwardFusedOptimizer.from_optimizer(plain)
    loss_of(params, ALL, 0).backward()
    with pytest.raises(RuntimeError, match="step\\(\\) was called on the .* took over"):
        plain.step()
    ours.step()
    ours.unfuse()
    plain.step()
    ours.fuse()
    del ours
    plain.step()


def test_from_optimizer_with_gradients_that_are_already_there() -> None:
    models = [make_params(), make_params()]
    plain, taken_over = (torch.optim.AdamW(model) for model in models)
    for model in models:
        loss_of(model, [0, 1], 0).backward()
    ours = BackwardFusedOptimizer.from_optimizer(taken_over)
    for params, opt in zip(models, (plain, ours)):
        loss_of(params, [1, 2], 1).backward()
        opt.step()
        opt.zero_grad()
    assert_twins(plain, ours)


def test_partial_stands_in_for_an_optimizer_class() -> None:
    optimizer_class = partial(BackwardFusedOptimizer, torch.optim.AdamW)

    def program(make: Make) -> Iterator[Any]:
        params = make_params()
        opt = make(params, lr=0.01, betas=(0.8, 0.9))
        for iteration in range(3):
            loss_of(params, ALL, iteration).backward()
            opt.step()
            opt.zero_grad()
            yield opt

    assert_equal(record(program, torch.optim.AdamW), record(program, optimizer_class))


def test_positional_arguments_of_the_inner_class() -> None:
    models = [make_params(), make_params()]
    plain, ours = (
        torch.optim.SGD(models[0], 0.1, 0.9),
        BackwardFusedOptimizer(torch.optim.SGD, models[1], 0.1, 0.9),
    )
    for iteration in range(3):
        for params, opt in zip(models, (plain, ours)):
            loss_of(params, ALL, iteration).backward()
            opt.step()
            opt.zero_grad()
        assert_twins(plain, ours)


NAMED = torch.__version__ >= "2.6"
"""Earlier releases take no named parameters."""


@pytest.mark.skipif(not NAMED, reason="named parameters came with torch 2.6")
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_named_parameters_and_their_names_in_messages(optimizer: str) -> None:
    def program(make: Make) -> Iterator[Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        opt = make(model.named_parameters())
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            opt.step()
            yield opt, opt.state_dict()

    assert_same_run(program, OPTIMIZERS[optimizer])
    model = torch.nn.Linear(3, 4)
    opt = fused(OPTIMIZERS[optimizer])(model.named_parameters())
    model(torch.ones(3)).sum().backward()
    opt.step()
    model(torch.ones(3)).sum().backward()
    with pytest.raises(RuntimeError, match="parameter '(weight|bias)' received a second gradient"):
        model(torch.ones(3)).sum().backward()


def old_adam_checkpoint(state_dict: dict[str, Any]) -> dict[str, Any]:
    """As torch 1.11 wrote it: an integer step, and no keys that came later."""
    old = copy.deepcopy(state_dict)
    for state in old["state"].values():
        state["step"] = int(state["step"])
    later = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
    for group in old["param_groups"]:
        for key in later:
            group.pop(key, None)
    return old


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_old_adam_checkpoints(optimizer_class: type[Optimizer], flags: dict[str, bool]) -> None:
    twins = Twins(optimizer_class, **flags)
    for iteration in range(3):
        twins.iterate(iteration)
    state_dict = old_adam_checkpoint(twins.plain.state_dict())
    for _, opt in twins.each():
        opt.load_state_dict(copy.deepcopy(state_dict))
    for iteration in range(3):
        twins.iterate(iteration, [0, 1, iteration])
        twins.check(f"iteration {iteration}")


class PacksItsState(torch.optim.SGD):
    """Saves its momentum in half precision, under another key."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        state_dict = super().state_dict()
        packed = {key: state["momentum_buffer"].half() for key, state in state_dict["state"].items()}
        return {"packed": packed, "param_groups": state_dict["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {key: {"momentum_buffer": value} for key, value in state_dict["packed"].items()}
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})


def test_classes_with_a_checkpoint_format_of_their_own() -> None:
    twins = Twins(PacksItsState)
    for iteration in range(3):
        twins.iterate(iteration)
    assert "packed" in twins.fused.state_dict()
    crossed = [twins.fused.state_dict(), twins.plain.state_dict()]
    for (_, opt), state_dict in zip(twins.each(), crossed):
        opt.load_state_dict(state_dict)
    for iteration in range(3):
        twins.iterate(iteration)
        twins.check(f"iteration {iteration}")


@pytest.mark.parametrize("calls", [1, 3])
def test_step_hooks_fire_once_a_step_with_this_optimizer(calls: int) -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.AdamW, params, bucket_cap_mb=0)
    seen: list[tuple[str, Any]] = []
    handles = [
        opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o))),
        opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o))),
        register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append(("global pre", o))),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(("global post", o))),
    ]
    try:
        for iteration in range(calls):
            loss_of(params, ALL, iteration).backward()
            assert len(seen) == 4 * iteration
            opt.step()
        params[0].grad = torch.ones_like(params[0])
        opt.step()
    finally:
        for handle in handles:
            handle.remove()
    assert [name for name, _ in seen] == ["global pre", "pre", "post", "global post"] * (calls + 1)
    assert all(who is opt for _, who in seen)


def test_step_hook_may_replace_the_closure() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7.0), {}))
    loss_of(params, ALL, 0).backward()
    assert opt.step() == 7.0


def test_state_dict_hooks_get_this_optimizer_and_may_change_the_state_dict() -> None:
    params = make_params()
    opt = BackwardFusedOptimizer(torch.optim.AdamW, params)
    loss_of(params, ALL, 0).backward()
    opt.step()
    seen: list[tuple[str, Any]] = []
    opt.register_state_dict_pre_hook(lambda o: seen.append(("saving", o)))
    opt.register_state_dict_post_hook(lambda o, state_dict: {**state_dict, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state_dict: {k: v for k, v in state_dict.items() if k != "extra"})
    opt.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o)))
    state_dict = opt.state_dict()
    assert state_dict["extra"] == 1
    opt.load_state_dict(state_dict)
    assert seen == [("saving", opt), ("loaded", opt)]


def test_param_step_hooks_see_every_parameter_once_and_may_change_or_skip_its_gradient() -> None:
    def clip_by_hand(params: list[torch.nn.Parameter]) -> None:
        for param in params:
            if param.grad is not None:
                param.grad.clamp_(-0.1, 0.1)
        params[1].grad = None

    twins = Twins(torch.optim.AdamW)
    seen: list[int] = []
    index = {id(param): number for number, param in enumerate(twins.models[1])}

    def before(opt: Any, param: torch.Tensor) -> None:
        assert opt is twins.fused
        assert param.grad is not None
        param.grad.clamp_(-0.1, 0.1)
        if index[id(param)] == 1:
            param.grad = None

    twins.fused.register_param_step_pre_hook(before)
    handle = twins.fused.register_param_step_post_hook(lambda opt, param: seen.append(index[id(param)]))
    for iteration in range(4):
        loss_of(twins.models[0], ALL, iteration).backward()
        clip_by_hand(twins.models[0])
        if iteration == 2:
            with twins.fused.accumulate():
                loss_of(twins.models[1], ALL, iteration).backward()
        else:
            loss_of(twins.models[1], ALL, iteration).backward()
        for _, opt in twins.each():
            opt.step()
            opt.zero_grad()
        twins.check(f"iteration {iteration}")
    assert sorted(seen) == sorted([0, 2, 3] * 4)
    handle.remove()
    twins.iterate(9)
    assert len(seen) == 12


class OverridesInitGroup(torch.optim.Adam):
    """A subclass in a user's script, by the protected method that such classes override."""

    def _init_group(self, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)
        return super()._init_group(group, *args, **kwargs)


class OverridesStep(torch.optim.SGD):
    """Adds noise-free decay before the parent's step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.mul_(1 - group["lr"] * 0.1)
        return super().step(closure)


class KeepsACounterAttribute(torch.optim.SGD):
    """Counts its steps on itself, whether or not there are gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


class CountsUnderAStringKey(torch.optim.SGD):
    """Keeps its counter in ``state``, beside those of the parameters."""

    def step(self, closure: Any = None) -> Any:
        count = self.state.setdefault("count", 0) + 1
        self.state["count"] = count
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(count)
        return super().step(closure)


@pytest.mark.parametrize(
    "optimizer_class", [OverridesInitGroup, OverridesStep, KeepsACounterAttribute, CountsUnderAStringKey]
)
@pytest.mark.parametrize("name", ["late_group", "nothing_used_now_and_then", "frozen_at_construction", "tied_weights"])
def test_subclasses_of_the_users_own(name: str, optimizer_class: type[Optimizer]) -> None:
    make = partial(optimizer_class, lr=0.05)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "opt.step\\(\\) ended a round")
        assert_same_run(PROGRAMS[name], make)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_what_a_program_wraps_around_step_of_a_torch_class_runs_as_well(
    optimizer_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = optimizer_class.step

    @functools.wraps(original)
    def centred(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.sub_(param.grad.mean())
        return original(self, closure)

    monkeypatch.setattr(optimizer_class, "step", centred)
    assert_same_run(late_group, partial(optimizer_class, lr=0.05))
    assert_same_run(gradients_set_by_hand, partial(optimizer_class, lr=0.05))


def schedulefree_loop(make: Make) -> Iterator[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    opt: Any = make(model.parameters())
    for epoch in range(3):
        opt.train()
        for number in range(3):
            opt.zero_grad()
            if (epoch, number) != (1, 1):
                model(torch.randn(6, 3)).square().mean().backward()
            opt.step()
        opt.eval()
        yield opt, model(torch.ones(3))
        model, old_opt = copy.deepcopy(model), opt
        opt = make(model.parameters())
        opt.load_state_dict(copy.deepcopy(old_opt.state_dict()))


@pytest.mark.filterwarnings(IDLE)
@pytest.mark.parametrize("name", ["SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"])
def test_schedulefree_switches_between_train_and_eval(name: str) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="in the newest environment only")
    kwargs = {} if name == "RAdamScheduleFree" else {"warmup_steps": 4}
    assert_same_run(schedulefree_loop, partial(getattr(schedulefree, name), lr=0.05, **kwargs))


def test_gradients_are_freed_inside_backward() -> None:
    twins = Twins(torch.optim.AdamW)
    loss_of(twins.models[1], ALL, 0).backward()
    assert_no_gradients(twins.fused)


def test_only_one_large_gradient_exists_at_a_time() -> None:
    params = [torch.nn.Parameter(torch.randn(600, 600)) for _ in range(6)]
    opt = BackwardFusedOptimizer(torch.optim.SGD, params, lr=0.1)
    alive: list[int] = []
    opt.register_param_step_pre_hook(lambda o, p: alive.append(sum(q.grad is not None for q in params)))
    loss_of(params, range(6), 0).backward()
    assert alive == [1] * 6


@pytest.mark.filterwarnings(IDLE)
def test_order_of_loops_does_not_matter() -> None:
    """Programs in a row on one and the same pair, so that what one leaves behind meets the next."""
    kinds: list[Callable[[Any, Any, int], None]] = [ordinary, by_hand, accumulated, with_closure, without_gradient]
    twins = Twins(torch.optim.AdamW, lr=0.05)
    for seed, (first, second) in enumerate(itertools.product(kinds, kinds)):
        for kind in (first, second):
            for params, opt in twins.each():
                kind(params, opt, seed)
            twins.check(f"{first.__name__}, {second.__name__}")


def ordinary(params: list[torch.nn.Parameter], opt: Optimizer, seed: int) -> None:
    opt.zero_grad(set_to_none=bool(seed % 2))
    loss_of(params, [0, 1, 2], seed).backward()
    opt.step()


def by_hand(params: list[torch.nn.Parameter], opt: Optimizer, seed: int) -> None:
    opt.zero_grad()
    params[1].grad = torch.full_like(params[1], float(seed))
    opt.step()


def accumulated(params: list[torch.nn.Parameter], opt: Any, seed: int) -> None:
    opt.zero_grad(set_to_none=bool(seed % 3))
    if isinstance(opt, BackwardFusedOptimizer):
        with opt.accumulate():
            loss_of(params, [0, 3], seed).backward()
    else:
        loss_of(params, [0, 3], seed).backward()
    loss_of(params, [0, 1], seed + 1).backward()
    opt.step()


def with_closure(params: list[torch.nn.Parameter], opt: Optimizer, seed: int) -> None:
    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(params, [1, 3], seed)
        loss.backward()
        return loss

    opt.step(closure)


def without_gradient(params: list[torch.nn.Parameter], opt: Optimizer, seed: int) -> None:
    opt.zero_grad()
    opt.step()


class CallsItsParent(torch.optim.SGD):
    """Its parent's step fires the step hooks of the instance once more."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_a_class_that_calls_its_parents_step_can_be_taken_over() -> None:
    plain_params, fused_params = make_params(), make_params()
    plain = CallsItsParent(plain_params, lr=0.1)
    fused = BackwardFusedOptimizer.from_optimizer(CallsItsParent(fused_params, lr=0.1))
    for seed in range(3):
        for params, opt in ((plain_params, plain), (fused_params, fused)):
            opt.zero_grad()
            for param in params if seed == 1 else []:
                param.grad = torch.ones_like(param)
            if seed != 1:
                loss_of(params, range(len(params)), seed).backward()
            opt.step()
        assert_twins(plain, fused)
