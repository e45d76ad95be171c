"""The Transformers Trainer: the same script with the ordinary and the fused optimizer ends in the same bits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.world import World
from ranks import assert_same_ranks
from tiny_gpt2 import Outcome, assert_same_run, decay_groups, equal_weights, tiny_gpt2
from torch import Tensor
from trainer_program import (
    LEARNING_RATE,
    FusedAdamW,
    accumulating,
    build,
    outcome,
    run_by_class,
    run_by_optimizers,
    train_on_rank,
)
from transformers import Trainer, TrainerCallback, TrainingArguments
from twins import assert_twins

from fused_optim import BackwardFusedOptimizer

CLIP = 0.5
ADAMW = torch.optim.AdamW
Run = Callable[..., Outcome]


class FusedTrainer(Trainer):  # type: ignore[misc]
    """Whatever ``optim`` and ``weight_decay`` of the arguments ask for, fused."""

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            plain = super().create_optimizer(model)
            self.optimizer = BackwardFusedOptimizer.from_optimizer(
                plain, accumulate_when=accumulating, grad_scaler=self.accelerator.scaler
            )
        return self.optimizer


def run_by_subclass(trainer_class: type[Trainer], directory: Path, **given: Any) -> Outcome:
    trainer = build(directory, trainer_class, **given)
    trainer.train()
    return outcome(trainer)


@pytest.mark.parametrize(
    ("run", "plain", "fused"),
    [
        (run_by_optimizers, ADAMW, FusedAdamW),
        (run_by_class, ADAMW, FusedAdamW),
        (run_by_subclass, Trainer, FusedTrainer),
    ],
    ids=["optimizers", "optimizer_cls_and_kwargs", "create_optimizer"],
)
@pytest.mark.parametrize("steps", [1, 4])
def test_every_way_to_hand_over_an_optimizer(run: Run, plain: Any, fused: Any, steps: int, tmp_path: Path) -> None:
    """Six batches an epoch, so that the last window of four is short; evaluation in between."""
    given = {"gradient_accumulation_steps": steps, "eval_strategy": "steps", "eval_steps": 3}
    ordinary = run(plain, tmp_path / "plain", **given)
    ours = run(fused, tmp_path / "fused", **given)
    assert_same_run(ordinary, ours)
    assert len(ours.held) == 2 * -(-6 // steps)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "rmsprop"])
def test_every_optimizer_of_the_arguments(optim: str, tmp_path: Path) -> None:
    given = {"optim": optim, "max_steps": 4}
    plain = run_by_subclass(Trainer, tmp_path / "plain", **given)
    assert_same_run(plain, run_by_subclass(FusedTrainer, tmp_path / "fused", **given))


def test_a_partial_builds_the_optimizer_through_a_factory(tmp_path: Path) -> None:
    """What is no class is called without arguments first and has to return what builds the optimizer."""

    def fused(model: Any, **kwargs: Any) -> BackwardFusedOptimizer:
        return BackwardFusedOptimizer(ADAMW, decay_groups(model), **kwargs)

    def factory() -> Any:
        return fused

    given = {"gradient_accumulation_steps": 1, "max_steps": 4}
    trainer = build(tmp_path, optimizer_cls_and_kwargs=(factory, {"lr": LEARNING_RATE}), **given)
    trainer.train()
    model = tiny_gpt2()
    plain = build(tmp_path, model=model, optimizers=(ADAMW(decay_groups(model), lr=LEARNING_RATE), None), **given)
    plain.train()
    assert_same_run(outcome(plain), outcome(trainer))
    partial = functools.partial(BackwardFusedOptimizer, ADAMW)
    with pytest.raises(TypeError, match="params"):
        build(tmp_path, optimizer_cls_and_kwargs=(partial, {"lr": LEARNING_RATE})).train()


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool, precision: dict[str, Any], tmp_path: Path) -> None:
    given = {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        **precision,
    }
    plain = run_by_class(ADAMW, tmp_path / "plain", **given)
    fused = run_by_class(FusedAdamW, tmp_path / "fused", **given)
    assert_same_run(plain, fused)


def test_loss_scaling(tmp_path: Path) -> None:
    """What ``fp16=True`` sets up on a GPU, with a scaler that works on a CPU."""
    outcomes, scales = [], []
    for trainer_class in (Trainer, FusedTrainer):
        trainer = build(tmp_path, trainer_class, gradient_accumulation_steps=2)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        trainer.train()
        outcomes.append(outcome(trainer))
        scales.append(trainer.accelerator.scaler.get_scale())
    assert_same_run(*outcomes)
    assert scales[0] == scales[1] > 2.0**10


def test_a_weight_shared_by_reentrant_segments_is_refused(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.transformer.h[1].mlp = model.transformer.h[0].mlp
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run_by_optimizers(FusedAdamW, tmp_path, model=model, **given)


@pytest.mark.parametrize("resumed_by", [ADAMW, FusedAdamW], ids=["plain", "fused"])
@pytest.mark.parametrize("saved_by", [ADAMW, FusedAdamW], ids=["plain", "fused"])
def test_resume_from_checkpoint(saved_by: Any, resumed_by: Any, tmp_path: Path) -> None:
    """A run that is stopped and resumed, by whichever optimizer, is the run that was not."""
    saving = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = run_by_class(ADAMW, tmp_path / "whole", **saving)
    first = build(tmp_path / "parts", optimizer_cls_and_kwargs=(saved_by, _kwargs()), **saving)
    first.add_callback(_Stop(at=4))
    first.train()
    second = build(tmp_path / "parts", optimizer_cls_and_kwargs=(resumed_by, _kwargs()), **saving)
    second.train(resume_from_checkpoint=True)
    resumed = outcome(second)
    assert len(resumed.held) == 2
    assert any(resumed.held) == (resumed_by is ADAMW)
    assert resumed.rates == whole.rates[4:]
    assert_twins(whole.optimizer, resumed.optimizer)
    assert equal_weights(whole.model, resumed.model)


def _kwargs() -> dict[str, Any]:
    return {"lr": LEARNING_RATE, "betas": (0.9, 0.95)}


class _Stop(TrainerCallback):  # type: ignore[misc]
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.at


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """Checkpoints and evaluation every epoch; the loaded weights are not those of the last step."""
    given = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
        "num_train_epochs": 3,
    }
    plain = run_by_subclass(Trainer, tmp_path / "plain", **given)
    fused = run_by_subclass(FusedTrainer, tmp_path / "fused", **given)
    assert_same_run(plain, fused)
    last = run_by_subclass(FusedTrainer, tmp_path / "last", **{**given, "load_best_model_at_end": False})
    assert not equal_weights(last.model, fused.model)


class _SmallMemory(torch.nn.Module):
    """Out of memory in forward, or in the middle of backward, with more than two rows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.model = tiny_gpt2()
        self.where = where

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.model.transformer.wte(input_ids)
        if input_ids.shape[0] > 2:
            if self.where == "forward":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            hidden.register_hook(self._fail)
        return self.model(inputs_embeds=hidden, labels=labels)

    @staticmethod
    def _fail(grad: Tensor) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def run_with_small_memory(optimizer_class: Any, directory: Path, where: str) -> Outcome:
    model = _SmallMemory(where)
    opt = optimizer_class(model.parameters(), lr=LEARNING_RATE)
    trainer = build(
        directory,
        model=model,
        optimizers=(opt, None),
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
    )
    trainer.train()
    assert trainer._train_batch_size < 4
    return outcome(trainer)


