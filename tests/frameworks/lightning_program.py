"""A training script around the Lightning Trainer, with any optimizer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from ranks import join, sent
from tiny_gpt2 import MakeOptimizer, Outcome, sentences, tiny_gpt2
from torch import Tensor
from torch.utils.data import DataLoader

LEARNING_RATE = 1e-2


class Module(lightning.LightningModule):
    """What a user writes: automatic optimization, one optimizer, a schedule by step."""

    def __init__(self, make: MakeOptimizer, **options: Any) -> None:
        super().__init__()
        self.model = tiny_gpt2()
        self.make = make
        self.options = options
        self.batch_idx = 0
        self.run: Outcome | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        """The loss of one batch."""
        self.batch_idx = batch_idx
        loss = self.model(**batch).loss
        assert self.run is not None
        self.run.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the loss, so that schedulers and checkpoints can go by it."""
        self.log("val_loss", self.model(**batch).loss)

    def accumulating(self) -> bool:
        """Whether Lightning is going to wait for further batches before it steps."""
        window_ends = (self.batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        return not (window_ends or self.trainer.is_last_batch)

    def configure_optimizers(self) -> Any:
        """One optimizer with a schedule by step."""
        opt = self.make(self.parameters(), lr=LEARNING_RATE, accumulate_when=self.accumulating, **self.options)
        self.run = Outcome(self.model, opt)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """After backward, before clipping and ``step()``."""
        assert self.run is not None
        self.run.note()

    @property
    def outcome(self) -> Outcome:
        """What the run left."""
        assert self.run is not None
        return self.run


def trainer(directory: Path, **options: Any) -> lightning.Trainer:
    """A trainer that writes nothing but what a test asks for."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": str(directory),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return lightning.Trainer(**{**settings, **options})


def loader(rows: int = 11, seed: int = 0) -> DataLoader[Any]:
    """Six batches, the last of one row."""
    return DataLoader(sentences(rows, seed), batch_size=2)  # type: ignore[arg-type]


def fit(module: Module, directory: Path, ckpt_path: str | None = None, **options: Any) -> Outcome:
    """Trains ``module`` and returns what the run left."""
    torch.manual_seed(1)
    trainer(directory, **options).fit(module, loader(), loader(4, seed=7), ckpt_path=ckpt_path)
    return module.outcome


def fit_on_rank(rank: int, make: MakeOptimizer, batches: int) -> dict[str, Any]:
    """:func:`fit` as one of two ranks."""
    join(rank)
    with tempfile.TemporaryDirectory() as directory:
        options = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": batches}
        return sent(fit(Module(make), Path(directory), **options))
