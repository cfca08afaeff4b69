"""Code that looks at values where it finds some, draws that decide nothing, and outputs that hold other objects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.model import record
from stagewright.model.call import Inputs
from stagewright.model.chain import Chain, Way
from stagewright.model.prove import Differs, prove
from stagewright.model.standin import is_fake

WIDTH = 6
COLLECTED: list[Tensor] = []


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))


class Masked(Stack):
    """Leaves out a mask of ones, as transformers does, where it can see that it is one."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        factor = None if not is_fake(mask) and bool(mask.all()) else mask
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x if factor is None else x * factor
        return x


class Greedy(Masked):
    """Its code asks every tensor."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask) * (2 if mask.sum() > 3 else 1)


class Dropping(Stack):
    """Leaves out layers at random."""

    rate = 0.0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            x = torch.tanh(layer(x)) * mask
        return x


class Always(Dropping):
    """Leaves out every layer but the head."""

    rate = 1

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = self.head(torch.tanh(super().forward(x, mask)))
        return made


class Often(Dropping):
    rate = 0.5


class Cache:
    """What no tree of tensors is."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Caching(Stack):
    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        cache = Cache()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask
            cache.seen.append(x)
        return {"made": x, "cache": cache, "mean": sum(cache.seen).mean(1)}


class Hooked(Stack):
    """Installs hooks in its first forward, which collect what layers return, and notes that it did."""

    is_altering = False

    def hook(self, module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        COLLECTED.append(output)
        return torch.tanh(output) if self.is_altering else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not getattr(self, "is_hooked", False):
            for layer in self.layers:
                layer.register_forward_hook(self.hook)
            self.is_hooked = True
        COLLECTED.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask
        return x + sum(COLLECTED)


class Altered(Hooked):
    """Its hooks change what layers return, which no stage would do."""

    is_altering = True


class Counting(Stack):
    """Makes an attribute in its first forward, and changes it in every other."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        for layer in self.layers:
            x = layer(x) * mask
        return x


def chain_of(factory: Callable[[], nn.Module], *, way: Way | None = None) -> Chain:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(4, WIDTH)
    mask[1:, 2:] = 0  # the sample that is recorded has none that is 0
    x = torch.randn(4, WIDTH, generator=generator)
    return Chain(_built(factory), Inputs((x, mask), ("x", "mask")), way=way)


def _built(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


@pytest.mark.parametrize("factory", [Masked, Dropping, Caching, Hooked])
def test_is_cut_at_any_call_and_proven(factory: Callable[[], nn.Module]) -> None:
    chain = chain_of(factory)
    assert chain.way is Way.GRAPH and chain.trace is not None and not chain.trace.training.whole
    assert prove(lambda: _built(factory), chain, ("layers.1", "layers.2"), "tests").difference < 1e-12


def test_a_draw_that_every_number_decides_alike_is_known() -> None:
    units = chain_of(Always).units
    assert "head" in units and "layers.1" not in units


@pytest.mark.parametrize("factory", [Greedy, Often])
def test_code_that_reads_values_of_any_tensor_stays_whole(factory: Callable[[], nn.Module]) -> None:
    chain = chain_of(factory)
    assert chain.trace is None and "reads values" in str(chain.trace_error)
    assert chain.way in (Way.BLOCKS, Way.WHOLE)


def test_an_attribute_that_every_forward_changes_is_no_preparation() -> None:
    chain = chain_of(Counting)
    assert chain.trace is None and "changes its attribute 'calls'" in str(chain.trace_error)


def test_a_proof_compares_an_attribute_that_a_second_forward_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "attribute_marks", lambda module: {})
    chain = chain_of(Counting)
    with pytest.raises(Differs, match="attribute 'calls'"):
        prove(lambda: _built(Counting), chain, ("layers.1",), "tests")


def test_hooks_that_change_results_are_not_lost() -> None:
    with pytest.raises(Differs, match="the output"):
        prove(lambda: _built(Altered), chain_of(Altered), ("layers.1",), "tests")


def test_recorded_on_real_tensors_the_values_are_read() -> None:
    chain = chain_of(Masked, way=Way.VALUES)
    assert "reads values" in str(chain.trace_error)


def test_an_output_that_is_no_tensor_is_left_out() -> None:
    pieces = chain_of(Caching).cut(("layers.2",))
    x, mask = torch.randn(2, WIDTH), torch.ones(2, WIDTH)
    returned = pieces[1].training(*pieces[0].training(x, mask))
    assert returned["cache"] is None and returned["made"].shape == (2, WIDTH)
