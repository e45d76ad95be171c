"""Where a training loop is: which phase, and in which module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ._storages import tensors_in

FORWARD, BACKWARD, STEP, FUSED_STEP = "forward", "backward", "optimizer step", "optimizer step in backward"

_MARK = "fused_optim.memory"


class _Position:
    """The names that hooks write. Hooks on a graph that outlives the recording hold this and no more."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.backward = ""
        self.steps = 0

    def set_backward(self, name: str, _: object) -> None:
        self.backward = name


class Places:
    """Follows modules and optimizer steps by hooks, while attached."""

    def __init__(self, model: torch.nn.Module, after_step: Callable[[], None]) -> None:
        """Prepares the hooks, without attaching them.

        Args:
            model: the model whose modules are named.
            after_step: called before and after each ``step()`` of any optimizer.
        """
        self._model = model
        self._after_step = after_step
        self._position = _Position()
        self._handles: list[Any] = []
        self._fused_step = False

    def attach(self) -> None:
        """Registers all hooks; `detach` undoes it, also after an error half way."""
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving(name)))
        self._handles.append(register_optimizer_step_pre_hook(self._step_begins))
        self._handles.append(register_optimizer_step_post_hook(self._step_ends))

    def detach(self) -> None:
        """Removes every hook."""
        while self._handles:
            self._handles.pop().remove()

    def phase(self, touches_parameters: bool) -> str:
        """Names the phase of the operation that has just run.

        Args:
            touches_parameters: whether the operation reads or writes a parameter or optimizer state.
        """
        if _graph_task() == -1:
            self._fused_step = False
            return STEP if self._position.steps and not torch.is_grad_enabled() else FORWARD
        # The engine's own work on a leaf reads gradients only. Whoever touches a parameter there, or in a
        # callback at the end of backward (which has no node), is an optimizer that steps in a hook.
        at_leaf = _node_name() in ("torch::autograd::AccumulateGrad", "")
        self._fused_step = at_leaf and (self._fused_step or touches_parameters)
        return FUSED_STEP if self._fused_step else BACKWARD

    def module(self, phase: str) -> str:
        """Names the module that is running in forward or backward; empty outside the model."""
        if self._position.stack:
            return self._position.stack[-1]
        return self._position.backward if phase == BACKWARD else ""

    def _entering(self, name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        position = self._position

        def enter(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            if not name:
                # A forward or step that raised leaves its names behind; the next one starts afresh.
                position.stack.clear()
                position.steps = 0
            # Backward leaves this module through the node that made its input, which the surrounding module
            # owns.
            _mark(inputs, position.stack[-1] if position.stack else "", position)
            position.stack.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        position = self._position

        def leave(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
            while position.stack and position.stack.pop() != name:
                pass
            _mark(output, name, position)

        return leave

    def _step_begins(self, *_: object) -> None:
        self._position.steps += 1
        self._after_step()

    def _step_ends(self, *_: object) -> None:
        self._position.steps = max(0, self._position.steps - 1)
        self._after_step()


def _mark(value: object, name: str, position: _Position) -> None:
    for node in _nodes(value):
        if node.metadata.get(_MARK) is position:
            continue
        node.metadata[_MARK] = position
        node.register_prehook(_Arrival(name, position))


class _Arrival:
    """Called by the engine before it runs a node: backward has reached the module ``name``."""

    def __init__(self, name: str, position: _Position) -> None:
        self._name = name
        self._position = position

    def __call__(self, gradients: object) -> None:
        self._position.set_backward(self._name, gradients)


def _nodes(value: object) -> Iterator[Any]:
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:
            yield tensor.grad_fn


def _graph_task() -> int:
    # No public name says whether the engine is running backward on this thread; -1 says that it is not.
    return int(torch._C._current_graph_task_id())


def _node_name() -> str:
    # No public name says which node the engine is running; None is a callback between nodes.
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())
