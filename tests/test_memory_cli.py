"""The command line: figures, pictures, and one line for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fused_optim
from fused_optim.memory.__main__ import main

# Also where the package is not installed and the tests run in its checkout.
WITH_PACKAGE = {**os.environ, "PYTHONPATH": str(Path(fused_optim.__file__).parent.parent)}

MODELS = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(40, 400), nn.ReLU(), nn.Linear(400, 40))

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.linear = nn.Linear(8, 2)
    def forward(self, ids, scale):
        return {"logits": self.linear(self.embedding(ids)) * scale}

class Reads(nn.Linear):
    def __init__(self):
        super().__init__(40, 40)
    def forward(self, inputs):
        return super().forward(inputs) * inputs.sum().item()

def broken():
    raise KeyError("no weights here")

not_callable = 3

class Coupled(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in every).sqrt() + 1e-8
        for p in every:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(MODELS)
    return "my_models.py"


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_a_table_and_advice(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = lines(capsys, f"{models}:mlp", "--input", "1,40")
    assert table[0].split() == ["at", "the", "peak", "plain", "foreach=False", "fused"]
    parameters = "129.8 kB"
    assert table[1].split("  ")[0] == "parameters"
    assert table[1].count(parameters) == 3
    assert "Fusing saves" in table[-1]


def test_an_importable_factory_as_a_process(models: str) -> None:
    command = [sys.executable, "-m", "fused_optim.memory", "my_models:mlp", "--input", "1,40", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=WITH_PACKAGE)
    figures = json.loads(done.stdout)
    assert figures["plain"]["peak"]["parameters"] == 4 * (40 * 400 + 400 + 400 * 40 + 40)
    assert figures["largest_batch"] is None


def test_a_mistake_as_a_process(models: str) -> None:
    command = [sys.executable, "-m", "fused_optim.memory", "my_models:nothing", "--input", "1,40"]
    done = subprocess.run(command, capture_output=True, text=True, env=WITH_PACKAGE)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["error: my_models has no 'nothing': check the spelling of the factory"]


def test_settings_reach_the_optimizer(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = (
        f"{models}:mlp",
        "--input",
        "1,40",
        "--optimizer",
        "torch.optim:SGD",
        "--json",
        "--set",
        "lr=1e-3",
    )
    without = json.loads("\n".join(lines(capsys, *common)))
    momentum = json.loads("\n".join(lines(capsys, *common, "--set", "momentum=0.9")))
    assert without["plain"]["peak"]["optimizer_state"] == 0
    assert momentum["plain"]["peak"]["optimizer_state"] == momentum["plain"]["peak"]["parameters"]


def test_trainable_freezes_the_rest(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = lines(capsys, f"{models}:mlp", "--input", "1,40", "--trainable", r"^2\.", "--json")
    figures = json.loads("\n".join(table))
    assert figures["trainable"] == 400 * 40 + 40
    assert figures["plain"]["peak"]["gradients"] == 4 * figures["trainable"]


def test_named_inputs_of_other_types(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines(capsys, f"{models}:Pair", "--input", "ids=2,5:int64", "--input", "scale=1")
    lines(capsys, f"{models}:Pair", "--input", "2,5:int64", "--input", "1")


def test_the_largest_batch(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = (f"{models}:mlp", "--input", "2,40", "--json")
    found = json.loads("\n".join(lines(capsys, *common, "--device-gb", "0.001")))["largest_batch"]
    assert found["fused"] >= found["plain"] >= 1
    for variant, batch in found.items():
        for size, fits in ((batch, True), (batch + 1, False)):
            figures = json.loads("\n".join(lines(capsys, f"{models}:mlp", "--input", f"{size},40", "--json")))
            assert (figures[variant]["peak"]["total"] <= 1e6) is fits
    assert lines(capsys, *common[:-1], "--device-gb", "0.00001")[-1].endswith("plain none, fused none")


def test_a_picture(models: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    lines(capsys, f"{models}:mlp", "--input", "1,40", "--plot", "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_a_model_that_reads_values(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = lines(capsys, f"{models}:Reads", "--input", "1,40", "--device-gb", "1")
    assert any(line.startswith("activations") and line.count("unknown") == 3 for line in table)
    assert any("cannot run on fake tensors" in line for line in table)
    assert table[-1] == "what fits into 1 GB is unknown, since activations are"
    assert main([f"{models}:Reads", "--input", "1,40", "--plot", "out.png"]) == 2


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such module": (["no_such_module:mlp", "--input", "1,40"], "cannot import 'no_such_module'"),
    "no such file": (["no_such_file.py:mlp", "--input", "1,40"], "there is no file 'no_such_file.py'"),
    "no colon": (["my_models.mlp", "--input", "1,40"], "expected the factory as module:name"),
    "not callable": (
        ["my_models.py:not_callable", "--input", "1,40"],
        "to be callable without arguments, got int",
    ),
    "factory needs arguments": (
        ["torch.nn:Linear", "--input", "1,40"],
        "missing 2 required positional arguments",
    ),
    "factory raises": (["my_models.py:broken", "--input", "1,40"], "KeyError: 'no weights here'"),
    "no module": (
        ["builtins:list", "--input", "1,40"],
        "expected the factory to make a torch.nn.Module, got list",
    ),
    "shape rejected": (["my_models.py:mlp", "--input", "1,41"], "the model rejects inputs of shape (1, 41)"),
    "no shape": (["my_models.py:mlp", "--input", "1x41"], "expected --input as [NAME=]SHAPE[:DTYPE]"),
    "no dtype": (["my_models.py:mlp", "--input", "1,41:number"], "torch has no dtype 'number'"),
    "no input": (["my_models.py:mlp"], "--input"),
    "half named": (
        ["my_models.py:Pair", "--input", "a=1", "--input", "2"],
        "either all inputs with different names",
    ),
    "no optimizer": (
        ["my_models.py:mlp", "--input", "1,40", "--optimizer", "torch.optim:Nothing"],
        "has no 'Nothing'",
    ),
    "not an optimizer": (
        ["my_models.py:mlp", "--input", "1,40", "--optimizer", "torch.nn:Linear"],
        "to be a subclass of torch.optim.Optimizer",
    ),
    "coupled optimizer": (
        ["my_models.py:mlp", "--input", "1,40", "--optimizer", "my_models.py:Coupled"],
        "Coupled",
    ),
    "closure needed": (["my_models.py:mlp", "--input", "1,40", "--optimizer", "torch.optim:LBFGS"], "LBFGS"),
    "no such setting": (["my_models.py:mlp", "--input", "1,40", "--set", "foo=1"], "foo"),
    "bad setting": (["my_models.py:mlp", "--input", "1,40", "--set", "lr"], "expected --set NAME=VALUE"),
    "nothing matches": (["my_models.py:mlp", "--input", "1,40", "--trainable", "zz"], "matches no parameter"),
    "no expression": (
        ["my_models.py:mlp", "--input", "1,40", "--trainable", "("],
        "is no regular expression",
    ),
    "no number": (
        ["my_models.py:mlp", "--input", "1,40", "--device-gb", "many"],
        "invalid float value: 'many'",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_one_line_for_each_mistake(
    arguments: list[str], words: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("error: ")
    assert words in captured.err
