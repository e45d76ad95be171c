"""Every optimizer of five published packages, and what fusing it must come to.

A row says how to build the class, on which parameters, and which of four outcomes is the right one. Keyword
arguments are chosen so that ten rounds reach the branches that the defaults reach after hundreds (a warm-up
ends, preconditioners refresh, masks are drawn again). Rows that are not exact say why in one phrase.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

PACKAGES = ("pytorch_optimizer", "schedulefree", "lion_pytorch", "prodigyopt", "torchao.optim")


class Outcome(enum.Enum):
    """What a fused twin of the optimizer owes its user."""

    EXACT = "same bits as the plain class, and no warning"
    RANDOM = "steps, and warns that the random numbers differ"
    REFUSED = "an error that names the class, at construction"
    UNBUILT = "the plain class cannot be built from parameters here either: its own error comes through"


class Layout(enum.Enum):
    """Which parameters the class is given, and how they are grouped."""

    MIXED = "a convolution, matrices, biases and a 0-dim gain, in two groups with different lr"
    ONE_LR = "as MIXED, one lr: classes that allow no other"
    WIDE = "as MIXED, with a matrix large enough to have its state quantized"
    BFLOAT16 = "as WIDE, in bfloat16"
    MATRICES = "matrices only"
    PAIRS = "low-rank pairs of matrices"
    MUON = "matrices and the rest, told apart by use_muon"
    LOW_RANK = "as MIXED, with the group keys that project matrices to a low rank"
    SINGLE_GROUP = "as MIXED, in one group"


Groups = list[dict[str, Any]]
Build = Callable[[nn.Module, Groups], Any]


@dataclass(frozen=True)
class Row:
    """One optimizer: how to build it and what to expect.

    `build` is for classes whose constructor takes something other than parameters (an optimizer, a model): it
    makes the plain optimizer, and the fused twin takes over one built the same way.
    """

    path: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outcome: Outcome = Outcome.EXACT
    reason: str = ""
    layout: Layout = Layout.MIXED
    build: Build | None = None

    @property
    def cls(self) -> type:
        module, _, name = self.path.rpartition(".")
        cls: type = getattr(importlib.import_module(module), name)
        return cls

    @property
    def label(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.kwargs.items() if not callable(value))
        return f"{self.path}({options})" if options else self.path


def exported_optimizers(package: str) -> set[str]:
    """Names of the package's own optimizers in its namespace, whether or not `Optimizer` is their base."""
    exported = vars(importlib.import_module(package)).items()
    return {f"{package}.{name}" for name, value in exported if _is_optimizer(value, package.split(".")[0])}


def _is_optimizer(value: Any, owner: str) -> bool:
    if not inspect.isclass(value) or value.__module__.split(".")[0] != owner:
        return False
    return hasattr(value, "step") and "scheduler" not in value.__module__


def _po(name: str, layout: Layout = Layout.MIXED, **kwargs: Any) -> Row:
    return Row(f"pytorch_optimizer.{name}", kwargs, layout=layout)


def _not_exact(outcome: Outcome) -> Callable[..., Row]:
    def row(path: str, reason: str, layout: Layout = Layout.MIXED, build: Build | None = None, **kwargs: Any) -> Row:
        return Row(path, kwargs, outcome, reason, layout, build)

    return row


_refused = _not_exact(Outcome.REFUSED)
_random = _not_exact(Outcome.RANDOM)
_unbuilt = _not_exact(Outcome.UNBUILT)


def _around(path: str, **kwargs: Any) -> Build:
    """A wrapper class, around an AdamW over the groups."""
    cls = Row(path).cls
    return lambda model, groups: cls(torch.optim.AdamW(groups), **kwargs)


def _of_model(path: str, **kwargs: Any) -> Build:
    cls = Row(path).cls
    return lambda model, groups: cls(model, **kwargs)


_PO = "pytorch_optimizer."
_SF = "schedulefree."
_AO = "torchao.optim."
_CLOSURE = "steps only with a closure that repeats forward and backward"
_HESSIAN = "differentiates the gradients of all parameters together"
_D_ESTIMATE = "one step-size estimate from the gradients of all parameters"
_STACKS = "stacks matrices of one shape, which other kernels multiply; foreach=False does not"
_INNER = "keeps the parameters in an optimizer of its own"
_TAKES_OPTIMIZER = "takes an optimizer, not parameters"
_TAKES_MODEL = "takes a model, not parameters"

