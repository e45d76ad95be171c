"""The recorder: exact bytes, the right names, and nothing left switched on."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from fused_optim import BackwardFusedOptimizer, memory
from fused_optim.memory import _plot, _record
from fused_optim.memory._recording import CATEGORIES, format_bytes

Make = Callable[[nn.Module], Any]

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda model: torch.optim.Adam(model.parameters()),
    "adam foreach": lambda model: torch.optim.Adam(model.parameters(), foreach=True),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "fused adam": lambda model: BackwardFusedOptimizer(torch.optim.Adam, model.parameters()),
    "fused adam, unit per parameter": lambda model: BackwardFusedOptimizer(
        torch.optim.Adam, model.parameters(), bucket_cap_mb=0
    ),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def mlp(width: int = 64, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def train(model: nn.Module, optimizer: Any, inputs: torch.Tensor, iterations: int = 2) -> None:
    for _ in range(iterations):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(model: nn.Module, optimizer: Any, inputs: torch.Tensor, iterations: int = 2) -> memory.Recording:
    with memory.record(model, optimizer) as recording:
        train(model, optimizer, inputs, iterations)
    return recording


def size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_size(optimizer: Any) -> int:
    return size(value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


@every_optimizer
def test_recording_changes_no_bit(make: Make) -> None:
    inputs = torch.randn(8, 64)
    plain, watched = mlp(), mlp()
    train(plain, make(plain), inputs)
    recorded(watched, make(watched), inputs)
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))


@every_optimizer
def test_final_bytes_are_exact(make: Make) -> None:
    model = mlp()
    optimizer = make(model)
    inputs = torch.randn(8, 64)
    final = recorded(model, optimizer, inputs).final
    assert final.parameters == size(model.parameters())
    assert final.optimizer_state == state_size(optimizer) > 0
    assert final.other == size([inputs])
    assert (final.gradients, final.activations, final.temporaries) == (0, 0, 0)


def test_an_ordinary_peak_holds_all_gradients() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    recording = recorded(model, optimizer, torch.randn(1, 64))
    assert recording.peak.gradients == size(model.parameters())
    assert recording.peak_moment.phase == "optimizer step"
    assert recording.peak.total == sum(getattr(recording.peak, name) for name in CATEGORIES)


def test_a_fused_peak_holds_one_gradient() -> None:
    model = mlp(depth=6)
    optimizer = BackwardFusedOptimizer(torch.optim.Adam, model.parameters(), bucket_cap_mb=0)
    recording = recorded(model, optimizer, torch.randn(1, 64))
    assert 0 < recording.peak.gradients <= 2 * 64 * 64 * 4
    assert recording.peak_moment.phase == "optimizer step in backward"
    assert {span.phase for span in recording.phases} == {"forward", "backward"}
    samples = [sample.bytes.gradients for sample in recording.timeline]
    assert max(samples) <= 2 * 64 * 64 * 4


@every_optimizer
@pytest.mark.parametrize("batch", [1, 512], ids=["mostly parameters", "mostly activations"])
def test_same_bytes_as_the_tracker_of_torch(make: Make, batch: int) -> None:
    if torch.__version__ < "2.5":
        pytest.skip("torch.distributed._tools.mem_tracker came with torch 2.5")
    from torch.distributed._tools.mem_tracker import MemTracker

    inputs = torch.randn(batch, 64)
    model = mlp()
    optimizer = make(model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, inputs)
    with tracker:
        train(model, optimizer, inputs, 1)
        tracker.reset_mod_stats()
        train(model, optimizer, inputs, 1)
    snapshot = tracker.get_tracker_snapshot("peak")[inputs.device]
    expected = {str(kind).split(".")[-1]: count for kind, count in snapshot.items()}
    again = mlp()
    peak = recorded(again, make(again), inputs).peak
    assert peak.total == expected["Total"]
    assert peak.parameters == expected["PARAM"]


def test_every_event_of_a_small_run() -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    inputs = torch.ones(1, 4)
    with memory.record(model, optimizer) as recording:
        output = model(inputs)  # 32 bytes of weight, 16 of input, 8 of output
        kept = output * 2  # 8 more
        del output
        kept.sum().backward()
    totals = [sample.bytes.total for sample in recording.timeline]
    assert totals[:5] == [32, 32 + 16, 32 + 16 + 8, 32 + 16 + 8 + 8, 32 + 16 + 8]
    assert recording.final.gradients == 32
    assert recording.final.activations == 8
    assert recording.final.total == 32 + 16 + 8 + 32


def test_views_share_and_the_freed_is_gone() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory.record(model, optimizer) as recording:
        block = torch.zeros(1000)
        views = block.view(10, 100), block[:5]
        del block, views
        again = torch.zeros(1000)
        del again
    assert recording.peak.total == 8 + 4000
    assert recording.final.total == 8


def test_a_storage_that_changes_size() -> None:
    model = nn.Linear(1, 1)
    with memory.record(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recording:
        tensor = torch.zeros(10)
        tensor.resize_(500)
    assert recording.peak.total == 8 + 2000
    assert recording.final.total == 8 + 2000


class Wide(nn.Module):
    """Makes scratch of a million bytes in forward, in backward or not at all."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.where = where

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Scratch.apply(self.inner(inputs), self.where)


