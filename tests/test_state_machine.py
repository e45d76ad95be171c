"""Random training loops over a plain and a fused twin: whatever a loop does, the bits are the same."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from programs import CountsInTheGroup, Make, fused
from torch.optim import lr_scheduler
from twins import SHAPES, assert_twins, loss_of, make_params

from fused_optim import BackwardFusedOptimizer

MAKES: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.05, foreach=True),
    "AdamW tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.05), foreach=False),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.05),
    "RAdam": partial(torch.optim.RAdam, lr=0.05),
    "Adamax": partial(torch.optim.Adamax, lr=0.05, weight_decay=0.01),
    "Rprop": partial(torch.optim.Rprop, lr=0.05),
    "ASGD": partial(torch.optim.ASGD, lr=0.05, foreach=False),
    "counter in the group": partial(CountsInTheGroup, lr=0.05),
}
"""Every kind of state: none, per parameter, and shared by a group."""
SUBSETS = st.sets(st.integers(0, len(SHAPES) - 1), min_size=1).map(sorted)
"""Which parameters a loss uses, such as [0, 2]."""
INDICES = st.integers(0, len(SHAPES) - 1)
RATES = st.sampled_from([0.5, 0.1, 0.01])
SCHEDULES = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.3, total_iters=4),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
}


class Loops(RuleBasedStateMachine):
    """Each rule does one thing that a training loop does, to both twins; a round is a whole iteration."""

    checkpoints = Bundle("checkpoints")

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.schedulers: list[Any] = []
        # One subset of parameters may be added late.
        self.in_optimizer = list(range(len(SHAPES)))

    @initialize(name=st.sampled_from(sorted(MAKES)), late=st.booleans(), cap=st.sampled_from([0, 1.0]))
    def build(self, name: str, late: bool, cap: float) -> None:
        self.make, self.cap = MAKES[name], cap
        self.models = [make_params(), make_params()]
        # The ordinary Adagrad of old torch has no state for groups that are added later.
        if late and not (name == "Adagrad" and torch.__version__ < "2.5"):
            self.in_optimizer = [0, 1, 2]
        self._build_optimizers()

    def _build_optimizers(self) -> None:
        groups = [[params[index] for index in self.in_optimizer] for params in self.models]
        make = copy.deepcopy(self.make)
        self.plain: Any = make(self._grouped(groups[0]))
        self.ours: Any = fused(copy.deepcopy(self.make), bucket_cap_mb=self.cap)(self._grouped(groups[1]))

    def _grouped(self, params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:3]}]
        return groups + [{"params": [param], "lr": 0.2} for param in params[3:]]

    def _pairs(self) -> list[tuple[list[torch.nn.Parameter], Any]]:
        return list(zip(self.models, (self.plain, self.ours)))

    def _next_seed(self) -> int:
        self.seed += 1
        return self.seed

    def _usable(self, used: list[int]) -> list[int]:
        used = [index for index in used if index in self.in_optimizer and self.models[0][index].requires_grad]
        assume(used)
        return used

    def _step(self, opt: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "opt.step\\(\\) ended a round")
            opt.step()

    # Iterations

    @rule(used=SUBSETS, to_none=st.booleans())
    def iterate(self, used: list[int], to_none: bool) -> None:
        seed, used = self._next_seed(), self._usable(used)
        for params, opt in self._pairs():
            opt.zero_grad(set_to_none=to_none)
            loss_of(params, used, seed).backward()
            self._step(opt)

    @rule(used=SUBSETS)
    def iterate_without_zero_grad_after_it_was_called_last(self, used: list[int]) -> None:
        seed, used = self._next_seed(), self._usable(used)
        for params, opt in self._pairs():
            loss = loss_of(params, used, seed)
            opt.zero_grad()
            loss.backward()
            self._step(opt)
            opt.zero_grad()

    @rule(used=st.lists(SUBSETS, min_size=1, max_size=3), last_announced=st.booleans())
    def accumulate(self, used: list[list[int]], last_announced: bool) -> None:
        seed, used = self._next_seed(), [self._usable(each) for each in used]
        for params, opt in self._pairs():
            opt.zero_grad()
            for number, each in enumerate(used):
                announced = number < len(used) - 1 or last_announced
                with opt.accumulate() if opt is self.ours and announced else contextlib.nullcontext():
                    loss_of(params, each, seed + 100 * number).backward()
            self._step(opt)

    @rule(used=SUBSETS)
    def step_a_closure(self, used: list[int]) -> None:
        seed, used = self._next_seed(), self._usable(used)
        losses = []
        for params, opt in self._pairs():

            def closure(params: Any = params, opt: Any = opt) -> torch.Tensor:
                opt.zero_grad()
                loss = loss_of(params, used, seed)
                loss.backward()
                return loss

            losses.append(opt.step(closure))
        assert torch.equal(*losses)

    @rule(used=SUBSETS)
    def set_gradients_by_hand(self, used: list[int]) -> None:
        seed, used = self._next_seed(), self._usable(used)
        for params, opt in self._pairs():
            opt.zero_grad()
            for index in used:
                params[index].grad = torch.randn(params[index].shape, generator=torch.Generator().manual_seed(seed))
            self._step(opt)

    @rule(used=SUBSETS, by_hand=INDICES)
    def set_one_gradient_by_hand_and_the_rest_by_backward(self, used: list[int], by_hand: int) -> None:
        seed, used = self._next_seed(), self._usable(used)
        assume(by_hand in self.in_optimizer)
        for params, opt in self._pairs():
            opt.zero_grad()
            params[by_hand].grad = torch.full_like(params[by_hand], 0.3)
            loss_of(params, used, seed).backward()
            self._step(opt)

    @rule(
        used=SUBSETS,
        max_norm=st.sampled_from([0.1, 1.0, 1000.0]),
        norm_type=st.sampled_from([2.0, 1.0, float("inf")]),
    )
    def clip(self, used: list[int], max_norm: float, norm_type: float) -> None:
        seed, used = self._next_seed(), self._usable(used)
        self.plain.zero_grad()
        self.ours.zero_grad()
        loss_of(self.models[0], used, seed).backward()
        order = [param for group in self.plain.param_groups for param in group["params"]]
        expected = torch.nn.utils.clip_grad_norm_(order, max_norm, norm_type)
        self._step(self.plain)
        loss = loss_of(self.models[1], used, seed)
        if self.ours._engine.roster.hooked:
            norm = self.ours.clip_grad_norm_(loss, max_norm, norm_type)
            loss.backward()
        else:
            loss.backward()
            order = [param for group in self.ours.param_groups for param in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(order, max_norm, norm_type)
        self._step(self.ours)
        assert torch.equal(expected, norm)

    @rule()
    def step_without_gradients(self) -> None:
        for _, opt in self._pairs():
            opt.zero_grad()
            self._step(opt)

    # Between iterations

    @rule(rate=RATES, group=st.integers(0, 2))
    def change_lr(self, rate: float, group: int) -> None:
        for _, opt in self._pairs():
            chosen = opt.param_groups[min(group, len(opt.param_groups) - 1)]
            if isinstance(chosen["lr"], torch.Tensor):
                chosen["lr"].fill_(rate)
            else:
                chosen["lr"] = rate

    @precondition(lambda self: not self.schedulers)
    @rule(name=st.sampled_from(sorted(SCHEDULES)))
    def attach_scheduler(self, name: str) -> None:
        for _, opt in self._pairs():
            for group in opt.param_groups:
                group.pop("initial_lr", None)
        self.schedulers = [SCHEDULES[name](opt) for _, opt in self._pairs()]

    @precondition(lambda self: self.schedulers)
    @rule()
    def step_scheduler(self) -> None:
        with warnings.catch_warnings():
            # The order of calls is random here; test_schedulers.py is about the warning.
            warnings.simplefilter("ignore")
            for scheduler in self.schedulers:
                scheduler.step()

    @rule(index=INDICES)
    def freeze_or_unfreeze(self, index: int) -> None:
        for params, opt in self._pairs():
            opt.zero_grad()
            params[index].requires_grad_(not params[index].requires_grad)

    @precondition(lambda self: len(self.in_optimizer) < len(SHAPES))
    @rule(rate=RATES)
    def add_group(self, rate: float) -> None:
        self.in_optimizer = list(range(len(SHAPES)))
        self.schedulers = []
        for params, opt in self._pairs():
            opt.add_param_group({"params": params[3], "lr": rate})

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        for _, opt in self._pairs():
            opt.zero_grad(set_to_none=to_none)

    @rule()
    def unfuse_or_fuse(self) -> None:
        if self.ours._engine.roster.hooked:
            self.ours.unfuse()
        else:
            self.ours.fuse()

    @rule()
    def overwrite_weights(self) -> None:
        seed = self._next_seed()
        for params, _ in self._pairs():
            for param in params:
                param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))

    # Checkpoints and copies

    @rule(target=checkpoints)
    def save(self) -> tuple[int, list[Any]]:
        return len(self.in_optimizer), [stored(opt.state_dict()) for _, opt in self._pairs()]

    @rule(checkpoint=checkpoints, swap=st.booleans(), fresh=st.booleans())
    def load(self, checkpoint: tuple[int, list[Any]], swap: bool, fresh: bool) -> None:
        count, state_dicts = checkpoint
        assume(count == len(self.in_optimizer) and not self.schedulers)
        if fresh:
            self.ours.unfuse()
            self._rebuild(checkpoint)
        for (_, opt), state_dict in zip(self._pairs(), reversed(state_dicts) if swap else state_dicts):
            opt.zero_grad()
            opt.load_state_dict(copy.deepcopy(state_dict))

    def _rebuild(self, checkpoint: tuple[int, list[Any]]) -> None:
        sizes = [len(group["params"]) for group in checkpoint[1][0]["param_groups"]]
        assume(sizes == [2, 1, *([1] * (len(self.in_optimizer) - 3))])
        self._build_optimizers()

    @rule()
    def copy_everything(self) -> None:
        self.schedulers = []
        self.models[0], self.plain = copy.deepcopy((self.models[0], self.plain))
        self.models[1], self.ours = copy.deepcopy((self.models[1], self.ours))

    @rule()
    def take_over(self) -> None:
        """The plain twin's groups and state go on in a new fused optimizer over the fused twin's parameters."""
        ordinary = copy.deepcopy(self.make)(self._grouped([self.models[1][index] for index in self.in_optimizer]))
        ordinary.load_state_dict(copy.deepcopy(self.ours.state_dict()))
        self.ours.unfuse()
        self.schedulers = []
        self.ours.zero_grad()
        self.plain.zero_grad()
        self.ours = BackwardFusedOptimizer.from_optimizer(ordinary, bucket_cap_mb=self.cap)

    @invariant()
    def twins_are_equal(self) -> None:
        if hasattr(self, "ours"):
            assert_twins(self.plain, self.ours)


def stored(state_dict: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        return torch.load(buffer, weights_only=True)


TestLoops = Loops.TestCase
TestLoops.settings = settings(
    max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None
)