_PLAIN_ROWS = [
    _po("A2Grad"),
    _po("A2Grad", variant="inc"),
    _po("A2Grad", variant="exp"),
    _po("ADOPT"),
    _po("APOLLO"),
    _po("AccSGD"),
    _po("AdEMAMix", t_alpha_beta3=5),
    _po("AdaBelief", rectify=True),
    _po("AdaBound"),
    _po("AdaDelta"),
    _po("AdaFactor"),
    _po("AdaFactor", relative_step=False, scale_parameter=False),
    _po("AdaGO", Layout.MUON, foreach=False),
    _po("AdaMax"),
    _po("AdaMod"),
    _po("AdaMuon", Layout.MUON),
    _po("AdaNorm"),
    _po("AdaPNM"),
    _po("AdaShift", keep_num=3),
    _po("AdaSmooth"),
    _po("AdaTAM"),
    _po("Adalite"),
    _po("AdamC"),
    _po("AdamG"),
    _po("AdamP", weight_decay=1e-2, nesterov=True),
    _po("AdamWSN"),
    _po("AdamWSN", subset_size=4),
    _po("Adan"),
    _po("AggMo"),
    _po("Aida"),
    _po("Alice", rank=2, leading_basis=2, update_interval=3),
    _po("Amos"),
    _po("Amos", momentum=0.9),
    _po("Ano", logarithmic_schedule=True),
    _po("ApolloDQN", warmup_steps=4),
    _po("BCOS"),
    _po("CAME"),
    _po("CAME", ams_bound=True),
    _po("Conda", Layout.LOW_RANK),
    _po("DiffGrad", rectify=True),
    _po("DualAdam"),
    _po("EXAdam"),
    _po("EmoFact"),
    _po("EmoFact", use_shadow=True),
    _po("EmoLynx"),
    _po("EmoLynx", use_shadow=True),
    _po("EmoNavi"),
    _po("EmoNavi", use_shadow=True),
    _po("FAdam"),
    _po("FOCUS"),
    _po("FTRL"),
    _po("Fira", Layout.LOW_RANK),
    _po("FlashAdamW", Layout.WIDE),
    _po("Fromage"),
    _po("GaLore", Layout.LOW_RANK),
    _po("Grams"),
    _po("GrokFastAdamW", grokfast_after_step=3),
    _po("Kate"),
    _po("LARS"),
    _po("LaProp", centered=True, steps_before_using_centered=3),
    _po("Lamb", rectify=True),
    _po("Lion"),
    _po("MADGRAD"),
    _po("MARS"),
    _po("MARS", mars_type="shampoo", optimize_1d=True),
    _po("MSVAG"),
    _po("Muon", Layout.MUON, foreach=False),
    _po("MuonClip", Layout.MUON, foreach=False),
    _po("Nero"),
    _po("NorMuon", Layout.MUON, foreach=False),
    _po("NovoGrad"),
    _po("PAdam"),
    _po("PID", momentum=0.9),
    _po("PNM"),
    _po("QHAdam"),
    _po("QHM", momentum=0.9),
    _po("RACS"),
    _po("RAdam"),
    _po("ROSE"),
    _po("Ranger", k=3),
    _po("SCION", foreach=False),
    _po("SCIONLight", foreach=False),
    _po("SGDP", momentum=0.9),
    _po("SGDSaI"),
    _po("SGDW", momentum=0.9, nesterov=True),
    _po("SM3", momentum=0.9, beta=0.9),
    _po("SOAP", precondition_frequency=3),
    _po("SPAM", density=0.5),
    _po("SPAM", warmup_epoch=3, grad_accu_steps=2, threshold=2),
    _po("SPlus", inverse_steps=3),
    _po("SRMM", memory_length=4),
    _po("SWATS"),
    _po("SaRA", threshold=0.1),
    _po("ScalableShampoo", start_preconditioning_step=2, preconditioning_compute_steps=2),
    _po("ScheduleFreeAdamW", warmup_steps=3),
    _po("ScheduleFreeRAdam"),
    _po("ScheduleFreeSGD", warmup_steps=3),
    _po("Shampoo", matrix_eps=1e-2),
    _po("SignSGD"),
    _po("SimplifiedAdEMAMix", beta1_warmup=5),
    _po("SpectralSphere", Layout.MATRICES, solver_max_iterations=3),
    _po("StableAdamW"),
    _po("StableSPAM", update_proj_gap=4),
    _po("StableSPAM", t_max=5, update_proj_gap=4),
    _po("TAM"),
    _po("Tiger"),
    _po("VSGD"),
    _po("Yogi"),
    Row(_SF + "AdamWScheduleFree", {"warmup_steps": 3}),
    Row(_SF + "AdamWScheduleFreePaper", {"warmup_steps": 3}),
    Row(_SF + "AdamWScheduleFreeReference", {"warmup_steps": 3}),
    Row(_SF + "RAdamScheduleFree"),
    Row(_SF + "SGDScheduleFree", {"warmup_steps": 3}),
    Row(_SF + "SGDScheduleFreeReference", {"warmup_steps": 3}),
    Row("lion_pytorch.Lion", {"weight_decay": 1e-2}),
    Row("lion_pytorch.Lion", {"weight_decay": 1e-2, "decoupled_weight_decay": True}),
    Row("lion_pytorch.cautious_lion.Lion"),
    Row(_AO + "Adam8bit", layout=Layout.WIDE),
    Row(_AO + "Adam4bit", layout=Layout.WIDE),
    Row(_AO + "AdamFp8", layout=Layout.WIDE),
    Row(_AO + "AdamW8bit", layout=Layout.WIDE),
    Row(_AO + "AdamW4bit", layout=Layout.WIDE),
    Row(_AO + "AdamWFp8", layout=Layout.WIDE),
    Row(_AO + "_AdamW", layout=Layout.BFLOAT16),
    Row("transformers.Adafactor"),
    Row("transformers.Adafactor", {"scale_parameter": False, "relative_step": False, "lr": 1e-3, "beta1": 0.9}),
]