class Scratch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        return inputs + (torch.zeros(250_000).sum() if where == "forward" else 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient + (torch.zeros(250_000).sum() if ctx.where == "backward" else 0), None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_peak_names_phase_and_module(where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Wide(where)), nn.Linear(4, 1))
    recording = recorded(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4))
    assert (recording.peak_moment.phase, recording.peak_moment.module) == (where, "1.1")
    assert recording.peak.temporaries >= 1_000_000
    assert f"peak in {where} of 1.1" in str(recording)


def test_the_peak_of_a_step_names_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4000), nn.Linear(4000, 1))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    moment = recorded(model, optimizer, torch.ones(1, 4)).peak_moment
    assert (moment.phase, moment.module) == ("optimizer step", "1")


def test_a_module_that_raised_leaves_no_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with memory.record(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recording:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))
        model(torch.ones(1, 4)).sum().backward()
        torch.zeros(1000)
    assert (recording.peak_moment.phase, recording.peak_moment.module) == ("forward", "")


class Checkpointed(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Tanh()) for _ in range(6))
        self.on = on

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False) if self.on else block(inputs)
        return inputs


def test_checkpointing_shows_as_fewer_activations() -> None:
    recordings = []
    for on in (False, True):
        model = Checkpointed(on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recordings.append(recorded(model, optimizer, torch.randn(1000, 16)))
    without, with_checkpoints = (max(sample.bytes.activations for sample in each.timeline) for each in recordings)
    # Each Tanh keeps its output of 64 kB. With checkpoints there are those between the blocks, what one block
    # repeats (its Linear's output too), and a scalar or two. torch 2.1 keeps the last output alive until its
    # backward is over.
    assert without // 64_000 in (12, 13)
    assert 6 <= with_checkpoints // 64_000 <= 9


def test_sparse_gradients_count_what_they_hold() -> None:
    model = nn.Embedding(1000, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with memory.record(model, optimizer) as recording:
        model(torch.tensor([1, 5])).sum().backward()
    assert recording.final.gradients == 2 * 8 + 2 * 8 * 4


def test_frozen_and_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with memory.record(model, optimizer) as recording:
        model(torch.ones(1, 8)).sum().backward()
    assert recording.final.parameters == size(model.parameters())
    assert recording.final.gradients == size(p for p in model.parameters() if p.requires_grad)


def test_gradients_of_a_loop_without_step_and_a_closure() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 64)).sum()
        loss.backward()
        return loss

    with memory.record(model, optimizer) as recording:
        optimizer.step(closure)
    assert recording.final.gradients == size(model.parameters())
    assert [span.phase for span in recording.phases].count("backward") == 1


def switched_on(model: nn.Module) -> tuple[object, ...]:
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    global_hooks = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    depth = torch._C._len_torch_dispatch_stack()
    return sum(hooks), *map(len, global_hooks), depth


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_nothing_stays_on_when_the_body_raises(where: str) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    handle = {
        "forward": lambda: model[1].register_forward_hook(stop),
        "backward": lambda: model[0][0].weight.register_post_accumulate_grad_hook(stop),
        "step": lambda: optimizer.register_step_pre_hook(stop),
    }[where]()
    before = switched_on(model)
    with pytest.raises(Stop), memory.record(model, optimizer) as recording:
        train(model, optimizer, torch.ones(1, 64))
    assert switched_on(model) == before
    assert recording.peak.total >= recording.peak.parameters == size(model.parameters())
    handle.remove()
    recorded(model, optimizer, torch.ones(1, 64))


