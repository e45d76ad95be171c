"""Activation checkpointing and other backward passes within backward passes: one round per outermost pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from twins import Counting, assert_no_gradients, assert_twins

from fused_optim import BackwardFusedOptimizer

Block = nn.Sequential
Run = Callable[[list[Block], Tensor], Tensor]


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))


def each_checkpointed(reentrant: bool) -> Run:
    def run(layers: list[Block], x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    return run


def some_checkpointed(reentrant: bool) -> Run:
    def run(layers: list[Block], x: Tensor) -> Tensor:
        x = layers[0](x)
        x = checkpoint(layers[1], x, use_reentrant=reentrant)
        return layers[3](checkpoint(layers[2], x, use_reentrant=reentrant))

    return run


def nested(reentrant: bool, inner_reentrant: bool) -> Run:
    def run(layers: list[Block], x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            x = checkpoint(layers[1], layers[0](x), use_reentrant=inner_reentrant)
            return checkpoint(layers[2], x, use_reentrant=inner_reentrant)

        return layers[3](checkpoint(outer, x, use_reentrant=reentrant))

    return run


def sequential(reentrant: bool) -> Run:
    return lambda layers, x: checkpoint_sequential(nn.Sequential(*layers), 3, x, use_reentrant=reentrant)


def everything_in_one(reentrant: bool) -> Run:
    return lambda layers, x: checkpoint(nn.Sequential(*layers), x, use_reentrant=reentrant)


def two_branches(reentrant: bool) -> Run:
    def run(layers: list[Block], x: Tensor) -> Tensor:
        left = checkpoint(layers[0], x, use_reentrant=reentrant)
        right = checkpoint(layers[1], x, use_reentrant=reentrant)
        return checkpoint(layers[2], left + right, use_reentrant=reentrant)

    return run


class BackwardInBackward(torch.autograd.Function):
    """Recomputes by hand, as re-entrant checkpointing does, but with the methods of the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Block) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


def custom_function(layers: list[Block], x: Tensor) -> Tensor:
    for layer in layers:
        x = BackwardInBackward.apply(x, layer)
    return x


RUNS: dict[str, Run] = {
    **{
        f"{build.__name__}-{'reentrant' if reentrant else 'not'}": build(reentrant)
        for build in (each_checkpointed, some_checkpointed, sequential, everything_in_one, two_branches)
        for reentrant in (True, False)
    },
    **{f"nested-{outer}-{inner}": nested(outer, inner) for outer in (True, False) for inner in (True, False)},
    "custom_function": custom_function,
}
BY_RUN = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
BY_LOOP = pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
BY_CAP = pytest.mark.parametrize("cap", [0, 1.0], ids=["alone", "in runs"])

Pair = list[tuple[nn.ModuleList, Any]]


def pair(optimizer_class: type[Optimizer], lr: float = 0.05, **options: Any) -> Pair:
    plain = blocks()
    fused = copy.deepcopy(plain)
    return [
        (plain, optimizer_class(plain.parameters(), lr=lr)),
        (fused, BackwardFusedOptimizer(optimizer_class, fused.parameters(), lr=lr, **options)),
    ]


def loss_of(layers: nn.ModuleList, run: Run, seed: int, input_requires_grad: bool = True) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(3, 6, requires_grad=input_requires_grad)
    return run(list(layers), x).square().sum()


def iterate(twins: Pair, run: Run, seed: int, calls_step: bool) -> None:
    for layers, optimizer in twins:
        loss_of(layers, run, seed).backward()
        if calls_step or optimizer is twins[0][1]:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("optimizer_class", "cap"),
    [(torch.optim.AdamW, 1.0), (Counting, 0), (Counting, 1.0)],
    ids=["direct", "alone", "in runs"],
)
@BY_LOOP
@BY_RUN
def test_exact_and_one_round_per_outermost_backward(
    optimizer_class: type[Optimizer], run: Run, calls_step: bool, cap: float
) -> None:
    twins = pair(optimizer_class, bucket_cap_mb=cap)
    for seed in range(3):
        iterate(twins, run, seed, calls_step)
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")
        assert_no_gradients(twins[1][1])


