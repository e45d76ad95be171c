"""The optimizers people install, each against its plain self: same bits, or a warning, or an error."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim import BackwardFusedOptimizer

for _name in ("pytorch_optimizer", "schedulefree", "lion_pytorch", "prodigyopt", "torchao", "transformers"):
    pytest.importorskip(_name, reason=f"the published optimizers are in the test extra; {_name} is missing")

from published import PACKAGES, ROWS, Groups, Layout, Outcome, Row, exported_optimizers  # noqa: E402

ROUNDS = 10
LOAD_AT = 5
NEW_LR_AT = 7
IDLE = 8


class Net(nn.Module):
    """Several parameter shapes, one layer left out of a third of the rounds and one used only in those."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        width = 80 if layout in (Layout.WIDE, Layout.BFLOAT16) else 16
        bare = layout in (Layout.MATRICES, Layout.PAIRS)
        rank = 2 if layout is Layout.PAIRS else 16
        self.stem = nn.Linear(32, rank, bias=False) if bare else nn.Conv2d(2, 4, 3)
        self.up = nn.Linear(rank, width, bias=not bare)
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.often = nn.Linear(width, width, bias=False)
        self.seldom = nn.Linear(width, width, bias=not bare)
        self.down = nn.Linear(width, rank, bias=False)
        self.head = nn.Linear(rank, 3, bias=not bare)
        self.gain = None if bare else nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        x = x.flatten(1) if isinstance(self.stem, nn.Linear) else x
        x = torch.tanh(self.up(torch.tanh(self.stem(x)).flatten(1)))
        x = x + self.second(torch.tanh(self.first(x)))
        x = x + (self.seldom if turn % 3 == 1 else self.often)(x)
        x = self.head(self.down(x))
        return x if self.gain is None else x * self.gain


def make_net(row: Row) -> Net:
    torch.manual_seed(0)
    net = Net(row.layout)
    return net.bfloat16() if row.layout is Layout.BFLOAT16 else net


def make_groups(net: Net, row: Row) -> Groups:
    params = list(net.parameters())
    matrices = [p for p in params if p.ndim == 2]
    rest = [p for p in params if p.ndim != 2]
    if row.layout is Layout.MUON:
        hidden = [p for p in params if p.ndim >= 2]
        others = [p for p in params if p.ndim < 2]
        return [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False, "lr": 2e-3}]
    if row.layout is Layout.LOW_RANK:
        projected = {"rank": 2, "update_proj_gap": 3, "scale": 0.5, "projection_type": "std"}
        return [{"params": matrices, **projected}, {"params": rest, "lr": 2e-3}]
    if row.layout is Layout.SINGLE_GROUP:
        return [{"params": params}]
    if row.layout is Layout.PAIRS:
        return [{"params": params[:2]}, {"params": params[2:], "lr": 2e-3}]
    if row.layout is Layout.ONE_LR:
        return [{"params": params[::2]}, {"params": params[1::2]}]
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 2e-3}]


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)


def make_plain(row: Row, net: Net) -> Any:
    seed()
    groups = make_groups(net, row)
    optimizer = row.cls(groups, **row.kwargs) if row.build is None else row.build(net, groups)
    return in_train_mode(optimizer)


def make_fused(row: Row, net: Net, **options: Any) -> Any:
    seed()
    groups = make_groups(net, row)
    if row.build is None:
        fused = BackwardFusedOptimizer(row.cls, groups, **options, **row.kwargs)
    else:
        fused = BackwardFusedOptimizer.from_optimizer(row.build(net, groups), **options)
    return in_train_mode(fused)


def in_train_mode(optimizer: Any) -> Any:
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def backward(net: Net, turn: int) -> None:
    """Gradients of very different sizes, so that thresholds on norms are met from both sides."""
    generator = torch.Generator().manual_seed(turn)
    x = torch.randn(4, 2, 4, 4, generator=generator).to(next(net.parameters()).dtype)
    target = torch.randint(0, 3, (4,), generator=generator)
    scale = (1.0, 10.0, 0.1)[turn % 3]
    loss: Tensor = scale * nn.functional.cross_entropy(net(x, turn), target)
    torch.autograd.backward(loss)


