"""A real model small enough for a test, its data, and what a run of a framework is judged by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel
from twins import assert_twins

from fused_optim import BackwardFusedOptimizer

MakeOptimizer = Callable[..., Optimizer]
"""Builds an optimizer as ``torch.optim.AdamW`` does: parameters or groups, then keyword arguments."""


def plain_adamw(params: Any, **kwargs: Any) -> Optimizer:
    """The ordinary optimizer; it has no use for the options of the fused one."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("accumulate_when", "grad_scaler")}
    return torch.optim.AdamW(params, **kwargs)


def fused_adamw(params: Any, **kwargs: Any) -> Optimizer:
    """The same optimizer, stepped inside backward."""
    return BackwardFusedOptimizer(torch.optim.AdamW, params, **kwargs)


def tiny_gpt2(dropout: float = 0.1, tied: bool = True) -> GPT2LMHeadModel:
    """Two layers, tied embeddings and dropout: a weight used twice, and random numbers, as in a real model."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config)


def sentences(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random token sequences, as a map-style data set of model inputs."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The two groups that most training scripts build: matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


@dataclass
class Outcome:
    """What a training run leaves.

    Attributes:
        model: the trained model.
        optimizer: its optimizer, without any wrapper of the framework.
        losses: the losses, in order.
        held: whether a gradient was held when the framework came to ``step()``, one entry a step.
        rates: the learning rates, one entry a step.
    """

    model: torch.nn.Module
    optimizer: Optimizer
    losses: list[float] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def note(self) -> None:
        """Called right before each ``step()``."""
        self.held.append(any(param.grad is not None for param in self.model.parameters()))
        self.rates.append(float(self.optimizer.param_groups[0]["lr"]))


def weights(model: torch.nn.Module) -> list[Tensor]:
    """Copies of all parameters and buffers."""
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def equal_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether two models are equal bit for bit."""
    return all(map(torch.equal, weights(first), weights(second)))


def assert_same_run(plain: Outcome, fused: Outcome) -> None:
    """Same weights, state, losses and rates; and the fused run did run in backward."""
    assert_twins(plain.optimizer, fused.optimizer)
    assert equal_weights(plain.model, fused.model)
    assert plain.losses == fused.losses
    assert plain.rates == fused.rates
    assert len(plain.held) == len(fused.held) > 1
    assert all(plain.held)
    assert not any(fused.held)
    assert not equal_weights(plain.model, tiny_gpt2())
