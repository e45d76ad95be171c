"""torch.compile around the model, around a whole step of training, around opt.step(), and compiled autograd."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from twins import Counting, assert_no_gradients, assert_twins

from fused_optim import BackwardFusedOptimizer

BACKENDS = ["eager", "aot_eager"]
NEW = torch.__version__ >= "2.6"


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.tied = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.tied
        for block in self.blocks:
            x = block(x)
        return x @ self.tied.t()


Pair = list[tuple[Net, Any]]


def pair(optimizer_class: type[Optimizer] = torch.optim.AdamW, lr: float = 0.05) -> Pair:
    plain = Net()
    fused = copy.deepcopy(plain)
    return [
        (plain, optimizer_class(plain.parameters(), lr=lr)),
        (fused, BackwardFusedOptimizer(optimizer_class, fused.parameters(), lr=lr)),
    ]


def inputs(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def whole(net: Net, backend: str) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, backend=backend, fullgraph=True)


def block_by_block(net: Net, backend: str) -> Callable[[Tensor], Tensor]:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, backend=backend)
    return net


def train(twins: Pair, forwards: list[Any], calls_step: bool = True) -> None:
    for seed in range(4):
        for (_, optimizer), forward in zip(twins, forwards):
            forward(inputs(seed)).square().mean().backward()
            if calls_step or optimizer is twins[0][1]:
                optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")
        assert_no_gradients(twins[1][1])


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Counting])
@pytest.mark.parametrize("calls_step", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("wrap", [whole, block_by_block])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_is_exact(backend: str, wrap: Any, calls_step: bool, optimizer_class: type[Optimizer]) -> None:
    twins = pair(optimizer_class)
    train(twins, [wrap(net, backend) for net, _ in twins], calls_step)


@pytest.mark.skipif(shutil.which("g++") is None or not NEW, reason="no C++ compiler, or a torch too old for it")
def test_a_model_compiled_by_inductor_is_exact() -> None:
    twins = pair()
    train(twins, [torch.compile(net) for net, _ in twins])


@pytest.fixture
def graphs_may_be_walked_twice() -> Iterator[None]:
    """Compiled graphs need a setting for that, and torch's own error says so."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False) if NEW else nullcontext():
        yield


@pytest.mark.usefixtures("graphs_may_be_walked_twice")
def test_clipping_a_compiled_model_is_exact() -> None:
    twins = pair()
    forwards = [torch.compile(net, backend="aot_eager") for net, _ in twins]
    for seed in range(3):
        norms = []
        for (net, optimizer), forward in zip(twins, forwards):
            loss = forward(inputs(seed)).square().mean()
            if optimizer is twins[1][1]:
                norms.append(optimizer.clip_grad_norm_(loss, 0.1))
            loss.backward()
            if optimizer is twins[0][1]:
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*norms)
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")


def training_step(net: Net, optimizer: Any) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        net(x).square().mean().backward()

    return run


def exact_or_refused(twins: Pair, runs: list[Any]) -> None:
    """Every iteration is exact, or the first one that is not exact raises."""
    for seed in range(3):
        for (_, optimizer), run in zip(twins, runs):
            run(inputs(seed))
            optimizer.step()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Counting])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_with_backward_is_exact(backend: str, optimizer_class: type[Optimizer]) -> None:
    twins = pair(optimizer_class)
    exact_or_refused(twins, [torch.compile(training_step(*twin), backend=backend) for twin in twins])


OLD_DYNAMO = "dynamo of old torch sets capturable=True in the groups of every optimizer that it meets"


@pytest.mark.skipif(not NEW, reason=OLD_DYNAMO)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_iteration_is_exact(backend: str) -> None:
    twins = pair()

    def iteration(net: Net, optimizer: Any) -> Callable[[Tensor], None]:
        def run(x: Tensor) -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        return run

    runs = [iteration(*twins[0]), torch.compile(iteration(*twins[1]), backend=backend)]
    for seed in range(3):
        for run in runs:
            run(inputs(seed))
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")


@pytest.mark.skipif(not NEW, reason=OLD_DYNAMO)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_is_exact(backend: str) -> None:
    twins = pair()
    compiled = torch.compile(twins[1][1].step, backend=backend)
    for seed in range(4):
        for net, optimizer in twins:
            loss = net(inputs(seed)).square().mean()
            if seed % 2 and optimizer is twins[1][1]:
                with optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
            (compiled if optimizer is twins[1][1] else optimizer.step)()
            optimizer.zero_grad()
        assert_twins(twins[0][1], twins[1][1], f"iteration {seed}")


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Counting])
def test_compiled_autograd_is_exact_or_refused(optimizer_class: type[Optimizer]) -> None:
    autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    if not hasattr(autograd, "_enable"):
        pytest.skip("this torch enables it otherwise")
    twins = pair(optimizer_class)

    def compiled(net: Net) -> Callable[[Tensor], None]:
        def run(x: Tensor) -> None:
            loss = net(x).square().mean()
            with autograd._enable(torch.compile(backend="eager")):
                loss.backward()

        return run

    def plain(net: Net) -> Callable[[Tensor], None]:
        return lambda x: net(x).square().mean().backward()

    try:
        exact_or_refused(twins, [plain(twins[0][0]), compiled(twins[1][0])])
    except RuntimeError as error:
        assert "compiled autograd" in str(error)  # noqa: PT017


@pytest.mark.skipif(not NEW, reason="this torch has no such setting")
def test_compiled_autograd_by_configuration_is_exact_or_refused() -> None:
    twins = pair()
    runs = [training_step(*twins[0]), torch.compile(training_step(*twins[1]), backend="eager")]
    with torch._dynamo.config.patch(compiled_autograd=True):
        try:
            exact_or_refused(twins, runs)
        except RuntimeError as error:
            assert "compiled autograd" in str(error)  # noqa: PT017
