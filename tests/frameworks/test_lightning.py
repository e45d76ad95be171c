"""Lightning: the same script with the ordinary and with the fused optimizer ends in the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from distributed.world import World
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning_program import LEARNING_RATE, Module, fit, fit_on_rank, loader, trainer
from ranks import assert_same_ranks
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
from torch import Tensor
from torch.utils.data import DataLoader
from twins import assert_twins

from fused_optim import BackwardFusedOptimizer

CLIP = 0.5
BOTH = pytest.mark.parametrize("make", [plain_adamw, fused_adamw], ids=["plain", "fused"])


def both(module_class: type[Module], directory: Path, **options: Any) -> tuple[Outcome, Outcome]:
    plain = fit(module_class(plain_adamw), directory / "plain", **options)
    fused = fit(module_class(fused_adamw), directory / "fused", **options)
    return plain, fused


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("batches", [1, 4])
def test_automatic_optimization(batches: int, precision: Any, tmp_path: Path) -> None:
    """Six batches an epoch, so that the last window of four is short; validation in between."""
    options = {"accumulate_grad_batches": batches, "precision": precision, "val_check_interval": 2}
    plain, fused = both(Module, tmp_path, **options)
    assert_same_run(plain, fused)
    assert len(fused.held) == 2 * -(-6 // batches)
    assert len(set(fused.rates)) == len(fused.rates)


def test_a_limited_epoch_ends_its_last_window(tmp_path: Path) -> None:
    assert_same_run(*both(Module, tmp_path, accumulate_grad_batches=3, limit_train_batches=5))


def test_unannounced_accumulation_is_refused(tmp_path: Path) -> None:
    def unannounced(params: Any, lr: float, accumulate_when: Any) -> BackwardFusedOptimizer:
        return BackwardFusedOptimizer(torch.optim.AdamW, params, lr=lr)

    with pytest.raises(RuntimeError, match="second gradient before opt.step.*accumulate_when="):
        fit(Module(unannounced), tmp_path, accumulate_grad_batches=2)


def test_loss_scaling(tmp_path: Path) -> None:
    """What ``precision="16-mixed"`` does on a GPU, with a scaler that works on a CPU."""
    outcomes, scales = [], []
    for make in (plain_adamw, fused_adamw):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=3)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        outcomes.append(fit(Module(make, grad_scaler=scaler), tmp_path, plugins=[precision]))
        scales.append(scaler.get_scale())
    assert_same_run(*outcomes)
    assert scales[0] == scales[1] > 2.0**7


@pytest.mark.parametrize(
    "averaging",
    [
        lambda: EMAWeightAveraging(decay=0.9),
        lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    ],
    ids=["ema", "swa"],
)
def test_callbacks_that_touch_the_optimizer(averaging: Any, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [
            GradientAccumulationScheduler({0: 1, 1: 2}),
            LearningRateMonitor("step"),
            averaging(),
        ]

    outcomes = []
    for make in (plain_adamw, fused_adamw):
        logger = CSVLogger(tmp_path / make.__name__)
        outcomes.append(fit(Module(make), tmp_path, callbacks=callbacks(), max_epochs=4, logger=logger))
    assert_same_run(*outcomes)
    assert len(outcomes[0].held) == 6 + 3 * 3


class _ByPlateau(Module):
    def configure_optimizers(self) -> Any:
        opt = super().configure_optimizers()["optimizer"]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_plateau_scheduler(tmp_path: Path) -> None:
    plain, fused = both(_ByPlateau, tmp_path, max_epochs=4)
    assert_same_run(plain, fused)
    assert len(set(fused.rates)) > 1


class _Hooks(Module):
    """Warm-up in ``optimizer_step``, gradients zeroed in place, and a batch that is skipped."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + self.trainer.global_step)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.batch_idx != 2:
            super().on_before_optimizer_step(optimizer)