_RANDOM_ROWS = [
    _random(_PO + "Alice", "permutes the rest of its basis", rank=2, leading_basis=1),
    _random(_PO + "Alice", "permutes the rest of its basis, in large matrices", Layout.WIDE),
    _random(_PO + "DASH", "starts its power iterations from random vectors"),
    _random(_PO + "Gravity", "draws its first momentum"),
    _random(_PO + "Kron", "draws, per step, whether and along what to precondition"),
    _random(_PO + "SaRA", "draws the matrix to constrain", Layout.WIDE, threshold=10.0, lambda_rank=0.1),
    _random(_PO + "SPAM", "draws masks", density=0.5, update_proj_gap=4),
    _random(_AO + "AdamW8bit", "rounds stochastically", Layout.BFLOAT16, bf16_stochastic_round=True),
]

_COUPLED_ROWS = [
    _refused(_PO + "ASGD", "lr from the norms over a group"),
    _refused(_PO + "AdaGC", "first clipping threshold from the global gradient norm"),
    _refused(_PO + "Adai", "inertia from the mean second moment of all parameters"),
    _refused(_PO + "AdamS", "weight decay from the mean second moment of all parameters"),
    _refused(_PO + "Adan", "clips by the global gradient norm", Layout.MATRICES, max_grad_norm=1.0),
    _refused(_PO + "AvaGrad", "gamma from the second moments of all parameters"),
    _refused(_PO + "DAdaptAdaGrad", _D_ESTIMATE),
    _refused(_PO + "DAdaptAdam", _D_ESTIMATE),
    _refused(_PO + "DAdaptAdan", _D_ESTIMATE),
    _refused(_PO + "DAdaptLion", _D_ESTIMATE),
    _refused(_PO + "DAdaptSGD", _D_ESTIMATE),
    _refused(_PO + "Lamb", "clips by the global gradient norm", pre_norm=True),
    _refused("lion_pytorch.foreach.Lion", "cannot step a group without parameters"),
    _refused(_PO + "LoRARite", "each pair of factors is stepped together", Layout.PAIRS),
    _refused(_PO + "Muon", _STACKS, Layout.MUON),
    _refused(_PO + "AdaGO", _STACKS, Layout.MUON),
    _refused(_PO + "MuonClip", _STACKS, Layout.MUON),
    _refused(_PO + "SCION", _STACKS),
    _refused(_PO + "SCIONLight", _STACKS),
    _refused(_PO + "NorMuon", _STACKS, Layout.MUON),
    _refused(_PO + "Prodigy", _D_ESTIMATE),
    _refused(_PO + "Ranger21", "normalizes by the variance of all parameters", num_iterations=20),
    _refused("prodigyopt.Prodigy", _D_ESTIMATE, Layout.ONE_LR),
    _refused(_PO + "AdaHessian", _HESSIAN),
    _refused(_PO + "SophiaH", _HESSIAN, update_period=2),
    _refused(_PO + "AliG", _CLOSURE, max_lr=0.1),
    _refused(_PO + "BSAM", _CLOSURE, num_data=100),
    _refused(_PO + "FriendlySAM", _CLOSURE, base_optimizer=torch.optim.SGD, lr=0.1),
    _refused(_PO + "LookSAM", _CLOSURE, base_optimizer=torch.optim.SGD, lr=0.1),
    _refused(_PO + "SAM", _CLOSURE, base_optimizer=torch.optim.SGD, lr=0.1),
    _refused(_SF + "AdamWScheduleFreeClosure", _CLOSURE),
    _refused(_SF + "RAdamScheduleFreeClosure", _CLOSURE),
    _refused(_SF + "SGDScheduleFreeClosure", _CLOSURE),
    _refused(_PO + "Magma", _INNER),
]