def test_nothing_stays_on_when_the_start_fails() -> None:
    class Broken(nn.Linear):
        def register_forward_hook(self, *_: Any, **__: Any) -> Any:
            raise LookupError("no hooks")

    model = nn.Sequential(nn.Linear(2, 2), Broken(2, 2))
    before = switched_on(model)
    with pytest.raises(LookupError), memory.record(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass
    assert switched_on(model) == before


def test_figures_are_there_only_after_the_body() -> None:
    model = mlp()
    with memory.record(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recording:
        assert "still running" in str(recording)
        with pytest.raises(RuntimeError, match="after the `with` block"):
            recording.peak  # noqa: B018
    assert recording.peak.total == size(model.parameters())


def test_a_recording_without_operations() -> None:
    model = nn.Linear(3, 3)
    with memory.record(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recording:
        pass
    assert recording.peak == recording.final == memory.Breakdown(parameters=48)


def test_wrong_arguments() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got list"), memory.record([model], optimizer):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(TypeError, match="param_groups and state, got Sequential"),
        memory.record(model, model),
    ):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(ValueError, match="on cpu"),
        memory.record(model, optimizer, snapshot="history.pickle"),
    ):
        pass


def test_table_json_and_pickle_agree() -> None:
    model = mlp()
    recording = recorded(model, torch.optim.Adam(model.parameters()), torch.ones(1, 64))
    read = json.loads(recording.to_json())
    assert read["peak"] == recording.peak.to_dict()
    assert max(sample["bytes"]["total"] for sample in read["timeline"]) == recording.peak.total
    assert read["timeline"][-1]["bytes"] == recording.final.to_dict()
    assert read["peak_moment"]["phase"] == "optimizer step"
    assert format_bytes(recording.peak.total) in str(recording)
    assert pickle.loads(pickle.dumps(recording)).to_dict() == recording.to_dict()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_218_600_000, "1.22 GB"), (-2000, "-2.0 kB")],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_long_recordings_keep_their_peak_in_the_timeline() -> None:
    model = nn.Linear(1, 1)
    with memory.record(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recording:
        for index in range(5000):
            torch.zeros(4000 if index == 3210 else 1)
    assert len(recording.timeline) <= 2002
    assert max(sample.bytes.total for sample in recording.timeline) == recording.peak.total == 8 + 16_000


def test_pictures_share_one_scale(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    inputs = torch.randn(4, 64)
    recordings = []
    for make in (OPTIMIZERS["adam foreach"], OPTIMIZERS["fused adam"]):
        model = mlp()
        recordings.append(recorded(model, make(model), inputs))
    memory.compare(recordings[0], recordings[1], tmp_path / "both.png", ("ordinary", "fused"))
    recordings[0].plot(tmp_path / "one.svg", "ordinary")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "one.svg").read_text()
    upper, lower = _plot.draw(recordings, ["ordinary", "fused"]).axes
    assert upper.get_ylim() == lower.get_ylim()
    assert upper.get_xlim() == lower.get_xlim()
    assert upper.get_ylim()[1] * 1e9 > recordings[0].peak.total
    assert [text.get_text().split(",")[0] for text in upper.texts if "peak" in text.get_text()] == [
        f"peak {format_bytes(recordings[0].peak.total)}"
    ]


def test_every_category_has_a_colour() -> None:
    assert set(_plot.COLOURS) == set(CATEGORIES)
    assert len(set(_plot.COLOURS.values())) == len(CATEGORIES)


def test_without_matplotlib_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    model = mlp()
    recording = recorded(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 64))
    with pytest.raises(ImportError, match="pip install matplotlib"):
        recording.plot(tmp_path / "never.png")
    assert not list(tmp_path.iterdir())


def test_importing_stays_cheap() -> None:
    code = "import sys, torch; before = set(sys.modules);import fused_optim.memory; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "fused_optim.memory" in loaded
    outside = {name for name in loaded if name.split(".")[0] in ("matplotlib", "torch", "torchvision", "numpy")}
    assert not outside & {"torch._subclasses.fake_tensor", "torch._dynamo", "torch.distributed"}
    assert not any(name.startswith(("matplotlib", "torchvision", "numpy")) for name in outside)


@pytest.mark.parametrize("fails", [False, True])
def test_the_history_of_the_allocator_is_switched_off(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all": calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    path = tmp_path / "history.pickle"
    try:
        with _record._allocator_history(path):
            assert calls == ["all"]
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert calls == ["all", str(path), None]


def test_private_names_that_the_recorder_uses() -> None:
    assert inspect.signature(torch.cuda.memory._record_memory_history).parameters["enabled"].default == "all"
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._current_autograd_node() is None
    tensor = torch.zeros(3)
    assert tensor.untyped_storage()._cdata == tensor.view(1, 3).untyped_storage()._cdata
    assert tensor.untyped_storage()._cdata != torch.zeros(3).untyped_storage()._cdata
    seen = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(
        lambda _: seen.append((torch._C._current_autograd_node().name(), torch._C._current_graph_task_id() >= 0))
    )
    parameter.sum().backward()
    assert seen == [("torch::autograd::AccumulateGrad", True)]
