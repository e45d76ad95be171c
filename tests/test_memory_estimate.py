"""Estimates on fake tensors against recordings of the real run."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fused_optim import BackwardFusedOptimizer, memory
from fused_optim.memory import Variant
from fused_optim.memory._advice import advice
from fused_optim.memory._batch import LIMIT, largest_batch
from fused_optim.memory._simulation import default_loss

Factory = Callable[[], nn.Module]

HAS_ZOO = all(importlib.util.find_spec(name) is not None for name in ("torchvision", "transformers"))
needs_zoo = pytest.mark.skipif(not HAS_ZOO, reason="torchvision and transformers are not installed")


def torchvision_model(name: str, **arguments: Any) -> Factory:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(**arguments)
        return model

    return build


def transformers_model(name: str, config: str, **arguments: Any) -> Factory:
    def build() -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**arguments))
        return model.train()

    return build


def images(batch: int, edge: int) -> torch.Tensor:
    return torch.zeros(batch, 3, edge, edge)


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.ones(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


ZOO: dict[str, tuple[Factory, Any]] = {
    "resnet18": (torchvision_model("resnet18", num_classes=10), images(2, 32)),
    "mobilenet_v3_small": (torchvision_model("mobilenet_v3_small", num_classes=10), images(4, 32)),
    "vit": (
        torchvision_model(
            "VisionTransformer", image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64,
            mlp_dim=256
        ),
        images(1, 32),
    ),
    "swin": (
        torchvision_model(
            "SwinTransformer", patch_size=[4, 4], embed_dim=24, depths=[1, 1], num_heads=[2, 4],
            window_size=[4, 4]
        ),
        images(2, 64),
    ),
    "gpt2": (
        transformers_model("GPT2LMHeadModel", "GPT2Config", n_layer=2, n_embd=128, n_head=4, vocab_size=1000),
        tokens(2, 64),
    ),
    "bert": (
        transformers_model(
            "BertForMaskedLM", "BertConfig", num_hidden_layers=2, hidden_size=128, num_attention_heads=4,
            intermediate_size=512, vocab_size=1000,
        ),
        tokens(2, 64),
    ),
    "llama": (
        transformers_model(
            "LlamaForCausalLM", "LlamaConfig", num_hidden_layers=2, hidden_size=128, num_attention_heads=4,
            intermediate_size=512, vocab_size=1000,
        ),
        tokens(2, 64),
    ),
}  # fmt: skip

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


def mlp(width: int = 200, depth: int = 4) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def real_peak(factory: Factory, inputs: Any, make: Callable[[Any], Any]) -> memory.Breakdown:
    model = factory()
    optimizer = make(model.parameters())
    with memory.record(model, optimizer) as recording:
        for _ in range(3):
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            default_loss(output).backward()
            del output
            optimizer.step()
            optimizer.zero_grad()
    return recording.peak


def assert_close(figures: memory.Estimate, factory: Factory, inputs: Any, optimizer: Any, kwargs: Any) -> None:
    makers: dict[str, tuple[Variant | None, Callable[[Any], Any]]] = {
        "plain": (figures.plain, lambda params: optimizer(params, **kwargs)),
        "foreach=False": (figures.foreach_false, lambda params: optimizer(params, foreach=False, **kwargs)),
        "fused": (figures.fused, lambda params: BackwardFusedOptimizer(optimizer, params, **kwargs)),
    }
    for name, (variant, make) in makers.items():
        assert variant is not None
        real = real_peak(factory, inputs, make)
        assert variant.peak.total == pytest.approx(real.total, rel=0.05), name
        assert variant.peak.parameters == real.parameters, name


@needs_zoo
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ZOO)
def test_within_five_percent_of_the_real_run(model: str, optimizer: str) -> None:
    factory, inputs = ZOO[model]
    optimizer_class, kwargs = OPTIMIZERS[optimizer]
    figures = memory.estimate(factory, optimizer_class, inputs, **kwargs)
    assert not figures.unknown
    assert_close(figures, factory, inputs, optimizer_class, kwargs)


def test_enough_models_and_optimizers() -> None:
    assert len(ZOO) >= 6
    assert len(OPTIMIZERS) >= 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch", [1, 400], ids=["mostly parameters", "mostly activations"])
def test_within_five_percent_without_a_zoo(batch: int, optimizer: str) -> None:
    optimizer_class, kwargs = OPTIMIZERS[optimizer]
    inputs = torch.zeros(batch, 200)
    figures = memory.estimate(mlp, optimizer_class, inputs, **kwargs)
    assert_close(figures, mlp, inputs, optimizer_class, kwargs)


def test_an_explicit_foreach_is_estimated_as_such() -> None:
    inputs = torch.zeros(1, 200)
    figures = memory.estimate(mlp, torch.optim.Adam, inputs, foreach=True)
    assert figures.foreach_false is not None
    # The whole set of square roots at once, in place of one.
    assert figures.plain.peak.total > figures.foreach_false.peak.total
    real = real_peak(mlp, inputs, lambda params: torch.optim.Adam(params, foreach=True))
    assert figures.plain.peak.total == pytest.approx(real.total, rel=0.05)


def test_the_default_on_a_cpu_is_a_loop() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(str(func))
            return func(*args, **(kwargs or {}))

    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.Adam([parameter])
    with Names() as names:
        optimizer.step()
    assert not any("foreach" in name or "fused" in name for name in names.seen)


def test_an_optimizer_without_foreach() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-group["lr"])

    def large() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(200, 2000), torch.nn.Linear(2000, 600))

    figures = memory.estimate(large, Plain, torch.zeros(1, 200))
    assert figures.foreach_false is None
    assert "-" in str(figures).splitlines()[1]
    assert figures.fused.peak.total < figures.plain.peak.total


def test_inputs_need_no_memory() -> None:
    given = memory.estimate(mlp, torch.optim.SGD, torch.zeros(8, 200), lr=0.1)
    on_meta = memory.estimate(mlp, torch.optim.SGD, torch.zeros(8, 200, device="meta"), lr=0.1)
    assert given.to_dict() == on_meta.to_dict()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4096, 32, 4 * 4096, batch_first=True) for _ in range(32))
        self.head = nn.Linear(4096, 50_000, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.skipif(torch.__version__ < "2.5", reason="torch 2.1 polls storages, which takes minutes here")
def test_seven_billion_parameters_are_not_allocated() -> None:
    figures = memory.estimate(
        lambda: nn.Sequential(nn.Embedding(50_000, 4096), Decoder()),
        torch.optim.AdamW,
        torch.zeros(1, 512, dtype=torch.long),
    )
    assert 6.5e9 < figures.parameters < 7.5e9
    assert figures.plain.peak.parameters == 4 * figures.parameters
    assert figures.plain.peak.gradients == 4 * figures.parameters
    assert figures.fused.peak.gradients < 0.05 * figures.plain.peak.gradients
    assert "Fusing saves" in figures.advice


class Reads(nn.Module):
    """Reads a value in forward, which no fake tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(30, 30)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(inputs)
        return output if output.sum().item() > 0 else -output