def test_a_batch_size_that_does_not_fit_forward_is_retried(tmp_path: Path) -> None:
    plain = run_with_small_memory(ADAMW, tmp_path / "plain", "forward")
    fused = run_with_small_memory(FusedAdamW, tmp_path / "fused", "forward")
    assert_twins(plain.optimizer, fused.optimizer)
    assert plain.losses == fused.losses
    assert any(plain.held)
    assert not any(fused.held)


def test_a_batch_size_that_does_not_fit_backward_is_refused(tmp_path: Path) -> None:
    """Some parameters have been stepped by then: the retry is another run."""
    run_with_small_memory(ADAMW, tmp_path / "plain", "backward")
    with pytest.raises(RuntimeError, match="second gradient before opt.step"):
        run_with_small_memory(FusedAdamW, tmp_path / "fused", "backward")


class _RateEdit(TrainerCallback):  # type: ignore[misc]
    def edit(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.5 / (1 + state.global_step)


class _EditsAtStepBegin(_RateEdit):
    on_step_begin = _RateEdit.edit


class _EditsBeforeStep(_RateEdit):
    on_pre_optimizer_step = _RateEdit.edit


def run_with_callback(optimizer_class: Any, callback: Any, directory: Path) -> Outcome:
    given = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    trainer = build(directory, optimizer_cls_and_kwargs=(optimizer_class, {"lr": LEARNING_RATE}), **given)
    trainer.add_callback(callback)
    trainer.train()
    return outcome(trainer)


def test_callbacks_that_edit_the_learning_rate(tmp_path: Path) -> None:
    plain = run_with_callback(ADAMW, _EditsAtStepBegin(), tmp_path / "plain")
    fused = run_with_callback(FusedAdamW, _EditsAtStepBegin(), tmp_path / "fused")
    assert_same_run(plain, fused)
    assert len(set(fused.rates)) == len(fused.rates)
    with pytest.raises(RuntimeError, match="'lr' of parameter group 0 was changed between backward"):
        run_with_callback(FusedAdamW, _EditsBeforeStep(), tmp_path / "late")


def test_training_goes_on_in_a_second_call(tmp_path: Path) -> None:
    outcomes = []
    for optimizer_class in (ADAMW, FusedAdamW):
        trainer = build(tmp_path, optimizer_cls_and_kwargs=(optimizer_class, _kwargs()), num_train_epochs=1)
        trainer.train()
        trainer.train()
        outcomes.append(outcome(trainer))
    assert_same_run(*outcomes)
    assert len(outcomes[0].held) == 12


def test_a_second_trainer_of_a_model_needs_the_first_optimizer_unfused(tmp_path: Path) -> None:
    outcomes = []
    for optimizer_class in (ADAMW, FusedAdamW):
        first = build(tmp_path, optimizer_cls_and_kwargs=(optimizer_class, _kwargs()), max_steps=2)
        first.train()
        given = {"optimizer_cls_and_kwargs": (optimizer_class, _kwargs()), "max_steps": 3}
        if optimizer_class is FusedAdamW:
            with pytest.raises(ValueError, match="already stepped inside backward.*unfuse"):
                build(tmp_path, model=first.model, **given).train()
            first.optimizer.optimizer.unfuse()
        second = build(tmp_path, model=first.model, **given)
        second.train()
        outcomes.append(outcome(second))
    assert_same_run(*outcomes)


@pytest.mark.parametrize("steps", [1, 2])
def test_two_processes(world: World, steps: int) -> None:
    plain = world.run(train_on_rank, ADAMW, steps, seconds=240)
    fused = world.run(train_on_rank, FusedAdamW, steps, seconds=240)
    assert_same_ranks(plain, fused)
    assert not any(fused[0]["held"] + fused[1]["held"])


# Clipping


@pytest.mark.parametrize(
    ("run", "fused"),
    [
        (run_by_optimizers, FusedAdamW),
        (run_by_class, FusedAdamW),
        (run_by_subclass, FusedTrainer),
    ],
    ids=["optimizers", "optimizer_cls_and_kwargs", "create_optimizer"],
)
def test_the_default_max_grad_norm_is_refused_before_a_weight_moves(run: Run, fused: Any, tmp_path: Path) -> None:
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True).max_grad_norm == 1.0
    model = tiny_gpt2()
    with pytest.raises(RuntimeError, match=r"max_grad_norm=1\.0.*TrainingArguments\(max_grad_norm=0\.0\)"):
        run(fused, tmp_path, model=model, max_grad_norm=1.0)
    assert equal_weights(model, tiny_gpt2())