@pytest.mark.filterwarnings("ignore:opt.step\\(\\) ended a round")
def test_overridden_hooks(tmp_path: Path) -> None:
    assert_same_run(*both(_Hooks, tmp_path))


class _SkipsSteps(Module):
    """Runs the closure of every other batch by itself, whose gradients are then thrown away."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def test_a_closure_without_a_step_is_refused(tmp_path: Path) -> None:
    fit(_SkipsSteps(plain_adamw), tmp_path)
    with pytest.raises(RuntimeError, match="zero_grad\\(\\) would discard gradients"):
        fit(_SkipsSteps(fused_adamw), tmp_path)


class _Unfreezes(Module):
    """Trains the head first and adds the rest to the optimizer later, through Lightning's wrapper of it."""

    def configure_optimizers(self) -> Any:
        head = self.model.transformer.ln_f.parameters()
        opt = self.make(head, lr=LEARNING_RATE, accumulate_when=self.accumulating)
        self.run = Outcome(self.model, opt)
        return opt

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.model.transformer.h.parameters()), "lr": 1e-3})


def test_groups_added_through_the_wrapper(tmp_path: Path) -> None:
    plain, fused = both(_Unfreezes, tmp_path)
    assert_twins(plain.optimizer, fused.optimizer)
    assert equal_weights(plain.model, fused.model)
    assert len(fused.optimizer.state) > 20


