"""A training script around the Transformers Trainer, with any optimizer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.state import GradientState
from ranks import forget_accelerators, join, sent
from tiny_gpt2 import Outcome, decay_groups, sentences, tiny_gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments

from fused_optim import BackwardFusedOptimizer

LEARNING_RATE = 1e-2


def accumulating() -> bool:
    """What the Trainer tells Accelerate before each backward pass."""
    return not GradientState().sync_gradients


class FusedAdamW(BackwardFusedOptimizer):
    """A class with the signature of ``torch.optim.AdamW``, for what builds the optimizer itself."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(torch.optim.AdamW, params, accumulate_when=accumulating, **kwargs)


class Notes(TrainerCallback):  # type: ignore[misc]
    """Notes what the callback hooks of a run see."""

    def __init__(self) -> None:
        self.held: list[bool] = []
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """After backward and clipping, right before ``optimizer.step()``."""
        self.held.append(any(param.grad is not None for param in model.parameters()))
        self.rates.append(optimizer.param_groups[0]["lr"])


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    """Six batches an epoch, two epochs, no clipping, and whatever else a test wants."""
    settings: dict[str, Any] = {
        "output_dir": str(directory),
        "use_cpu": True,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }
    return TrainingArguments(**{**settings, **changes})


def build(directory: Path, trainer_class: type[Trainer] = Trainer, model: Any = None, **given: Any) -> Trainer:
    """A trainer of a fresh model; what is no argument of the Trainer is one of TrainingArguments."""
    forget_accelerators()
    own = {key: given.pop(key) for key in ("optimizers", "optimizer_cls_and_kwargs") if key in given}
    return trainer_class(
        model=model or tiny_gpt2(),
        args=arguments(directory, **given),
        train_dataset=sentences(11),
        eval_dataset=sentences(4, seed=7),
        callbacks=[Notes()],
        **own,
    )


def outcome(trainer: Trainer) -> Outcome:
    """What the run of ``trainer`` left."""
    notes = next(item for item in trainer.callback_handler.callbacks if isinstance(item, Notes))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in logged]
    return Outcome(trainer.model, trainer.optimizer.optimizer, losses, notes.held, notes.rates)


def run_by_optimizers(optimizer_class: Any, directory: Path, **given: Any) -> Outcome:
    """``Trainer(optimizers=(opt, scheduler))``."""
    model = given.pop("model", None) or tiny_gpt2()
    opt = optimizer_class(decay_groups(model), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    trainer = build(directory, model=model, optimizers=(opt, scheduler), **given)
    trainer.train()
    return outcome(trainer)


def run_by_class(optimizer_class: Any, directory: Path, **given: Any) -> Outcome:
    """``Trainer(optimizer_cls_and_kwargs=(FusedAdamW, {...}))``."""
    kwargs = {"lr": LEARNING_RATE, "betas": (0.9, 0.95)}
    trainer = build(directory, optimizer_cls_and_kwargs=(optimizer_class, kwargs), **given)
    trainer.train()
    return outcome(trainer)


def train_on_rank(rank: int, optimizer_class: Any, steps: int) -> dict[str, Any]:
    """:func:`run_by_class` as one of two ranks."""
    join(rank)
    with tempfile.TemporaryDirectory() as directory:
        return sent(run_by_class(optimizer_class, Path(directory), gradient_accumulation_steps=steps))