def _sam_of_model(name: str) -> Build:
    cls = Row(_PO + name).cls
    return lambda model, groups: cls(model, groups, torch.optim.SGD, lr=0.1)


def _gsam(model: nn.Module, groups: Groups) -> Any:
    cls = Row(_PO + "GSAM").cls
    return cls(groups, torch.optim.SGD(groups, lr=0.1), model, rho_scheduler=SimpleNamespace(step=lambda: 0.05))


_TAKEN_OVER_ROWS = [
    _refused(_PO + "GSAM", _CLOSURE, build=_gsam),
    _refused(_PO + "WSAM", _CLOSURE, build=_sam_of_model("WSAM")),
    _refused(_PO + "Lookahead", _INNER, build=_around(_PO + "Lookahead", k=3)),
    _refused(_PO + "OrthoGrad", _INNER, build=_around(_PO + "OrthoGrad")),
    _refused(_PO + "PCGrad", _INNER, build=_around(_PO + "PCGrad")),
    _refused(_PO + "SafeFP16Optimizer", _INNER, Layout.SINGLE_GROUP, _around(_PO + "SafeFP16Optimizer")),
    _refused(_PO + "ScheduleFreeWrapper", _INNER, build=_around(_PO + "ScheduleFreeWrapper")),
    _refused(_PO + "TRAC", _D_ESTIMATE, build=_around(_PO + "TRAC")),
    _refused(_SF + "ScheduleFreeWrapper", "no torch.optim.Optimizer", build=_around(_SF + "ScheduleFreeWrapper")),
    _refused(
        _SF + "ScheduleFreeWrapperReference",
        "no torch.optim.Optimizer",
        build=_around(_SF + "ScheduleFreeWrapperReference"),
    ),
    Row(_PO + "AdamMini", layout=Layout.MIXED, build=_of_model(_PO + "AdamMini", num_embeds=8, num_heads=2)),
]

_UNBUILT_ROWS = [
    _unbuilt(_PO + "AdaLOMO", _TAKES_MODEL),
    _unbuilt(_PO + "AdamMini", _TAKES_MODEL),
    _unbuilt(_PO + "CPUOffloadOptimizer", "needs a CUDA device, and is no torch.optim.Optimizer"),
    _unbuilt(_PO + "DeMo", "needs a process group and einops"),
    _unbuilt(_PO + "DistributedMuon", "needs a process group", Layout.MUON),
    _unbuilt(_PO + "GSAM", "takes a model besides parameters"),
    _unbuilt(_PO + "LOMO", _TAKES_MODEL),
    _unbuilt(_PO + "Lookahead", _TAKES_OPTIMIZER),
    _unbuilt(_PO + "OrthoGrad", _TAKES_OPTIMIZER),
    _unbuilt(_PO + "PCGrad", _TAKES_OPTIMIZER),
    _unbuilt(_PO + "SafeFP16Optimizer", _TAKES_OPTIMIZER),
    _unbuilt(_PO + "ScheduleFreeWrapper", _TAKES_OPTIMIZER),
    _unbuilt(_PO + "TRAC", _TAKES_OPTIMIZER),
    _unbuilt(_PO + "WSAM", "takes a model besides parameters"),
    _unbuilt(_SF + "ScheduleFreeWrapper", _TAKES_OPTIMIZER),
    _unbuilt(_SF + "ScheduleFreeWrapperReference", _TAKES_OPTIMIZER),
    _unbuilt(_AO + "CPUOffloadOptimizer", "needs a CUDA or XPU device"),
]

ROWS = [*_PLAIN_ROWS, *_RANDOM_ROWS, *_COUPLED_ROWS, *_TAKEN_OVER_ROWS, *_UNBUILT_ROWS]