class AsksShape(Reads):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs[inputs[:, 0] > 0])


class CallsNumpy(Reads):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * float(inputs.detach().numpy().sum())


@pytest.mark.parametrize("model", [Reads, AsksShape, CallsNumpy])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_that_reads_values_gets_the_formula(model: Factory, optimizer: str) -> None:
    if model is AsksShape and torch.__version__ < "2.5":
        pytest.skip("fake tensors of torch 2.1 give boolean indexing a size of their own")
    optimizer_class, kwargs = OPTIMIZERS[optimizer]
    figures = memory.estimate(model, optimizer_class, torch.zeros(2, 30), **kwargs)
    count = 4 * (30 * 30 + 30)
    assert figures.unknown.startswith("activations are unknown: the model cannot run on fake tensors")
    assert figures.plain.peak.parameters == figures.plain.peak.gradients == count
    assert figures.fused.peak.gradients == 4 * 900
    assert figures.plain.recording is None
    assert figures.plain.peak.optimizer_state == figures.fused.peak.optimizer_state >= count
    assert "unknown" in str(figures)
    assert figures.advice.startswith("The ordinary peak that is known")


class BuiltByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0.1, 0.3, 4)]
        self.layers = nn.Sequential(*(nn.Linear(50, int(rate * 100)) for rate in self.rates[:1]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(inputs)
        return output


def test_a_constructor_that_reads_values_runs_for_real_once() -> None:
    figures = memory.estimate(BuiltByValue, torch.optim.Adam, torch.zeros(2, 50))
    assert not figures.unknown
    assert len(figures.notes) == 1
    assert "built for real" in figures.notes[0]
    assert figures.parameters == 50 * 10 + 10
    inputs = torch.zeros(2, 50)
    assert_close(figures, BuiltByValue, inputs, torch.optim.Adam, {})


def test_frozen_parameters_have_no_gradient() -> None:
    def build() -> nn.Module:
        model = mlp()
        for parameter in list(model.parameters())[:-2]:
            parameter.requires_grad_(False)
        return model

    figures = memory.estimate(build, torch.optim.Adam, torch.zeros(1, 200))
    assert figures.trainable == 2010
    assert figures.parameters == 4 * (200 * 200 + 200) + 2010
    assert "Only 1.2 % of the parameters are trained" in figures.advice
    assert "the weights themselves" in figures.advice


def test_a_given_loss_is_used() -> None:
    figures = memory.estimate(mlp, torch.optim.Adam, torch.zeros(4, 200), loss=lambda output: output[:, 0].mean())
    assert figures.plain.peak.total > 0
    with pytest.raises(ValueError, match=r"scalar loss .* got shape \(4, 10\)"):
        memory.estimate(mlp, torch.optim.Adam, torch.zeros(4, 200), loss=lambda output: output)


def test_wrong_input_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"rejects inputs of shape \(1, 7\)"):
        memory.estimate(mlp, torch.optim.Adam, torch.zeros(1, 7))
    with pytest.raises(TypeError, match="expected the factory to make a torch.nn.Module, got list"):
        memory.estimate(list, torch.optim.Adam, torch.zeros(1, 7))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="foo"):
        memory.estimate(mlp, torch.optim.Adam, torch.zeros(1, 200), foo=1)
    with pytest.raises(ValueError, match="expected device 'cpu'"):
        memory.estimate(mlp, torch.optim.Adam, torch.zeros(1, 200), device="tpu")
    with pytest.raises(ValueError, match="pass loss"):
        default_loss({"ids": torch.zeros(3, dtype=torch.long)})


