"""Every private name of torch that the package uses: that it is there, and that it means what we take it for."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from twins import assert_equal

import fused_optim
from fused_optim import _torch


class Plain(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> str:
        return "stepped"


def a_param() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


KNOWN = {
    "torch._C._current_graph_task_id",
    "torch._C._storage_Use_Count",
    "torch._foreach_norm",
    "torch._utils.is_compiling",
    "torch.autograd.Variable._execution_engine",
    "torch.utils._foreach_utils",
    "torch.utils._python_dispatch",
}
"""Names that a test below covers; ``_torch.py`` is where they belong."""


def test_no_other_private_name_of_torch_is_used() -> None:
    package = Path(fused_optim.__file__).parent
    used = set()
    for path in package.glob("*.py"):
        found = re.findall(r"\btorch(?:\.\w+)*?\._[a-zA-Z]\w*(?:\.\w+)*", path.read_text(encoding="utf-8"))
        used |= {name.removesuffix(".queue_callback") for name in found if not name.startswith("torch.utils._")}
        used |= {match for match in found if match.startswith("torch.utils._")}
    used -= {"torch._dynamo"}  # looked for among the modules that are already there, never imported
    assert used == KNOWN


# Memory


def test_the_only_holder_of_memory_is_told_from_others() -> None:
    alone = torch.ones(3)
    assert _torch.owns_memory(alone)
    view = alone.view(3, 1)
    assert not _torch.owns_memory(alone)
    del view
    assert _torch.owns_memory(alone)
    assert not _torch.owns_memory(alone.to_sparse())


# The running backward pass


def test_graph_task_id_is_negative_outside_and_grows_with_every_pass() -> None:
    seen: list[int] = []
    param = a_param()
    param.register_hook(lambda grad: seen.append(_torch.graph_task_id()))
    assert _torch.graph_task_id() == -1
    for _ in range(3):
        param.sum().backward()
    assert _torch.graph_task_id() == -1
    assert len(set(seen)) == 3
    assert seen == sorted(seen)
    assert min(seen) >= 0


def test_graph_task_id_is_one_for_all_hooks_of_a_pass_and_another_inside_a_nested_one() -> None:
    seen: dict[str, int] = {}
    params = [a_param() for _ in range(3)]
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(
            lambda _, index=index: seen.update({f"{index}": _torch.graph_task_id()})
        )
    x = checkpoint(lambda x: x * params[2], params[0] * 1.0, use_reentrant=True)
    (x * params[1]).sum().backward()
    assert seen["0"] == seen["1"] != seen["2"]


def test_callbacks_run_once_after_all_hooks_and_before_backward_returns() -> None:
    order: list[str] = []
    params = [a_param(), a_param()]
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: order.append("hook"))

    def queue(_: Tensor) -> None:
        _torch.at_end_of_pass(lambda: order.append("end"))

    handle = params[0].register_post_accumulate_grad_hook(queue)
    (params[0] * params[1]).sum().backward()
    assert order == ["hook", "hook", "end"]
    handle.remove()
    (params[0] * params[1]).sum().backward()
    assert order == ["hook", "hook", "end", "hook", "hook"]


def test_a_callback_may_queue_another_one() -> None:
    order: list[str] = []

    def first() -> None:
        order.append("first")
        _torch.at_end_of_pass(lambda: order.append("second"))

    param = a_param()
    param.register_post_accumulate_grad_hook(lambda _: _torch.at_end_of_pass(first))
    param.sum().backward()
    assert order == ["first", "second"]


def test_callbacks_are_dropped_when_the_pass_fails() -> None:
    called: list[int] = []

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    params = [a_param(), a_param()]
    params[1].register_post_accumulate_grad_hook(lambda _: _torch.at_end_of_pass(lambda: called.append(1)))
    hidden = params[0] * 1.0
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        (params[1] * 2 + hidden).sum().backward()
    params[0].sum().backward()
    assert called == []


def surroundings_in(run: Any) -> _torch.Surroundings:
    seen: list[_torch.Surroundings] = []
    param = a_param()
    param.register_post_accumulate_grad_hook(lambda _: seen.append(_torch.surroundings()))
    run(param)
    (only,) = seen
    return only


class NestedPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, params: list[Tensor]) -> Tensor:
        (ctx.param,) = params
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            torch.autograd.backward(ctx.param.sum())
        return grad, None


class PassingOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_an_outermost_pass_is_not_nested() -> None:
    assert surroundings_in(lambda param: param.sum().backward()) == (False, None)
    assert surroundings_in(lambda param: torch.autograd.backward([param.sum()])) == (False, None)
    assert surroundings_in(lambda param: PassingOn.apply(param).sum().backward()) == (False, None)


def test_a_pass_inside_a_custom_function_is_nested_and_names_its_node() -> None:
    x = torch.ones(3, requires_grad=True)
    found = surroundings_in(lambda param: NestedPass.apply(x, [param]).sum().backward())
    assert found.nested
    assert isinstance(found.node, torch.autograd.graph.Node)
    assert type(found.node).__name__ == "NestedPassBackward"
    found = surroundings_in(lambda param: checkpoint(lambda x: x * param, x, use_reentrant=True).sum().backward())
    assert found.nested
    assert found.node is not None


def test_a_pass_inside_a_hook_is_nested_without_a_node() -> None:
    def run(param: Tensor) -> None:
        x, inner = torch.ones(3, requires_grad=True), param.sum()
        x.register_hook(lambda grad: inner.backward())
        x.sum().backward()

    assert surroundings_in(run) == (True, None)


def test_never_compiled_keeps_dynamo_away() -> None:
    seen: list[bool] = []

    @_torch.never_compiled
    def inner() -> None:
        seen.append(torch.compiler.is_compiling() if hasattr(torch.compiler, "is_compiling") else False)
        torch._dynamo.graph_break()

    def outer(x: Tensor) -> Tensor:
        inner()
        return x + 1

    compiled = torch.compile(outer, backend="eager")
    assert_equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert seen == [False]
    torch._dynamo.reset()


# Hooks of parameters


def test_hooks_of_a_parameter_are_a_dict_by_the_id_of_the_handle() -> None:
    param = a_param()
    assert not _torch.hooks_of(param)
    handle = param.register_post_accumulate_grad_hook(len)
    assert _torch.hooks_of(param) == {handle.id: len}
    handle.remove()
    assert not _torch.hooks_of(param)
    assert not _torch.hooks_of(copy.deepcopy(param))


def test_a_hook_deleted_from_that_dict_does_not_run() -> None:
    param = a_param()
    called: list[Tensor] = []
    handle = param.register_post_accumulate_grad_hook(called.append)
    del _torch.hooks_of(param)[handle.id]
    param.sum().backward()
    assert not called


@pytest.mark.skipif(not hasattr(torch.utils, "swap_tensors"), reason="this torch cannot swap tensors")
def test_swap_tensors_silences_hooks_until_they_are_revived() -> None:
    first, second = a_param(), a_param()
    called: list[int] = []
    first.register_post_accumulate_grad_hook(lambda _: called.append(1))
    torch.utils.swap_tensors(first, second)
    first.sum().backward()
    assert not called
    _torch.revive_hooks(first)
    first.sum().backward()
    assert called == [1]
    _torch.revive_hooks(second)


def test_reviving_hooks_that_are_alive_does_not_double_them() -> None:
    param = a_param()
    called: list[int] = []
    param.register_post_accumulate_grad_hook(lambda _: called.append(1))
    _torch.revive_hooks(param)
    param.sum().backward()
    assert called == [1]


# Optimizers


@pytest.mark.parametrize("name", [*_torch.STEP_HOOKS, *_torch.STATE_HOOKS])
def test_optimizers_keep_their_hooks_under_these_names(name: str) -> None:
    optimizer = Plain([a_param()])
    register = "register" + name.removeprefix("_optimizer").removesuffix("s")
    called: list[str] = []
    getattr(optimizer, register)(lambda *args: called.append(name))
    assert len(vars(optimizer)[name]) == 1
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == [name]
    assert {key for key in vars(optimizer) if key.endswith("_hooks")} == {*_torch.STEP_HOOKS, *_torch.STATE_HOOKS}


def test_what_every_optimizer_keeps_besides_state_and_hooks() -> None:
    """``_shared._NOT_SHARED`` leaves these out; what torch adds here must be looked at."""
    hooks = {*_torch.STEP_HOOKS, *_torch.STATE_HOOKS}
    kept = {"param_groups", "state", "defaults", "_zero_grad_profile_name"}
    optional = {"_warned_capturable_if_run_uncaptured"}
    assert vars(Plain([a_param()])).keys() - optional == hooks | kept


class Moving(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> str:
        self.param_groups[0]["params"][0].add_(1)
        return "moved"


def test_unprofiled_step_runs_no_hooks_but_keeps_no_grad() -> None:
    optimizer = Moving([a_param()])
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *args: called.append(1))
    assert getattr(Moving.step, "hooked", False)
    assert _torch.unprofiled_step(Moving)(optimizer) == "moved"
    assert not called
    optimizer.step()
    assert called == [1]


def test_bare_step_is_the_function_as_written() -> None:
    for optimizer_class in (torch.optim.SGD, torch.optim.Adam):
        bare = _torch.bare_step(optimizer_class)
        assert not hasattr(bare, "__wrapped__")
        assert list(inspect.signature(bare).parameters) == ["self", "closure"]
        assert bare.__code__.co_filename == inspect.getsourcefile(optimizer_class)


def test_schedulers_wrap_step_on_the_instance_and_are_told_of_steps() -> None:
    optimizer = Plain([a_param()])
    assert "step" not in vars(optimizer)
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    assert _torch.patched_by_scheduler(vars(optimizer)["step"])
    _torch.note_step_called(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: pytest.fail(f"warned: {args}"))
        scheduler.step()


def test_schedulers_warn_when_they_are_told_of_nothing() -> None:
    scheduler = LambdaLR(Plain([a_param()]), lambda epoch: 1.0)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


# Clipping


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 0.5, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_grad_norm_is_the_norm_that_clipping_computes(dtype: torch.dtype, norm_type: float) -> None:
    param = nn.Parameter(torch.randn(700, 3, dtype=dtype, generator=torch.Generator().manual_seed(0)))
    param.grad = torch.randn(700, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    own = _torch.grad_norm(param.grad, norm_type)
    total = torch.linalg.vector_norm(torch.stack([own]), norm_type)
    assert_equal(nn.utils.clip_grad_norm_([param], float("inf"), norm_type), total)


def test_clipping_order_is_that_in_which_clipping_adds_up() -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float64, torch.float32, torch.float64, torch.bfloat16, torch.float32]
    params = [nn.Parameter(torch.zeros(50, dtype=dtype)) for dtype in dtypes]
    for index, param in enumerate(params):
        param.grad = (torch.randn(50, generator=generator) * 10**index).to(param.dtype)
    order = _torch.clipping_order(params)
    assert sorted(order) == list(range(len(params)))
    norms = torch.stack([_torch.grad_norm(params[index].grad, 2.0) for index in order])
    assert_equal(nn.utils.clip_grad_norm_(params, float("inf")), torch.linalg.vector_norm(norms, 2.0))


# GradScaler


needs_scaler = pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="no GradScaler for CPUs before 2.3")


@needs_scaler
def test_a_scaler_keeps_books_by_id_until_update() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([param := a_param()], lr=0.1)
    scaler.scale(param.sum()).backward()
    assert not _torch.remembers(scaler, optimizer)
    assert _torch.overflow_if_unscaled(scaler, optimizer) is None
    scaler.unscale_(optimizer)
    assert _torch.remembers(scaler, optimizer)
    assert _torch.overflow_if_unscaled(scaler, optimizer) is False
    scaler.step(optimizer)
    assert _torch.overflow_if_unscaled(scaler, optimizer) is None
    scaler.update()
    assert not _torch.remembers(scaler, optimizer)
    scaler.scale(param.sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    assert _torch.overflow_if_unscaled(scaler, optimizer) is True


@needs_scaler
@pytest.mark.parametrize("supports", [True, False])
def test_a_scaler_lends_the_scale_to_optimizers_that_say_they_support_it(supports: bool) -> None:
    seen: list[set[str]] = []

    class Scaled(Plain):
        _step_supports_amp_scaling = supports

        def step(self, closure: Any = None) -> None:
            seen.append({"grad_scale", "found_inf"} & vars(self).keys())

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = Scaled([param := a_param()])
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert seen == [{"grad_scale", "found_inf"} if supports else set()]
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    assert param.grad is not None
    assert float(param.grad[0]) == (4.0 if supports else 1.0)


@needs_scaler
def test_fused_optimizers_of_torch_say_that_they_unscale_in_the_kernel() -> None:
    fused = torch.optim.AdamW([a_param()], fused=True)
    assert vars(fused)["_step_supports_amp_scaling"] is True
    assert not getattr(torch.optim.AdamW([a_param()]), "_step_supports_amp_scaling", False)


# Tensors


def test_version_counts_writes_in_place_but_not_through_data() -> None:
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1
    tensor.data.add_(1)
    assert tensor._version == before + 1


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_sharded_tensors_keep_their_part_under_this_name() -> None:
    # Not read from its source: annotations and constructors have moved between releases.
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:
        from torch.distributed._tensor import DTensor
    assert "_local_tensor" in DTensor.__slots__


def test_dispatch_modes_see_every_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    assert torch.ops.aten.bmm in seen


def test_is_compiling_is_false_outside_of_dynamo() -> None:
    assert _torch.is_compiling() is False


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop])
def test_capture_check_is_what_a_step_asks_once(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """If the check were renamed, every unit would pay for it; if a step did more by that name, it would be lost."""
    name = _torch.capture_check(optimizer_class)
    assert name is not None
    param = torch.nn.Parameter(torch.ones(2))
    opt = optimizer_class([param], lr=0.1)  # type: ignore[call-arg]
    asked: list[int] = []
    setattr(opt, name, lambda: asked.append(1))
    param.grad = torch.ones(2)
    opt.step()
    assert len(asked) <= 1
    assert optimizer_class not in (torch.optim.Adam, torch.optim.AdamW) or asked == [1]
    assert getattr(torch.optim.Adam, name)(torch.optim.Adam([param])) is None