class _ClipsFromTheFirstStep(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.max_grad_norm = CLIP


def test_clipping_that_is_switched_on_later_is_refused_by_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"max_grad_norm=0\.5.*have been stepped with unclipped gradients"):
        run_with_callback(FusedAdamW, _ClipsFromTheFirstStep(), tmp_path)


def test_what_the_refusal_prevents(tmp_path: Path) -> None:
    """Told to go on, the run is the one without clipping, whatever ``max_grad_norm`` says."""
    loose = functools.partial(FusedAdamW, strict=False)
    clipped = run_by_optimizers(ADAMW, tmp_path / "plain", max_grad_norm=CLIP)
    unclipped = run_by_optimizers(ADAMW, tmp_path / "plain")
    with pytest.warns(UserWarning, match="max_grad_norm=0.5"):
        fused = run_by_optimizers(loose, tmp_path / "fused", max_grad_norm=CLIP)
    assert not equal_weights(fused.model, clipped.model)
    assert equal_weights(fused.model, unclipped.model)


@pytest.mark.parametrize("max_grad_norm", [0.0, float("inf")])
def test_no_clipping_raises_nothing(max_grad_norm: float, tmp_path: Path) -> None:
    given = {"max_grad_norm": max_grad_norm, "max_steps": 3}
    plain = run_by_class(ADAMW, tmp_path / "plain", **given)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*clip.*")
        assert_same_run(plain, run_by_class(FusedAdamW, tmp_path / "fused", **given))


