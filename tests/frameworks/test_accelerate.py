"""Accelerate: the same program with the ordinary and with the fused optimizer ends in the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from accelerate import Accelerator
from accelerate_program import prepared, train, train_on_rank, train_sharded_on_rank
from distributed.world import World
from ranks import assert_same_ranks, forget_accelerators
from tiny_gpt2 import (
    MakeOptimizer,
    Outcome,
    assert_same_run,
    equal_weights,
    fused_adamw,
    plain_adamw,
    sentences,
    tiny_gpt2,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau
from twins import assert_twins

from fused_optim import BackwardFusedOptimizer

CLIP = 0.5


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    forget_accelerators()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [1, 3])
def test_prepare_and_accumulate(steps: int, mixed_precision: str) -> None:
    """Three steps of ten batches: the last window of the epoch is shorter."""
    options = {"gradient_accumulation_steps": steps, "mixed_precision": mixed_precision, "groups": steps > 1}
    plain = train(plain_adamw, 2, **options)
    fused = train(fused_adamw, 2, **options)
    assert_same_run(plain, fused)
    assert len(set(fused.rates)) == len(fused.rates)


def test_an_optimizer_prepared_before_its_hyperparameters_are_edited() -> None:
    """Scripts edit `optimizer.param_groups` of the wrapper, and add groups to it."""

    def run(make: MakeOptimizer) -> Outcome:
        accelerator, opt, model, optimizer, loader, _ = prepared(make)
        late = torch.nn.Parameter(torch.ones(8))
        optimizer.add_param_group({"params": [late], "lr": 0.3})
        outcome = Outcome(model, opt)
        torch.manual_seed(1)
        for batch in loader:
            optimizer.param_groups[0]["lr"] *= 0.9
            loss = model(**batch).loss + (late * batch["input_ids"]).sum()
            accelerator.backward(loss)
            outcome.note()
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(late, torch.ones(8))
        return outcome

    assert_same_run(run(plain_adamw), run(fused_adamw))


def test_manual_no_sync_accumulation() -> None:
    def run(make: MakeOptimizer) -> Outcome:
        accelerator, opt, model, optimizer, loader, _ = prepared(make)
        outcome = Outcome(model, opt)
        torch.manual_seed(1)
        for index, batch in enumerate(loader):
            last = index % 2 == 1
            accelerator.gradient_state._set_sync_gradients(last)
            with accelerator.no_sync(model):
                accelerator.backward(model(**batch).loss)
            if last:
                outcome.note()
                optimizer.step()
                optimizer.zero_grad()
        return outcome

    assert_same_run(run(plain_adamw), run(fused_adamw))


def test_unannounced_accumulation_is_refused() -> None:
    """Without accumulate_when= each micro-batch would become a step of its own."""

    def unannounced(params: Any, **kwargs: Any) -> BackwardFusedOptimizer:
        del kwargs["accumulate_when"]
        return BackwardFusedOptimizer(torch.optim.AdamW, params, **kwargs)

    with pytest.raises(RuntimeError, match="second gradient before opt.step.*accumulate_when="):
        train(unannounced, gradient_accumulation_steps=2)


def test_plateau_scheduler_follows_the_metric() -> None:
    def run(make: MakeOptimizer) -> Outcome:
        accelerator, opt, model, optimizer, loader, _ = prepared(make)
        scheduler = accelerator.prepare(ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.1))
        outcome = Outcome(model, opt)
        torch.manual_seed(1)
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            outcome.note()
            optimizer.step()
            scheduler.step(loss.item())
            optimizer.zero_grad()
        return outcome

    plain, fused = run(plain_adamw), run(fused_adamw)
    assert_same_run(plain, fused)
    assert len(set(fused.rates)) > 2


@pytest.mark.parametrize("resumed_by", [plain_adamw, fused_adamw])
@pytest.mark.parametrize("saved_by", [plain_adamw, fused_adamw])
def test_save_state_and_load_state(saved_by: MakeOptimizer, resumed_by: MakeOptimizer, tmp_path: Path) -> None:
    """A run that is saved in the middle and resumed, by whichever optimizer, is the run that was not."""

    def run(make: MakeOptimizer, start: int, stop: int) -> Outcome:
        accelerator, opt, model, optimizer, loader, scheduler = prepared(make)
        outcome = Outcome(model, opt)
        if start:
            accelerator.load_state(str(tmp_path))
            loader = accelerator.skip_first_batches(loader, start)
        for index, batch in enumerate(loader, start):
            if index == stop:
                break
            # A new loader draws a seed when it starts, so that a resumed run has other dropout by itself.
            torch.manual_seed(index)
            accelerator.backward(model(**batch).loss)
            outcome.note()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not start:
            accelerator.save_state(str(tmp_path))
        return outcome

    run(saved_by, 0, 4)
    resumed = run(resumed_by, 4, 10)
    whole = run(plain_adamw, 0, 10)
    assert_twins(whole.optimizer, resumed.optimizer)
    assert resumed.rates == whole.rates[4:]
    assert equal_weights(whole.model, resumed.model)
    assert resumed.held == [resumed_by is plain_adamw] * 6


def clipped_by_accelerate(steps: int, clip: float | None = CLIP) -> Outcome:
    accelerator, opt, model, optimizer, loader, _ = prepared(plain_adamw, gradient_accumulation_steps=steps)
    run = Outcome(model, opt)
    torch.manual_seed(1)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                run.note()
                if clip is not None:
                    run.losses.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
    return run


@pytest.mark.parametrize("steps", [1, 3])
def test_clipping_as_documented(steps: int) -> None:
    """The fused optimizer clips by the loss that ``accelerator.backward`` is going to walk."""
    accelerator, opt, model, optimizer, loader, _ = prepared(fused_adamw, gradient_accumulation_steps=steps)
    run = Outcome(model, opt)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                if accelerator.sync_gradients:
                    norm = opt.clip_grad_norm_(loss / accelerator.gradient_accumulation_steps, max_norm=CLIP)
                    run.losses.append(norm.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.note()
                optimizer.step()
                optimizer.zero_grad()
    plain = clipped_by_accelerate(steps)
    assert_same_run(plain, run)
    assert max(plain.losses) > CLIP
    assert not equal_weights(run.model, clipped_by_accelerate(steps, clip=None).model)


def clip_too_late() -> torch.nn.Module:
    accelerator, opt, model, optimizer, loader, _ = prepared(fused_adamw)
    torch.manual_seed(1)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def clip_too_late_in_a_closure() -> torch.nn.Module:
    accelerator, opt, model, optimizer, loader, _ = prepared(fused_adamw)
    torch.manual_seed(1)
    for batch in loader:

        def closure(batch: Any = batch) -> None:
            optimizer.zero_grad()
            accelerator.backward(model(**batch).loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)

        optimizer.step(closure)
    return accelerator.unwrap_model(model)


@pytest.mark.parametrize("program", [clip_too_late, clip_too_late_in_a_closure])
def test_clipping_after_backward_is_warned_of(program: Any) -> None:
    """It finds no gradients: the weights are those of a run without clipping, and another run than meant."""
    with pytest.warns(UserWarning, match="speaks of clip_grad_norm_") as caught:
        model = program()
    assert [warning.filename for warning in caught if "speaks of" in str(warning.message)] == [__file__]
    assert equal_weights(model, clipped_by_accelerate(1, clip=None).model)
    assert not equal_weights(model, clipped_by_accelerate(1).model)


def test_loss_scaling() -> None:
    """What ``mixed_precision="fp16"`` sets up on an accelerator, with a scaler that works on a CPU."""

    def run(make: MakeOptimizer) -> Outcome:
        forget_accelerators()
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        model = tiny_gpt2()
        opt = make(model.parameters(), lr=1e-2, grad_scaler=accelerator.scaler)
        model, optimizer = accelerator.prepare(model, opt)
        outcome = Outcome(model, opt)
        torch.manual_seed(1)
        for row in sentences(8):
            loss = model(**{key: value[None] for key, value in row.items()}).loss
            accelerator.backward(loss)
            outcome.note()
            optimizer.step()
            optimizer.zero_grad()
            assert not optimizer.step_was_skipped
            outcome.losses.append(accelerator.scaler.get_scale())
        return outcome

    plain, fused = run(plain_adamw), run(fused_adamw)
    assert_same_run(plain, fused)
    assert fused.losses[-1] > 2**10


def test_schedule_free_modes_reach_the_optimizer_through_the_wrapper() -> None:
    """The wrapper calls ``train()`` and ``eval()`` of the optimizer, which swap the weights."""

    def run(make: MakeOptimizer) -> list[Outcome]:
        accelerator, opt, model, optimizer, loader, _ = prepared(make)
        outcomes = []
        torch.manual_seed(1)
        for batch in loader:
            optimizer.train()
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
            outcomes.append(Outcome(model, opt, [model(**batch).loss.item()]))
        return outcomes

    def plain_schedule_free(params: Any, lr: float, accumulate_when: Any) -> Any:
        return schedulefree.AdamWScheduleFree(params, lr=lr)

    def fused_schedule_free(params: Any, **kwargs: Any) -> Any:
        return BackwardFusedOptimizer(schedulefree.AdamWScheduleFree, params, **kwargs)

    plain, fused = run(plain_schedule_free), run(fused_schedule_free)
    assert [outcome.losses for outcome in plain] == [outcome.losses for outcome in fused]
    assert_twins(plain[-1].optimizer, fused[-1].optimizer)


@pytest.mark.parametrize("steps", [1, 2])
def test_two_processes(world: World, steps: int) -> None:
    """``prepare`` wraps the model in DistributedDataParallel after the optimizer was built."""
    plain = world.run(train_on_rank, plain_adamw, steps, seconds=240)
    fused = world.run(train_on_rank, fused_adamw, steps, seconds=240)
    assert_same_ranks(plain, fused)
    assert not any(fused[0]["held"] + fused[1]["held"])
    assert fused[0]["losses"] != fused[1]["losses"]


def test_two_processes_sharded(world: World) -> None:
    """``prepare`` shards the model after the optimizer was built, and puts the new parameters into its groups.

    No hook is on them yet in the first backward pass, so that ``step()`` applies its gradients.
    """
    plain = world.run(train_sharded_on_rank, plain_adamw, seconds=240)
    fused = world.run(train_sharded_on_rank, fused_adamw, seconds=240)
    assert_same_ranks(plain, fused)
    assert [rank["held"] for rank in fused] == [[True] + 5 * [False]] * 2
