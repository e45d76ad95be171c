"""Whole training programs as people write them: the same weights, with only the optimizer's line changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs import OPTIMIZERS, Make, Program, assert_same_run
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

IDLE = "ignore:opt.step\\(\\) ended a round"


def batches(count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def step(model: nn.Module, opt: Any, data: torch.Tensor) -> torch.Tensor:
    opt.zero_grad()
    loss: torch.Tensor = model(data).square().mean()
    loss.backward()
    opt.step()
    return loss


def perceptron(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def gan(make: Make) -> Iterator[Any]:
    """Each network is frozen while the loss of the other one passes through it."""
    generator, critic = nn.Linear(2, 3), perceptron()
    gen_opt, critic_opt = make(generator.parameters()), make(critic.parameters())
    for noise, real in zip(batches(4, 6, 2), batches(4, 6, 3)):
        critic_opt.zero_grad()
        (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
        critic_opt.step()
        gen_opt.zero_grad()
        critic.requires_grad_(False)
        (-critic(generator(noise)).mean()).backward()
        critic.requires_grad_(True)
        gen_opt.step()
        yield generator, critic, gen_opt, critic_opt


def wasserstein_gan_with_penalty(make: Make) -> Iterator[Any]:
    critic = perceptron()
    opt = make(critic.parameters())
    for real, fake in zip(batches(4, 6, 3), batches(8, 6, 3)[4:]):
        opt.zero_grad()
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        opt.step()
        yield opt


def moving_average_of_weights(make: Make) -> Iterator[Any]:
    model = perceptron()
    average = copy.deepcopy(model).requires_grad_(False)
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        step(model, opt, data)
        for mean, param in zip(average.parameters(), model.parameters()):
            mean.lerp_(param.detach(), 0.1)
        yield model, average


def recurrent(make: Make) -> Iterator[Any]:
    model, head = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(8, 1)
    opt = make([*model.parameters(), *head.parameters()])
    hidden: Any = None
    for data in batches(4, 2, 5, 3):
        opt.zero_grad()
        output, hidden = model(data, hidden)
        hidden = tuple(value.detach() for value in hidden)
        head(output).square().mean().backward()
        opt.step()
        yield opt


def recurrent_by_hand(make: Make) -> Iterator[Any]:
    """One cell used many times in a graph: its gradient is complete only at the end."""
    cell = nn.GRUCell(3, 4)
    opt = make(cell.parameters())
    for data in batches(3, 6, 2, 3):
        opt.zero_grad()
        hidden = torch.zeros(2, 4)
        for piece in data:
            hidden = cell(piece, hidden)
        hidden.square().mean().backward()
        opt.step()
        yield opt


def dense_embedding_with_max_norm(make: Make) -> Iterator[Any]:
    embedding, out = nn.Embedding(9, 4, padding_idx=0, max_norm=1.0), nn.Linear(4, 9)
    opt = make([*embedding.parameters(), *out.parameters()])
    for first in range(4):
        tokens = torch.tensor([[first, 0, 8], [first + 1, 2, 2]])
        opt.zero_grad()
        out(embedding(tokens)).logsumexp(-1).mean().backward()
        opt.step()
        yield opt


def weight_normalised(make: Make) -> Iterator[Any]:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 1))
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        step(model, opt, data)
        yield opt


def weight_normalised_the_old_way(make: Make) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 1))
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        step(model, opt, data)
        yield opt


def spectrally_normalised(make: Make) -> Iterator[Any]:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 1))
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        step(model, opt, data)
        yield model, opt


def orthogonal(make: Make) -> Iterator[Any]:
    model = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        step(model, opt, data)
        yield opt


def functional_call(make: Make) -> Iterator[Any]:
    model = perceptron()
    weights = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    opt = make(weights.values())
    for data in batches(4, 6, 3):
        opt.zero_grad()
        torch.func.functional_call(model, weights, (data,)).square().mean().backward()
        opt.step()
        yield opt


def gradients_by_functional_transform(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        weights = dict(model.named_parameters())

        def loss(values: Any, data: torch.Tensor = data) -> torch.Tensor:
            return torch.func.functional_call(model, values, (data,)).square().mean()

        grads = torch.func.grad(loss)({name: param.detach() for name, param in weights.items()})
        for name, param in weights.items():
            param.grad = grads[name]
        opt.step()
        opt.zero_grad()
        yield opt


def meta_learning(make: Make) -> Iterator[Any]:
    """An inner step on fast weights, and the outer gradient through it."""
    model = perceptron()
    opt = make(model.parameters())
    for support, query in zip(batches(3, 6, 3), batches(6, 6, 3)[3:]):
        opt.zero_grad()
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (support,)).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: param - 0.1 * grad for (name, param), grad in zip(weights.items(), grads)}
        torch.func.functional_call(model, fast, (query,)).square().mean().backward()
        opt.step()
        yield opt


def data_parallel(make: Make) -> Iterator[Any]:
    model = nn.DataParallel(perceptron())
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        step(model, opt, data)
        yield opt


def lazy(make: Make) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(1))
    model(torch.zeros(1, 3))
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        step(model, opt, data)
        yield opt


def checkpointed_sequential(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        opt.zero_grad()
        checkpoint_sequential(model, 2, data, use_reentrant=False).square().mean().backward()
        opt.step()
        yield opt


def checkpointed_reentrantly(make: Make) -> Iterator[Any]:
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)) for _ in range(3)])
    opt = make(blocks.parameters())
    for data in batches(4, 6, 3):
        opt.zero_grad()
        value = data.requires_grad_()
        for block in blocks:
            value = checkpoint(block, value, use_reentrant=True)
        value.square().mean().backward()
        opt.step()
        yield opt


def transformer(make: Make) -> Iterator[Any]:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    opt = make(model.parameters())
    for data in batches(3, 2, 4, 8):
        step(model, opt, data)
        yield opt


def convolution_with_batch_norm(make: Make) -> Iterator[Any]:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    opt = make(model.parameters())
    for data in batches(4, 5, 1, 4, 4):
        step(model, opt, data)
        yield model, opt


def decay_for_some_parameters(make: Make) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    decays = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    opt = make([{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    for data in batches(4, 6, 3):
        step(model, opt, data)
        yield opt


def layers_unfrozen_one_by_one(make: Make) -> Iterator[Any]:
    model: Any = perceptron()
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    opt = make(model.parameters())
    for number, data in enumerate(batches(6, 6, 3)):
        if number == 2:
            model[2].requires_grad_(True)
        if number == 4:
            model[0].requires_grad_(True)
        step(model, opt, data)
        yield opt


def resumed_in_another_program(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(3, 6, 3):
        step(model, opt, data)
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    yield saved["opt"]
    resumed = perceptron()
    resumed.load_state_dict(saved["model"])
    again = make(resumed.parameters())
    again.load_state_dict(saved["opt"])
    for data in batches(3, 6, 3):
        yield step(resumed, again, data), again


def validation_between_steps(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        model.train()
        step(model, opt, data)
        model.eval()
        with torch.no_grad():
            yield model(data)


def contrastive_with_a_momentum_encoder(make: Make) -> Iterator[Any]:
    online = perceptron()
    target = copy.deepcopy(online).requires_grad_(False)
    opt = make(online.parameters())
    for data in batches(4, 6, 3):
        opt.zero_grad()
        both = online(data) * target(data.flip(0)) + online(data.flip(0)) * target(data)
        both.mean().backward()
        opt.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        yield online, target


def several_losses_summed(make: Make) -> Iterator[Any]:
    trunk, heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])
    opt = make([*trunk.parameters(), *heads.parameters()])
    for data in batches(4, 6, 3):
        opt.zero_grad()
        torch.stack([head(trunk(data)).square().mean() for head in heads]).sum().backward()
        opt.step()
        yield opt


def autocast(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data).float().square().mean()
        loss.backward()
        opt.step()
        yield opt


def anomaly_detection(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(3, 6, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True):
                step(model, opt, data)
        yield opt


def saved_tensors_offloaded(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(3, 6, 3):
        with torch.autograd.graph.save_on_cpu():
            step(model, opt, data)
        yield opt


def gradient_of_the_input_as_well(make: Make) -> Iterator[Any]:
    """Adversarial training: the input's gradient comes from a pass of its own, the weights' from the next."""
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        inputs = data.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).square().mean(), inputs)
        step(model, opt, data + 0.1 * slope.sign())
        inputs = data.clone().requires_grad_()
        opt.zero_grad()
        model(inputs).square().mean().backward()
        opt.step()
        yield opt, inputs.grad


def attack_by_backward_for_the_input_only(make: Make) -> Iterator[Any]:
    model = perceptron()
    opt = make(model.parameters())
    for data in batches(4, 6, 3):
        inputs = data.clone().requires_grad_()
        model(inputs).square().mean().backward(inputs=[inputs])
        assert inputs.grad is not None
        step(model, opt, data + 0.1 * inputs.grad.sign())
        yield opt


def channels_last_weights(make: Make) -> Iterator[Any]:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 1)).to(memory_format=torch.channels_last)
    opt = make(model.parameters())
    for data in batches(3, 2, 2, 4, 4):
        step(model, opt, data)
        yield opt


def parameters_of_size_zero_and_scalars(make: Make) -> Iterator[Any]:
    scale, empty, weight = (
        nn.Parameter(torch.tensor(2.0)),
        nn.Parameter(torch.empty(0, 3)),
        nn.Parameter(torch.ones(3)),
    )
    opt = make([scale, empty, weight])
    for data in batches(3, 4, 3):
        opt.zero_grad()
        ((scale * data * weight).square().mean() + empty.sum()).backward()
        opt.step()
        yield opt


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        gan,
        wasserstein_gan_with_penalty,
        moving_average_of_weights,
        recurrent,
        recurrent_by_hand,
        dense_embedding_with_max_norm,
        weight_normalised,
        weight_normalised_the_old_way,
        spectrally_normalised,
        orthogonal,
        functional_call,
        gradients_by_functional_transform,
        meta_learning,
        data_parallel,
        lazy,
        checkpointed_sequential,
        checkpointed_reentrantly,
        transformer,
        convolution_with_batch_norm,
        decay_for_some_parameters,
        layers_unfrozen_one_by_one,
        resumed_in_another_program,
        validation_between_steps,
        contrastive_with_a_momentum_encoder,
        several_losses_summed,
        autocast,
        anomaly_detection,
        saved_tensors_offloaded,
        gradient_of_the_input_as_well,
        attack_by_backward_for_the_input_only,
        channels_last_weights,
        parameters_of_size_zero_and_scalars,
    )
}


@pytest.mark.filterwarnings("error", IDLE, "ignore:.*MHA.*", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_the_same_bits(name: str, optimizer: str) -> None:
    assert_same_run(PROGRAMS[name], OPTIMIZERS[optimizer])