def test_nothing_stays_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="rejects"):
        memory.estimate(mlp, torch.optim.Adam, torch.zeros(1, 7))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert type(torch.zeros(1)) is torch.Tensor


def test_json_holds_what_the_table_shows() -> None:
    figures = memory.estimate(mlp, torch.optim.Adam, torch.zeros(1, 200))
    read = json.loads(figures.to_json())
    assert read["plain"]["peak"] == figures.plain.peak.to_dict()
    assert read["foreach=False"]["peak"] == read["plain"]["peak"]
    assert read["advice"] == figures.advice
    assert str(figures).endswith(figures.advice)


@pytest.mark.parametrize(
    ("plain", "fused", "words"),
    [
        (memory.Breakdown(10, 10, 20), memory.Breakdown(10, 1, 20), ["22 %", "it pays", "8-bit"]),
        (
            memory.Breakdown(10, 10, 20, 900),
            memory.Breakdown(10, 1, 20, 900),
            ["hardly worth it", "checkpointing"],
        ),
        (memory.Breakdown(50, 10, 0), memory.Breakdown(50, 1, 0), ["15 %", "it pays"]),
        (memory.Breakdown(50, 0, 0), memory.Breakdown(50, 0, 0), ["saves nothing", "shard"]),
    ],
)
def test_advice_names_the_lever(plain: memory.Breakdown, fused: memory.Breakdown, words: list[str]) -> None:
    text = advice(plain, fused, 100, 100, known=True)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("begin", [1, 5, 64])
@pytest.mark.parametrize(
    ("peak", "budget"),
    [
        (lambda batch: max(490, 365 + 31 * batch), 800),
        (lambda batch: 400 + batch, 8000),
        (lambda batch: max(9000, 2000 + 500 * batch + batch * batch), 40_000),
        (lambda batch: 400 + batch, 200),
        (lambda batch: 400, 800),
    ],
)
def test_the_largest_batch_fits_and_the_next_does_not(peak: Callable[[int], int], budget: int, begin: int) -> None:
    asked: list[int] = []
    found = largest_batch(lambda batch: (asked.append(batch), peak(batch))[1], budget, begin)  # type: ignore[func-returns-value]
    assert found == 0 or peak(found) <= budget
    assert found == LIMIT or peak(found + 1) > budget
    assert len(asked) < 25


def test_batches_that_the_model_rejects_do_not_fit() -> None:
    assert largest_batch(lambda batch: None if batch < 4 else 100 * batch, 350, 8) == 0