def shared_weight(layers: list[Block], x: Tensor) -> Tensor:
    for layer in (layers[0], layers[1], layers[0]):
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def inside_and_outside(layers: list[Block], x: Tensor) -> Tensor:
    return layers[0](checkpoint(layers[0], layers[1](x), use_reentrant=True))


def in_both_depths(layers: list[Block], x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        return layers[0](checkpoint(layers[0], x, use_reentrant=True))

    return checkpoint(outer, x, use_reentrant=True)


@BY_CAP
@BY_LOOP
@pytest.mark.parametrize("run", [shared_weight, inside_and_outside, in_both_depths])
def test_a_weight_shared_between_reentrant_segments_is_refused(run: Run, calls_step: bool, cap: float) -> None:
    twins = pair(torch.optim.SGD, bucket_cap_mb=cap)
    if calls_step:
        iterate(twins, each_checkpointed(True), 0, True)
    with pytest.raises(RuntimeError, match="of group 0.*second gradient within one backward.*use_reentrant=False"):
        loss_of(twins[1][0], run, 1).backward()


@pytest.mark.parametrize("run", [shared_weight, inside_and_outside, in_both_depths])
def test_the_way_out_for_a_shared_weight_is_accumulation(run: Run) -> None:
    twins = pair(torch.optim.AdamW)
    for seed in range(3):
        for layers, optimizer in twins:
            loss = loss_of(layers, run, seed)
            if optimizer is twins[0][1]:
                loss.backward()
            else:
                with optimizer.accumulate():
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1])


@BY_LOOP
def test_the_way_out_for_a_shared_weight_is_the_other_kind(calls_step: bool) -> None:
    def run(layers: list[Block], x: Tensor) -> Tensor:
        for layer in (layers[0], layers[1], layers[0]):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    twins = pair(torch.optim.AdamW)
    for seed in range(3):
        iterate(twins, run, seed, calls_step)
        assert_twins(twins[0][1], twins[1][1])


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("backward fails here")


@BY_CAP
@BY_LOOP
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Counting])
def test_a_failing_backward_leaves_the_next_one_sound(
    optimizer_class: type[Optimizer], reentrant: bool, calls_step: bool, cap: float
) -> None:
    def run(layers: list[Block], x: Tensor) -> Tensor:
        def failing(x: Tensor) -> Tensor:
            return layers[1](Failing.apply(layers[0](x)))

        x = checkpoint(failing, x, use_reentrant=reentrant)
        return layers[3](checkpoint(layers[2], x, use_reentrant=reentrant))

    twins = pair(optimizer_class, strict=False, bucket_cap_mb=cap)
    iterate(twins, each_checkpointed(reentrant), 0, calls_step)
    with pytest.raises(ArithmeticError):
        loss_of(twins[1][0], run, 1).backward()
    twins[1][1].zero_grad()
    assert_no_gradients(twins[1][1])
    for source, target in zip(twins[1][0].parameters(), twins[0][0].parameters()):
        target.data.copy_(source.data)
    twins[0][1].load_state_dict(copy.deepcopy(twins[1][1].state_dict()))
    for seed in range(2, 5):
        iterate(twins, each_checkpointed(reentrant), seed, calls_step)
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")


@BY_CAP
@BY_LOOP
def test_a_tensor_hook_that_calls_backward_on_other_parameters(calls_step: bool, cap: float) -> None:
    twins = pair(Counting, bucket_cap_mb=cap)
    for seed in range(4):
        for layers, optimizer in twins:
            torch.manual_seed(seed)
            hidden = layers[0](torch.randn(3, 6))
            extra = layers[3](torch.randn(3, 6)).sum()
            hidden.register_hook(lambda grad, extra=extra: extra.backward())
            layers[1](hidden).square().sum().backward()
            if calls_step or optimizer is twins[0][1]:
                optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")