def clip_before_backward(trainer: Trainer, max_norm: float) -> None:
    """Clips where the loss is final, and only what is about to be applied."""
    accelerator, backward = trainer.accelerator, trainer.accelerator.backward

    def clipped_backward(loss: Tensor, **kwargs: Any) -> None:
        if accelerator.sync_gradients:
            params = list(trainer.model.parameters())
            trainer.optimizer.optimizer.clip_grad_norm_(loss, max_norm, parameters=params)
        backward(loss, **kwargs)

    accelerator.backward = clipped_backward


class _TakesNoCount(torch.nn.Module):
    """A model that knows nothing of the number of tokens, whose loss the Trainer divides by the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_gpt2()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("model_class", [tiny_gpt2, _TakesNoCount])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"bf16": True, "gradient_accumulation_steps": 2},
    ],
    ids=["plain", "accumulated", "bf16"],
)
def test_clipping_as_documented(given: dict[str, Any], model_class: Any, tmp_path: Path) -> None:
    plain = run_by_subclass(Trainer, tmp_path / "plain", max_grad_norm=CLIP, model=model_class(), **given)
    trainer = build(tmp_path / "fused", FusedTrainer, model=model_class(), **given)
    clip_before_backward(trainer, CLIP)
    trainer.train()
    assert_same_run(plain, outcome(trainer))
    unclipped = run_by_subclass(Trainer, tmp_path / "other", model=model_class(), **given)
    assert not equal_weights(trainer.model, unclipped.model)


def test_clipping_with_reentrant_checkpointing(tmp_path: Path) -> None:
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    plain = run_by_subclass(Trainer, tmp_path / "plain", max_grad_norm=CLIP, **given)
    trainer = build(tmp_path / "fused", FusedTrainer, **given)
    clip_before_backward(trainer, CLIP)
    trainer.train()
    assert_same_run(plain, outcome(trainer))


def test_the_true_norm_can_be_logged(tmp_path: Path) -> None:
    """The Trainer logs a norm of zero, as it finds no gradients; ``track_grad_norm`` has the true one."""

    class NormLog(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, optimizer: Any, **kwargs: Any) -> None:
            if "grad_norm" in logs:
                state.log_history[-1]["grad_norm"] = optimizer.optimizer.grad_norm.item()

    def norms(optimizer_class: Any, *callbacks: TrainerCallback, **options: Any) -> list[float]:
        model = tiny_gpt2()
        opt = optimizer_class(model.parameters(), lr=LEARNING_RATE, **options)
        trainer = build(tmp_path, model=model, optimizers=(opt, None))
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]

    true = norms(ADAMW)
    assert norms(FusedAdamW, NormLog(), track_grad_norm=True) == true
    assert norms(FusedAdamW) == [0.0] * len(true)
    assert len(true) == 12
