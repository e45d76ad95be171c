"""The training script of Accelerate's own guide, with any optimizer, in one process or several."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from ranks import forget_accelerators, join, sent
from tiny_gpt2 import MakeOptimizer, Outcome, decay_groups, sentences, tiny_gpt2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


def prepared(make: MakeOptimizer, groups: bool = False, rows: int = 20, **options: Any) -> tuple[Any, ...]:
    """An accelerator and what a script prepares with it; the optimizer is built first, as scripts do."""
    forget_accelerators()
    accelerator = Accelerator(cpu=True, **options)
    model = tiny_gpt2()
    opt = make(
        decay_groups(model) if groups else model.parameters(),
        lr=1e-2,
        accumulate_when=lambda: not accelerator.gradient_state.sync_gradients,
    )
    loader = DataLoader(sentences(rows), batch_size=2)  # type: ignore[arg-type]
    scheduler = LambdaLR(opt, lambda step: 1 / (1 + step))
    return accelerator, opt, *accelerator.prepare(model, opt, loader, scheduler)


def train(make: MakeOptimizer, epochs: int = 1, **options: Any) -> Outcome:
    """The loop of Accelerate's own guide."""
    accelerator, opt, model, optimizer, loader, scheduler = prepared(make, **options)
    run = Outcome(accelerator.unwrap_model(model), opt)
    torch.manual_seed(1)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.note()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.losses.append(loss.item())
    return run


def train_on_rank(rank: int, make: MakeOptimizer, steps: int) -> dict[str, Any]:
    """The same loop as one of two ranks."""
    join(rank)
    return sent(train(make, epochs=2, gradient_accumulation_steps=steps))


def train_sharded_on_rank(rank: int, make: MakeOptimizer) -> dict[str, Any]:
    """What ``prepare`` does with FSDP2, which it offers on accelerators only, and a loop."""
    join(rank)
    model = tiny_gpt2(tied=False)
    opt = make(decay_groups(model), lr=1e-2)
    optimizer = Accelerator(cpu=True).prepare(opt)
    old = {name: param.data_ptr() for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            stand_in = torch.empty(1)
            stand_in.data_ptr = param.data_ptr()  # type: ignore[method-assign,assignment]
            group["params"][index] = stand_in
    mesh = init_device_mesh("cpu", (2,))
    for block in (*model.transformer.h, model):
        fully_shard(block, mesh=mesh)
    new = dict(model.named_parameters())
    fsdp2_switch_optimizer_parameters(optimizer, {address: new[name] for name, address in old.items()})
    run = Outcome(model, opt)
    torch.manual_seed(rank)
    for row in sentences(6, seed=rank):
        loss = model(**{key: value[None] for key, value in row.items()}).loss
        loss.backward()
        run.losses.append(loss.item())
        run.note()
        optimizer.step()
        optimizer.zero_grad()
    return sent(run)
