"""Models that ordinary factories make: copied layers, converted weights, tied ones."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from test_memory_cli import WITH_PACKAGE
from torch import nn

from fused_optim import memory


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 30))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    model[1].weight = model[0].weight
    return model


def copied() -> nn.Module:
    layer = nn.Sequential(nn.Linear(30, 30), nn.ReLU())
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to bfloat16": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "bfloat16()": (lambda model: model.bfloat16(), torch.bfloat16),
    "half()": (lambda model: model.half(), torch.float16),
    "double()": (lambda model: model.double(), torch.float64),
    "to device and dtype": (lambda model: model.to("cpu", torch.float64), torch.float64),
    "twice": (lambda model: model.half().float(), torch.float32),
    "cpu()": (lambda model: model.cpu(), torch.float32),
    "type()": (lambda model: model.type(torch.bfloat16), torch.bfloat16),
    "to_empty": (lambda model: model.to_empty(device="cpu"), torch.float32),
    "a copy": (copy.deepcopy, torch.float32),
    "a copy, converted": (lambda model: copy.deepcopy(model).bfloat16(), torch.bfloat16),
    "a state dict": (lambda model: (model.load_state_dict(copy.deepcopy(model.state_dict())), model)[1], torch.float32),
}


@pytest.mark.parametrize(("convert", "dtype"), CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("base", [mlp, tied, copied])
def test_a_factory_may_convert_and_copy(
    base: Callable[[], nn.Module], convert: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    figures = memory.estimate(lambda: convert(base()), torch.optim.Adam, torch.zeros(4, 30, dtype=dtype))
    real = convert(base())
    assert not figures.unknown
    assert figures.notes == ()
    assert figures.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert figures.plain.peak.parameters == figures.parameters * dtype.itemsize


def test_a_transformer_of_torch() -> None:
    # In a process of its own, since what this guards against ends the process.
    command = [sys.executable, "-m", "fused_optim.memory", "torch.nn:Transformer"]
    command += ["--input", "src=4,16,512", "--input", "tgt=4,16,512"]
    done = subprocess.run(command, capture_output=True, text=True, env=WITH_PACKAGE)
    assert done.returncode == 0, done.stderr
    assert "Fusing saves" in done.stdout


def test_swapping_is_as_before_afterwards() -> None:
    before = getattr(torch.utils, "swap_tensors", None)
    memory.estimate(mlp, torch.optim.SGD, torch.zeros(4, 30), lr=0.1)
    assert getattr(torch.utils, "swap_tensors", None) is before
