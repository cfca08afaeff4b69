"""What analysis and evaluation leave behind: nothing."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from stagewright.model.standin import analysing, copied, stand_ins, twin_of, unchanged_state


class Stateful(nn.Module):
    """Each forward changes a buffer in place, replaces another, counts, and appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.steps = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.moved += 1
        self.replaced = self.replaced + 1
        self.steps += 1
        self.seen.append(self.steps)
        self.late = True
        return x


def state(model: Stateful) -> tuple[object, ...]:
    numbers = model.moved.tolist(), model.replaced.tolist(), model.steps, list(model.seen)
    return *numbers, model.training, set(vars(model))


def test_a_context_puts_modes_buffers_and_attributes_back() -> None:
    model = Stateful()
    buffers, before = dict(model.named_buffers()), state(model)
    with unchanged_state((model,)):
        model.eval()
        model(torch.ones(1))
        assert state(model) != before
    assert state(model) == before
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())


def test_a_twin_shares_tensors_and_nothing_else() -> None:
    model = Stateful()
    twin = twin_of(model)
    assert twin.moved is model.moved
    with stand_ins((twin,), copied):
        twin(torch.ones(1))
    assert model.steps == 0 and model.seen == [] and model.moved.tolist() == [0, 0]


def test_analysis_draws_no_number_of_the_users() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with analysing():
        random.random(), np.random.rand(), torch.rand(1)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