def halve_lr(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"].mul_(0.5)
        elif group.get("lr") is not None:
            group["lr"] *= 0.5


def train_round(net: Net, optimizer: Any, turn: int) -> None:
    if turn == NEW_LR_AT:
        halve_lr(optimizer)
    if turn != IDLE:
        backward(net, turn)
    optimizer.step()
    optimizer.zero_grad()


def train_all(twins: list[tuple[Net, Any]], turns: range) -> None:
    """Train every twin, and compare it with the first, which is the plain one, after every round."""
    for turn in turns:
        told = [recorded(train_round, net, optimizer, turn)[1] for net, optimizer in twins]
        for twin, messages in zip(twins[1:], told[1:], strict=True):
            assert_same(snapshot(*twins[0]), snapshot(*twin), f"round {turn}")
            # A round without any gradient is the one that has a warning of its own.
            assert turn == IDLE or messages <= told[0]


def recorded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, set[str]]:
    """What the call returns, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(*args, **kwargs)
    # A scheduler that an optimizer keeps inside warns when it steps in a copy, whose `step` is not wrapped.
    messages = {str(warning.message) for warning in caught if "has been overridden after" not in str(warning.message)}
    return result, messages


def snapshot(net: Net, optimizer: Any) -> dict[str, Any]:
    """Everything a user can read, with parameters replaced by their position."""
    position = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}

    def by_position(value: Any) -> Any:
        if isinstance(value, Tensor) and value in position:
            return position[value]
        if isinstance(value, dict):
            return {by_position(k): by_position(v) for k, v in value.items()}
        return [by_position(v) for v in value] if type(value) is list else value

    # Reading `state[p]` creates an empty entry: whether there is one says nothing.
    told = {k: v for k, v in optimizer.state.items() if not (isinstance(v, dict) and not v)}
    return {
        "params": list(net.parameters()),
        "state": by_position(told),
        "groups": by_position(list(optimizer.param_groups)),
        "state_dict": optimizer.state_dict(),
    }


def assert_same(plain: Any, fused: Any, where: str) -> None:
    assert type(plain) is type(fused), f"{where}: {type(plain)} and {type(fused)}"
    if isinstance(plain, Tensor):
        assert same_tensor(plain, fused), f"{where}: {plain} and {fused}"
    elif isinstance(plain, dict):
        assert plain.keys() == fused.keys(), f"{where}: on one side only {plain.keys() ^ fused.keys()}"
        for key in plain:
            assert_same(plain[key], fused[key], f"{where}/{key}")
    elif isinstance(plain, (list, tuple, deque)):
        assert len(plain) == len(fused), f"{where}: {len(plain)} and {len(fused)} entries"
        for index, pair in enumerate(zip(plain, fused, strict=True)):
            assert_same(*pair, f"{where}/{index}")
    elif defines_equality(plain):
        assert plain == fused or (plain != plain and fused != fused), f"{where}: {plain} and {fused}"
    elif hasattr(plain, "__dict__") and not callable(plain):
        assert_same(vars(plain), vars(fused), where)


def defines_equality(value: Any) -> bool:
    return getattr(type(value), "__eq__") is not getattr(object, "__eq__")  # noqa: B009


def same_tensor(plain: Tensor, fused: Tensor) -> bool:
    if plain.shape != fused.shape or plain.dtype != fused.dtype:
        return False
    if hasattr(plain, "__tensor_flatten__"):
        return all(same_tensor(getattr(plain, n), getattr(fused, n)) for n in plain.__tensor_flatten__()[0])
    if plain.is_complex() or not plain.is_floating_point():
        return torch.equal(plain, fused)
    # Eight-bit floats have no `torch.equal`; every one of them is exact in float64.
    plain, fused = plain.detach().double(), fused.detach().double()
    return torch.equal(plain.isnan(), fused.isnan()) and torch.equal(plain.nan_to_num(), fused.nan_to_num())


def steps_uncompiled(row: Row) -> AbstractContextManager[Any]:
    """The low-bit optimizers compile a kernel per shape, for minutes, which says nothing about fusing."""
    return torch.compiler.set_stance("force_eager") if row.path.startswith("torchao.") else nullcontext()


def rows(outcome: Outcome) -> list[Any]:
    return [pytest.param(row, id=row.label) for row in ROWS if row.outcome is outcome]


@pytest.fixture(autouse=True)
def restored_random_state() -> Iterator[None]:
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)


@pytest.mark.parametrize("row", rows(Outcome.EXACT))
def test_exact(row: Row) -> None:
    nets = [make_net(row) for _ in range(3)]
    before = copy.deepcopy(list(nets[0].parameters()))
    with steps_uncompiled(row):
        plain, expected = recorded(make_plain, row, nets[0])
        apart, told = recorded(make_fused, row, nets[1], bucket_cap_mb=0.0)
        assert told <= expected
        twins = list(zip(nets, (plain, apart, make_fused(row, nets[2])), strict=True))
        train_all(twins, range(LOAD_AT))
        resumed = resume(row, nets[0], plain, apart)
        train_all(twins, range(LOAD_AT, ROUNDS))
        train_all(resumed, range(LOAD_AT, ROUNDS))
    assert any(not torch.equal(p, q) for p, q in zip(before, nets[0].parameters(), strict=True))


def resume(row: Row, net: Net, plain: Any, fused: Any) -> list[tuple[Net, Any]]:
    """Fresh twins in mid-training: each loads the checkpoint of the other kind; a third is taken over."""
    nets = [make_net(row) for _ in range(3)]
    loads_fused, taken_over = make_plain(row, nets[0]), make_plain(row, nets[2])
    loads_plain = make_fused(row, nets[1], bucket_cap_mb=0.0)
    for optimizer, source in ((loads_fused, fused), (loads_plain, plain), (taken_over, plain)):
        optimizer.load_state_dict(through_a_file(source.state_dict()))
    for twin in nets:
        twin.load_state_dict(net.state_dict())
    takes_over = BackwardFusedOptimizer.from_optimizer(taken_over, bucket_cap_mb=0.0)
    return list(zip(nets, (loads_fused, loads_plain, takes_over), strict=True))


def through_a_file(checkpoint: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("row", rows(Outcome.RANDOM))
def test_random(row: Row) -> None:
    net = make_net(row)
    before = copy.deepcopy(list(net.parameters()))
    with steps_uncompiled(row):
        fused, told = recorded(make_fused, row, net)
        for turn in range(IDLE):
            # Some draw for large parameters only, which nothing but a real step can show.
            told |= recorded(train_round, net, fused, turn)[1]
    assert [text for text in told if row.cls.__name__ in text and "random" in text]
    assert any(not torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
    assert all(bool(p.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize("row", rows(Outcome.REFUSED))
def test_refused(row: Row) -> None:
    make_plain(row, make_net(row))
    net = make_net(row)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=row.cls.__name__):
        make_fused(row, net)
    before = copy.deepcopy(list(net.parameters()))
    backward(net, 0)
    # Nothing of the refused optimizer may go on stepping these parameters.
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
    assert any(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("row", rows(Outcome.UNBUILT))
def test_unbuilt(row: Row) -> None:
    plain, fused = error_of(make_plain, row), error_of(make_fused, row)
    if plain is None and torch.cuda.is_available():
        pytest.skip(f"what keeps the plain class from being built is not so here: {row.reason}")
    assert plain is not None
    assert fused is not None
    assert isinstance(fused, (type(plain), TypeError))
    assert str(plain) == str(fused) or row.cls.__name__ in str(fused)


def error_of(make: Callable[[Row, Net], Any], row: Row) -> Exception | None:
    try:
        make(row, make_net(row))
    except Exception as error:
        return error
    return None


def test_every_row_that_is_not_exact_says_why() -> None:
    assert [row.label for row in ROWS if bool(row.reason) == (row.outcome is Outcome.EXACT)] == []


def test_labels_are_unique() -> None:
    labels = [(row.label, row.outcome) for row in ROWS]
    assert len(set(labels)) == len(labels)


def test_no_published_optimizer_is_left_out() -> None:
    exported = set().union(*(exported_optimizers(package) for package in PACKAGES))
    assert exported - {row.path for row in ROWS} == set()


def test_at_least_a_hundred_classes_are_exact() -> None:
    assert len({row.path for row in ROWS if row.outcome is Outcome.EXACT}) >= 100