@BY_LOOP
def test_a_tensor_hook_that_calls_backward_on_the_same_parameter_is_refused(calls_step: bool) -> None:
    twins = pair(torch.optim.SGD)
    if calls_step:
        iterate(twins, each_checkpointed(False), 0, True)
    layers = twins[1][0]
    hidden = layers[0](torch.randn(3, 6))
    extra = layers[1](torch.randn(3, 6)).sum()
    hidden.register_hook(lambda grad: extra.backward())
    with pytest.raises(RuntimeError, match="second gradient within one backward"):
        layers[1](hidden).square().sum().backward()


class WithWeightsAsInputs(torch.autograd.Function):
    """Takes the weights as inputs, to be part of the graph, and says that they get nothing from here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Block, *weights: Tensor) -> Tensor:
        return BackwardInBackward.forward(ctx, x, layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (*BackwardInBackward.backward(ctx, grad), None, None)


@BY_CAP
@BY_LOOP
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "accumulated"])
def test_a_hook_called_without_a_gradient_is_no_second_gradient(
    accumulates: bool, calls_step: bool, cap: float
) -> None:
    def run(layers: list[Block], x: Tensor) -> Tensor:
        for layer in layers:
            x = WithWeightsAsInputs.apply(x, layer, *layer.parameters())
        return x

    twins = pair(Counting, bucket_cap_mb=cap)
    for seed in range(3):
        for layers, optimizer in twins:
            if accumulates and optimizer is twins[0][1]:
                loss_of(layers, run, 9 + seed).backward()
            elif accumulates:
                with optimizer.accumulate():
                    loss_of(layers, run, 9 + seed).backward()
            loss_of(layers, run, seed, input_requires_grad=bool(seed % 2)).backward()
            if calls_step or optimizer is twins[0][1]:
                optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")
        assert_no_gradients(twins[1][1])


@BY_LOOP
def test_a_frozen_outside_leaves_no_trace_in_the_outer_pass(calls_step: bool) -> None:
    """Only the checkpointed segments hold parameters: the outer pass never reaches one of the optimizer."""
    twins = pair(Counting)
    for seed in range(3):
        for layers, optimizer in twins:
            torch.manual_seed(seed)
            x = torch.randn(3, 6, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x * 2, use_reentrant=True) + 1
            x.square().sum().backward()
            if calls_step or optimizer is twins[0][1]:
                optimizer.step()
            optimizer.zero_grad()
        assert twins[1][1].param_groups[0]["k"] == seed + 1
        assert_twins(twins[0][1], twins[1][1])


@BY_LOOP
@pytest.mark.parametrize("reentrant", [True, False])
def test_accumulation_over_checkpointed_micro_batches(reentrant: bool, calls_step: bool) -> None:
    twins = pair(Counting)
    run = each_checkpointed(reentrant)
    for seed in range(3):
        for layers, optimizer in twins:
            if optimizer is twins[0][1]:
                loss_of(layers, run, 2 * seed).backward()
            else:
                with optimizer.accumulate():
                    loss_of(layers, run, 2 * seed).backward()
            loss_of(layers, run, 2 * seed + 1).backward()
            if calls_step or optimizer is twins[0][1]:
                optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1])


@BY_CAP
def test_a_tensor_hook_of_a_foreign_graph_may_hold_the_only_backward(cap: float) -> None:
    twins = pair(Counting, bucket_cap_mb=cap)
    for seed in range(4):
        for layers, optimizer in twins:
            inner = loss_of(layers, everything_in_one(False), seed)
            x = torch.ones(3, requires_grad=True)
            x.register_hook(lambda grad, inner=inner: inner.backward())
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")