@pytest.mark.parametrize("resumed_by", [plain_adamw, fused_adamw])
@pytest.mark.parametrize("saved_by", [plain_adamw, fused_adamw])
def test_checkpoints(saved_by: MakeOptimizer, resumed_by: MakeOptimizer, tmp_path: Path) -> None:
    """A run that is stopped after an epoch and resumed, by whichever optimizer, is the run that was not."""

    class Seeded(Module):
        """Lightning's checkpoints hold no state of the random number generator."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.manual_seed(10 * self.current_epoch + batch_idx)

    whole = fit(Seeded(plain_adamw), tmp_path, accumulate_grad_batches=2)
    saver = ModelCheckpoint(dirpath=tmp_path, filename="first", every_n_epochs=1)
    options = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    fit(Seeded(saved_by), tmp_path, callbacks=[saver], max_epochs=1, **options)
    module = Seeded(resumed_by)
    resumed = fit(module, tmp_path, ckpt_path=str(tmp_path / "first.ckpt"), accumulate_grad_batches=2)
    assert resumed.rates == whole.rates[3:]
    assert resumed.losses == whole.losses[6:]
    assert_twins(whole.optimizer, resumed.optimizer)
    assert equal_weights(whole.model, resumed.model)
    assert resumed.held == [resumed_by is plain_adamw] * 3


class _Refits(Module):
    """Lightning builds a new optimizer for every ``fit`` and every trial of a tuner, with the old one alive."""

    def __init__(self, make: MakeOptimizer) -> None:
        super().__init__(make)
        self.batch_size = 2
        self.lr = LEARNING_RATE

    def configure_optimizers(self) -> Any:
        if self.run is not None and isinstance(self.run.optimizer, BackwardFusedOptimizer):
            self.run.optimizer.unfuse()
        opt = self.make(self.parameters(), lr=self.lr, accumulate_when=self.accumulating)
        self.run = Outcome(self.model, opt)
        return opt

    def train_dataloader(self) -> Any:
        return DataLoader(sentences(40), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return loader(4, seed=7)


def fit_once(module: _Refits, directory: Path) -> None:
    trainer(directory, max_epochs=1).fit(module)


def fit_after_lr_find(module: _Refits, directory: Path) -> None:
    fitter = trainer(directory, max_epochs=1)
    Tuner(fitter).lr_find(module, num_training=12, early_stop_threshold=None)
    fitter.fit(module)


def fit_after_scale_batch_size(module: _Refits, directory: Path) -> None:
    fitter = trainer(directory, max_epochs=1)
    Tuner(fitter).scale_batch_size(module, max_trials=2, steps_per_trial=2)
    fitter.fit(module)


@pytest.mark.parametrize("again", [fit_once, fit_after_lr_find, fit_after_scale_batch_size])
def test_a_module_is_fitted_again(again: Any, tmp_path: Path) -> None:
    outcomes = []
    for make in (plain_adamw, fused_adamw):
        module = _Refits(make)
        torch.manual_seed(1)
        again(module, tmp_path)
        again(module, tmp_path)
        outcomes.append(module.outcome)
    assert_same_run(*outcomes)


def test_a_module_is_not_fitted_again_while_its_first_optimizer_drives_it(tmp_path: Path) -> None:
    module = Module(fused_adamw)
    first = trainer(tmp_path, max_epochs=1)
    first.fit(module, loader())
    with pytest.raises(ValueError, match="already stepped inside backward.*unfuse"):
        first.fit(module, loader())


@pytest.mark.parametrize("batches", [1, 2])
def test_two_processes(world: World, batches: int) -> None:
    """Lightning wraps the model in DistributedDataParallel before the optimizer is built."""
    plain = world.run(fit_on_rank, plain_adamw, batches, seconds=240)
    fused = world.run(fit_on_rank, fused_adamw, batches, seconds=240)
    assert_same_ranks(plain, fused)
    assert not any(fused[0]["held"] + fused[1]["held"])
    assert fused[0]["losses"] != fused[1]["losses"]


# Clipping


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clip_val_is_refused_before_a_weight_moves(algorithm: str, tmp_path: Path) -> None:
    module = Module(fused_adamw)
    with pytest.raises(RuntimeError, match=r"gradient_clip_val=0\.5.*backward\(loss\)"):
        fit(module, tmp_path, gradient_clip_val=CLIP, gradient_clip_algorithm=algorithm)
    assert equal_weights(module.model, tiny_gpt2())


def test_what_the_refusal_prevents(tmp_path: Path) -> None:
    """Told to go on, the run is the one without clipping, whatever ``gradient_clip_val`` says."""
    clipped = fit(Module(plain_adamw), tmp_path, gradient_clip_val=CLIP)
    unclipped = fit(Module(plain_adamw), tmp_path)
    with pytest.warns(UserWarning, match="gradient_clip_val=0.5"):
        fused = fit(Module(fused_adamw, strict=False), tmp_path, gradient_clip_val=CLIP)
    assert not equal_weights(fused.model, clipped.model)
    assert equal_weights(fused.model, unclipped.model)


class _Clips(Module):
    def backward(self, loss: Tensor) -> None:
        if not self.accumulating():
            self.optimizers().clip_grad_norm_(loss, max_norm=CLIP)
        loss.backward()


@pytest.mark.parametrize("batches", [1, 4])
def test_clipping_as_documented(batches: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": batches}
    plain = fit(Module(plain_adamw), tmp_path, gradient_clip_val=CLIP, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*clip.*")
        fused = fit(_Clips(fused_adamw), tmp_path, **options)
    assert_same_run(plain, fused)
    assert not equal_weights(fused.model, fit(Module(plain_adamw), tmp_path, **options).model)


class _ClipsInHook(Module):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")


def test_an_overridden_clipping_hook_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"configure_gradient_clipping\(\) of _ClipsInHook finds no gradients"):
        fused = fit(_ClipsInHook(fused_adamw), tmp_path)
    assert not equal_weights(fused.model, fit(_ClipsInHook(plain_adamw), tmp_path).model)


# Manual optimization


class _Manual(Module):
    """Two optimizers in turn, each toggled, one of them accumulating, one stepped by a closure."""

    clips = False

    def __init__(self, make: MakeOptimizer, **options: Any) -> None:
        super().__init__(make, **options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        one, other = self.model.transformer.h
        first = self.make(one.parameters(), lr=LEARNING_RATE, accumulate_when=lambda: self.batch_idx % 2 == 0)
        second = self.make(other.parameters(), lr=LEARNING_RATE)
        self.run = Outcome(self.model, first)
        self.second = second
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1, 0.9)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.batch_idx = batch_idx
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            self.manual_backward(self.model(**batch).loss)
            if batch_idx % 2:
                first.step()
                first.zero_grad()

        def closure() -> Tensor:
            second.zero_grad()
            loss = self.model(**batch).loss
            self.manual_backward(loss)
            self.outcome.losses.append(loss.item())
            return loss

        with second.toggle_model():
            second.step(closure=closure)
        self.lr_schedulers().step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        held = [param.grad is not None for group in optimizer.param_groups for param in group["params"]]
        self.outcome.held.append(any(held))


def test_manual_optimization_with_two_optimizers(tmp_path: Path) -> None:
    modules = [_Manual(plain_adamw), _Manual(fused_adamw)]
    plain, fused = (fit(module, tmp_path) for module in modules)
    assert_same_run(plain, fused)
    assert_twins(modules[0].second, modules[1].second)
    assert len(fused.held) == 12 + 6


class _ManualClip(Module):
    def __init__(self, make: MakeOptimizer, own: bool) -> None:
        super().__init__(make)
        self.automatic_optimization = False
        self.own = own

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.batch_idx = batch_idx
        opt = self.optimizers()
        loss = self.model(**batch).loss
        if self.own:
            opt.clip_grad_norm_(loss, max_norm=CLIP)
        self.manual_backward(loss)
        self.outcome.note()
        if not self.own:
            self.clip_gradients(opt, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        opt.step()
        opt.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Called by step(), after the gradients were noted."""


def test_clipping_in_manual_optimization(tmp_path: Path) -> None:
    """`clip_gradients` after backward is warned of; before it, the optimizer's own clipping is exact."""
    plain = fit(_ManualClip(plain_adamw, own=False), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*clip.*")
        assert_same_run(plain, fit(_ManualClip(fused_adamw, own=True), tmp_path))
    with pytest.warns(UserWarning, match="training_step.*speaks of .*clip_gradients"):
        other = fit(_ManualClip(fused_adamw, own=False), tmp_path)
    assert not equal_weights(plain.model, other.model)


# Fabric


def run_with_fabric(make: MakeOptimizer, directory: Path, own_clipping: bool) -> Outcome:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    accumulating = [False]
    opt = make((model := tiny_gpt2()).parameters(), lr=LEARNING_RATE, accumulate_when=lambda: accumulating[0])
    run = Outcome(model, opt)
    module, optimizer = fabric.setup(model, opt)
    torch.manual_seed(1)
    for index, batch in enumerate(loader()):
        accumulating[0] = index % 2 == 0
        loss = module(**batch).loss
        if own_clipping and not accumulating[0]:
            optimizer.clip_grad_norm_(loss, max_norm=CLIP)
        with fabric.no_backward_sync(module, enabled=accumulating[0]):
            fabric.backward(loss)
        if not accumulating[0]:
            run.note()
            if not own_clipping:
                fabric.clip_gradients(module, optimizer, max_norm=CLIP, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        if index == 3:
            fabric.save(directory / "state.ckpt", {"model": module, "optimizer": optimizer})
            fabric.load(directory / "state.ckpt", {"model": module, "optimizer": optimizer})
    return run


def test_fabric(tmp_path: Path) -> None:
    plain = run_with_fabric(plain_adamw, tmp_path, own_clipping=False)
    assert_same_run(plain, run_with_fabric(fused_adamw, tmp_path, own_clipping=True))
    with pytest.warns(UserWarning, match="speaks of .*clip_gradients"):
        other = run_with_fabric(fused_adamw, tmp_path, own_clipping=False)
    assert not equal_weights(plain.model, other.model)
