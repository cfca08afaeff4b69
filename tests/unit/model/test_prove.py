"""The proof of a cut, attacked: faults are put into recording and cutting, and none may pass."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import dropout, leaky_relu

from stagewright.errors import UserError
from stagewright.model import blocks, prove, record, slice, trace
from stagewright.model.chain import Chain, Way
from stagewright.model.prove import Differs, Proof
from stagewright.model.recording import Assign, Recording

Patch = pytest.MonkeyPatch
WIDTH = 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    """A fault changes no file, so a proof of the right code would be found for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def right() -> set[object]:
    """The models that were proven without a fault."""
    return set()


def example() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def prove_cut(factory: Callable[[], nn.Module], cuts: Sequence[str], *, way: Way | None = None) -> Proof:
    """Cut and prove a model; another way of cutting than the one asked for is an error."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return factory()

    chain = Chain(build(), example(), way=way)
    assert way is None or chain.way is way
    return prove.prove(build, chain, chain.by_names(cuts), "tests")


# --- The models that are cut ------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Two blocks and a head; most models below override `between`, which runs in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(WIDTH, 3)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.between(self.first(x))))


def between(function: Callable[[Any, Tensor], Tensor]) -> type[Stack]:
    """Two blocks and a head with this between the blocks."""
    return type("Between", (Stack,), {"between": function})


Noisy = between(lambda self, x: x + torch.randn(WIDTH, dtype=x.dtype))
TwoDraws = between(lambda self, x: x * torch.rand(WIDTH, dtype=x.dtype) + torch.randn(WIDTH, dtype=x.dtype))
Dropping = between(lambda self, x: dropout(x, 0.3, self.training))


class Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class FrozenNorm(Normed):
    """Its author keeps BatchNorm in evaluation mode."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


class Averaging(Stack):
    """Keeps a moving mean, in place or by assignment, and adds it."""

    mean: Tensor

    def __init__(self, *, assigns: bool = True) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        new = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.assigns:
            self.mean = new
        else:
            self.mean.copy_(new)
        return x + self.mean


class Ungraded(Stack):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first.linear(x)
        return x * scale


Detached = between(lambda self, x: x * x.detach())


class Autocast(Stack):
    """A part in bfloat16, of single precision: autocast leaves double precision alone."""

    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.first.linear(x).to(x.dtype)


class Sized(Stack):
    """The number of samples is part of what it computes."""

    def between(self, x: Tensor) -> Tensor:
        return x / x.shape[0] + torch.arange(x.shape[0])[:, None]


class Skipping(Stack):
    """Two tensors of one shape cross the cut."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        kept = torch.sin(y)
        return self.head(self.second(y) - 2 * kept)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


Reversed = between(lambda self, x: Reversal.apply(x))


class InPlace(Stack):
    """A view reads what is changed in place later."""

    def between(self, x: Tensor) -> Tensor:
        y = 1.0 * x
        half = y[:, : WIDTH // 2]
        y.mul_(2.0)
        return y + torch.cat((half, half), 1)


Leaky = between(lambda self, x: leaky_relu(x, negative_slope=0.3))


class Hooked(Stack):
    """Hooks of the author's own: one changes an output, one a gradient."""

    def __init__(self, *, is_backward: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        if is_backward:
            self.first.register_full_backward_hook(lambda module, given, made: (3.0 * given[0],))
        else:
            self.first.register_forward_hook(lambda module, given, made: 3.0 * made)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class ZeroGate(Stack):
    """A branch behind a gate that is zero and stays so: with the initial weights it changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()), requires_grad=False)

    def between(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.sigmoid(x)


class Tied(Stack):
    """Two layers of one stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.linear.weight

    def between(self, x: Tensor) -> Tensor:
        return self.tied(x)


class Branching(Stack):
    """Which branch runs depends on values: not for copies of one sample, but for different ones."""

    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) if bool((x[0] - x[-1]).abs().max() > 1e-3) else x

    def __init__(self) -> None:
        super().__init__()
        self.branch = self.Branch()

    def between(self, x: Tensor) -> Tensor:
        return self.branch(x)


class Blocks(nn.Module):
    """Whose code can't be recorded, so that it is cut between blocks; its stem draws and keeps statistics."""

    def __init__(self, *, is_pair: bool = False) -> None:
        super().__init__()
        self.is_pair = is_pair
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.blocks = nn.ModuleList(Pairing() if is_pair else Dropped() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) == 12345.0:
            raise ValueError("the code reads a value")
        x = dropout(self.norm(x), 0.3, self.training)
        if not self.is_pair:
            for block in self.blocks:
                x = block(x)
            return self.head(x)
        y = torch.cos(x)
        for block in self.blocks:
            x, y = block(x, y)
        return self.head(x - 2 * y)


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(super().forward(x), 0.3, self.training)


class Pairing(Block):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x) + y, torch.sin(y)


# --- Faults -----------------------------------------------------------------------------------------------------------


@dataclass
class Hits:
    """How often a fault was put in: one that never was proves nothing."""

    count: int = 0


Fault = Callable[[Patch, Hits], None]


def in_recording(change: Callable[[Recording], bool], *, training: bool = True, evaluation: bool = True) -> Fault:
    """Change what was recorded; `change` says whether it found what it changes."""

    def put_in(patch: Patch, hits: Hits) -> None:
        original = trace.record

        def faulty(*args: Any, **kwargs: Any) -> Recording:
            made = original(*args, **kwargs)
            if training if kwargs["training"] else evaluation:
                hits.count += change(made)
            return made

        patch.setattr(trace, "record", faulty)

    return put_in


def nodes(recording: Recording, name: str) -> list[fx.Node]:
    """The calls of a function, method or module."""
    return [
        node
        for node in recording.graph.nodes
        if name in (node.target, getattr(node.target, "__name__", None)) and node.op.startswith("call_")
    ]


def node(recording: Recording, name: str) -> fx.Node | None:
    return next(iter(nodes(recording, name)), None)


def drop(name: str) -> Callable[[Recording], bool]:
    """Use a call's first argument in place of its result."""

    def change(recording: Recording) -> bool:
        if (call := node(recording, name)) is None:
            return False
        call.replace_all_uses_with(call.args[0])  # type: ignore[arg-type]
        recording.graph.erase_node(call)
        return True

    return change


def repeat(name: str) -> Callable[[Recording], bool]:
    """Run a call twice."""

    def change(recording: Recording) -> bool:
        if (call := node(recording, name)) is None:
            return False
        with recording.graph.inserting_before(call):
            again = recording.graph.node_copy(call, lambda argument: argument)
        again.meta = dict(call.meta)
        return True

    return change


def set_argument(name: str, index: int, value: Any) -> Callable[[Recording], bool]:
    def change(recording: Recording) -> bool:
        if (call := node(recording, name)) is None:
            return False
        call.update_arg(index, value)
        return True

    return change


def freeze(name: str) -> Callable[[Recording], bool]:
    """Keep the numbers of a draw as a constant."""

    def change(recording: Recording) -> bool:
        if (call := node(recording, name)) is None:
            return False
        recording.constants["_constant_9"] = torch.randn(WIDTH, dtype=torch.float64)
        with recording.graph.inserting_before(call):
            call.replace_all_uses_with(recording.graph.get_attr("_constant_9"))
        recording.graph.erase_node(call)
        return True

    return change


def swap_order(one: str, other: str) -> Callable[[Recording], bool]:
    def change(recording: Recording) -> bool:
        first, second = node(recording, one), node(recording, other)
        if first is None or second is None:
            return False
        first.prepend(second)
        return True

    return change


def skip_assignments(recording: Recording) -> bool:
    found = bool(recording.assigned)
    recording.assigned.clear()
    return found


def assign_the_old(recording: Recording) -> bool:
    """The buffer gets another value than the one it was given."""
    found = bool(recording.assigned)
    recording.assigned = [replace_value(recording, made) for made in recording.assigned]
    return found


def replace_value(recording: Recording, made: Assign) -> Assign:
    return replace(made, value=nodes(recording, "mean")[-1])


def ignore_contexts(recording: Recording) -> bool:
    """As if there were neither `no_grad` nor autocast."""
    within = [call for call in recording.graph.nodes if call.meta.get("context") is not None]
    for call in within:
        call.meta["context"] = None
    return bool(within)


def add_context(name: str) -> Callable[[Recording], bool]:
    def change(recording: Recording) -> bool:
        if (call := node(recording, name)) is None:
            return False
        call.meta["context"] = record.Context(grad=False, autocast=None)
        return True

    return change


def freeze_sizes(recording: Recording) -> bool:
    """Keep the number of samples of the recording."""
    found = [call for call in recording.graph.nodes if call.target is trace.affine]
    for call in found:
        call.replace_all_uses_with(trace.SIZES[0])  # type: ignore[arg-type]
    return bool(found)


def wrong_sizes(recording: Recording) -> bool:
    found = [call for call in recording.graph.nodes if call.target is trace.affine]
    for call in found:
        call.update_arg(1, 2 * call.args[1])  # type: ignore[operator]
    return bool(found)


def use_another(of: str, instead: str) -> Callable[[Recording], bool]:
    """Call another module than the author does."""

    def change(recording: Recording) -> bool:
        if (call := node(recording, of)) is None:
            return False
        call.target = instead
        return True

    return change


def view_in_place_of_function(recording: Recording) -> bool:
    """Record what an autograd function computes, without its backward."""
    found = [call for call in recording.graph.nodes if "Reversal" in str(call.target)]
    for call in found:
        call.target = torch.clone
    return bool(found)


def out_of_place(recording: Recording) -> bool:
    if (call := node(recording, "mul_")) is None:
        return False
    call.target = "mul"
    (joined,) = nodes(recording, "add")[-1:] or (None,)
    assert joined is not None
    for user in nodes(recording, "add"):
        user.replace_input_with(call.args[0], call)  # type: ignore[arg-type]
    return True


def lose_keywords(name: str) -> Callable[[Recording], bool]:
    def change(recording: Recording) -> bool:
        if (call := node(recording, name)) is None:
            return False
        call.kwargs = {}
        call.args = call.args[:1]
        return True

    return change


def of_twins(change: Callable[[nn.Module], None]) -> Fault:
    """Change the copy of the model that is recorded."""

    def put_in(patch: Patch, hits: Hits) -> None:
        original = trace.twin_of

        def faulty(*args: Any) -> nn.Module:
            twin = original(*args)
            change(twin)
            hits.count += 1
            return twin

        patch.setattr(trace, "twin_of", faulty)

    return put_in


def lose_hooks(twin: nn.Module) -> None:
    for module in twin.modules():
        module._forward_hooks.clear()
        module._backward_hooks.clear()


def in_parts(change: Callable[[fx.Graph, fx.Node], None]) -> Fault:
    """Change what every stage but the last returns."""

    def put_in(patch: Patch, hits: Hits) -> None:
        original = slice._Slice.part

        def faulty(self: Any, own: Any, inputs: Any, outputs: Any) -> Any:
            part = original(self, own, inputs, outputs)
            if outputs is not None:
                graph = part.module.graph
                (returned,) = (call for call in graph.nodes if call.op == "output")
                with graph.inserting_before(returned):
                    change(graph, returned)
                part.module.recompile()
                hits.count += 1
            return part

        patch.setattr(slice._Slice, "part", faulty)

    return put_in


def swap_values(graph: fx.Graph, returned: fx.Node) -> None:
    values = returned.args[0]
    assert isinstance(values, tuple)
    assert len(values) == 2
    returned.args = (tuple(reversed(values)),)


def detach_values(graph: fx.Graph, returned: fx.Node) -> None:
    returned.args = (tuple(graph.call_method("detach", (value,)) for value in returned.args[0]),)  # type: ignore[union-attr]


def round_values(graph: fx.Graph, returned: fx.Node) -> None:
    def rounded(value: Any) -> fx.Node:
        return graph.call_method("double", (graph.call_method("float", (value,)),))

    returned.args = (tuple(map(rounded, returned.args[0])),)  # type: ignore[arg-type]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """Replace a function of the package by one made from it."""

    def put_in(patch: Patch, hits: Hits) -> None:
        original = make(getattr(owner, name))

        def faulty(*args: Any, **kwargs: Any) -> Any:
            hits.count += 1
            return original(*args, **kwargs)

        patch.setattr(owner, name, faulty)

    return put_in


def lose_live_value(original: Any) -> Any:
    def faulty(graph: Any, before: Any, after: Any, returned: Any) -> Any:
        live = original(graph, before, after, returned)
        return live[:-1] if len(live) > 1 else live

    return faulty


def another_stage_evaluates(original: Any) -> Any:
    """Stage 0 evaluates the second block too, whose parameters it never trains."""

    def faulty(units: Any, uses: Any, cuts: Any, homes: Any) -> list[int]:
        first, bound, last = original(units, uses, cuts, homes)
        return [first, bound + 2, last]

    return faulty


def copies(original: Any) -> Any:
    """Every use of a parameter or a module gets a copy of its own."""
    return lambda model, path: deepcopy(original(model, path))


def frozen(original: Any) -> Any:
    def faulty(model: nn.Module, path: str) -> Any:
        value = original(model, path)
        return deepcopy(value).requires_grad_(False) if path == "first.linear" else value

    return faulty


def all_train(original: Any) -> Any:
    return lambda model: dict.fromkeys(original(model), (True, False))


def nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def restores_nothing(original: Any) -> Any:
    return lambda model: lambda: None


def restores_generators_alone(original: Any) -> Any:
    def faulty(model: nn.Module) -> Callable[[], None]:
        return original(nn.Module())  # type: ignore[no-any-return]

    return faulty


def stubs_are_detached(original: Any) -> Any:
    def faulty(self: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        self._arrived = tuple(value.detach() for value in self._arrived)
        return original(self, index, *args, **kwargs)

    return faulty


def stubs_are_swapped(original: Any) -> Any:
    def faulty(self: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        self._arrived = tuple(reversed(self._arrived))
        return original(self, index, *args, **kwargs)

    return faulty


def a_block_is_skipped(original: Any) -> Any:
    def faulty(self: Any, model: Any, paths: Any, first: int, *rest: Any) -> None:
        original(self, model, paths, first, *rest)
        if first:
            model.get_submodule(paths[first]).forward = lambda x: x

    return faulty


def evaluation_as_training(patch: Patch, hits: Hits) -> None:
    original = trace.record

    def faulty(*args: Any, **kwargs: Any) -> Recording:
        hits.count += not kwargs["training"]
        return original(*args, **{**kwargs, "training": True})

    patch.setattr(trace, "record", faulty)


@dataclass(frozen=True)
class Case:
    """A model, a fault, and where the model is cut."""

    model: Callable[[], nn.Module]
    fault: Fault
    cuts: tuple[str, ...] = ("second",)
    way: Way | None = Way.GRAPH


def of_blocks(fault: Fault, *, is_pair: bool = False) -> Case:
    """A fault in stages that run the author's own code."""
    return Case(lambda: Blocks(is_pair=is_pair), fault, ("blocks.1", "blocks.2"), Way.BLOCKS)


FAULTS = {
    "a call is dropped": Case(Stack, in_recording(drop("tanh"))),
    "a residual is dropped": Case(Stack, in_recording(drop("add"))),
    "a call is dropped in evaluation alone": Case(Stack, in_recording(drop("tanh"), training=False)),
    "a constant is another": Case(Stack, in_recording(set_argument("mul", 1, 0.25))),
    "a keyword argument is lost": Case(Leaky, in_recording(lose_keywords("leaky_relu"))),
    "a draw is frozen": Case(Noisy, in_recording(freeze("randn"))),
    "two draws are swapped": Case(TwoDraws, in_recording(swap_order("rand", "randn"))),
    "a draw is made twice": Case(TwoDraws, in_recording(repeat("rand"))),
    "a module runs twice": Case(Normed, in_recording(repeat("norm"))),
    "an assignment of a buffer is skipped": Case(Averaging, in_recording(skip_assignments)),
    "a buffer gets another value": Case(Averaging, in_recording(assign_the_old)),
    "an assigned buffer stays what it was": Case(Averaging, replaced(slice.Assigner, "forward", nothing)),
    "a change in place of a buffer is dropped": Case(
        lambda: Averaging(assigns=False), in_recording(drop("copy_"), evaluation=False)
    ),
    "no_grad is lost": Case(Ungraded, in_recording(ignore_contexts)),
    "no_grad is added": Case(Stack, in_recording(add_context("tanh"))),
    "a detach is dropped": Case(Detached, in_recording(drop("detach"))),
    "autocast is lost": Case(Autocast, in_recording(ignore_contexts)),
    "the number of samples is frozen": Case(Sized, in_recording(freeze_sizes)),
    "a size is another": Case(Sized, in_recording(wrong_sizes)),
    "a module is taken for another": Case(Stack, in_recording(use_another("second.linear", "first.linear"))),
    "a module is taken for another of its stage": Case(Tied, in_recording(use_another("tied", "first.linear"))),
    "the backward of a function is lost": Case(Reversed, in_recording(view_in_place_of_function)),
    "a change in place changes a copy": Case(InPlace, in_recording(out_of_place)),
    "a hook on a module is lost": Case(Hooked, of_twins(lose_hooks)),
    "a hook on a gradient is lost": Case(lambda: Hooked(is_backward=True), of_twins(lose_hooks)),
    "a branch behind a zero is dropped": Case(ZeroGate, in_recording(drop("sigmoid"))),
    "a value decides once for all": Case(Branching, replaced(record.Recorder, "_break", nothing)),
    "evaluation is recorded in training mode": Case(Dropping, evaluation_as_training),
    "boundary values are swapped": Case(Skipping, in_parts(swap_values)),
    "boundary values are detached": Case(Stack, in_parts(detach_values)),
    "boundary values are rounded": Case(Stack, in_parts(round_values)),
    "a boundary value is lost": Case(Skipping, replaced(slice, "_live", lose_live_value)),
    "another stage evaluates": Case(Stack, replaced(slice, "evaluation_bounds", another_stage_evaluates)),
    "a tie is lost": Case(Tied, replaced(slice, "_attribute", copies)),
    "a parameter is frozen": Case(Stack, replaced(slice, "_attribute", frozen)),
    "modes are not the author's": Case(FrozenNorm, replaced(trace, "modes_of", all_train)),
    "block stages restore nothing": of_blocks(replaced(blocks, "_restorer", restores_nothing)),
    "block stages restore no buffers": of_blocks(replaced(blocks, "_restorer", restores_generators_alone)),
    "block stages are detached": of_blocks(replaced(blocks.BlockStage, "_stub", stubs_are_detached)),
    "block stages swap what arrives": of_blocks(replaced(blocks.BlockStage, "_stub", stubs_are_swapped), is_pair=True),
    "a block stage skips a block": of_blocks(replaced(blocks.BlockStage, "__init__", a_block_is_skipped)),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=[name.replace(" ", "_") for name in FAULTS])
def test_a_fault_is_refused(case: Case, monkeypatch: Patch, tmp_path: Path, right: set[object]) -> None:
    if case.model not in right:
        assert prove_cut(case.model, case.cuts, way=case.way).difference < 1e-8
        right.add(case.model)
    hits = Hits()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "faulty"))
        case.fault(patch, hits)
        with pytest.raises((UserError, RuntimeError, AssertionError)):
            prove_cut(case.model, case.cuts, way=case.way)
    assert hits.count > 0


def test_zeros_are_proven_by_moving_them(monkeypatch: Patch) -> None:
    case = FAULTS["a branch behind a zero is dropped"]
    case.fault(monkeypatch, Hits())
    monkeypatch.setattr(prove, "_SEEDS", prove._SEEDS[:1])
    assert prove_cut(case.model, case.cuts).difference == 0


def test_a_difference_names_the_tensor_and_its_stage(monkeypatch: Patch) -> None:
    FAULTS["boundary values are detached"].fault(monkeypatch, Hits())
    with pytest.raises(Differs) as error:
        prove_cut(Stack, ("second",))
    assert "'first.linear.weight' of stage 0" in str(error.value)
    assert "\n" not in str(error.value)


# --- The cache --------------------------------------------------------------------------------------------------------


def test_a_proof_is_found_again() -> None:
    first, second = (prove_cut(Stack, ("second",)) for _ in range(2))
    assert not first.is_cached
    assert second == replace(first, is_cached=True)


@pytest.mark.parametrize("other", ["cuts", "model", "attribute", "identity", "torch", "sample"])
def test_a_proof_of_something_else_is_not_found(other: str, monkeypatch: Patch, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Stack()

    model, given = build(), example()
    first = prove.proof_key(Chain(model, given), ("second",), "tests:build")
    cuts, identity = ("second",), "tests:build"
    if other == "cuts":
        cuts = ("head",)
    elif other == "model":
        model = Leaky()
    elif other == "attribute":
        model.first.scale = 2.0  # type: ignore[union-attr]
    elif other == "identity":
        identity = "tests:another"
    elif other == "torch":
        monkeypatch.setattr(torch, "__version__", "1.0")
    else:
        given = torch.cat((given, given))[:, :WIDTH].double()
    second = prove.proof_key(Chain(model.double() if other == "sample" else model, given), cuts, identity)
    assert first != second


def test_a_proof_of_other_code_is_not_found(monkeypatch: Patch, tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    found = []
    for number in (1, 2):
        file.write_text(
            "from torch import nn\nclass Edited(nn.Sequential):\n"
            f"    def forward(self, x):\n        return super().forward(x) * {number}\n"
        )
        namespace: dict[str, Any] = {"__name__": "edited"}
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        monkeypatch.setitem(sys.modules, "edited", SimpleNamespace(**namespace, __file__=str(file)))
        model = namespace["Edited"](nn.Linear(WIDTH, 4), nn.Linear(4, 3))
        found.append(prove.proof_key(Chain(model, example()), ("1",), "edited:Edited"))
    assert found[0] != found[1]


def test_a_proof_of_code_that_is_in_no_file_is_not_kept(monkeypatch: Patch) -> None:
    """As that of a notebook, whose cells may hold other code the next time."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec("from torch import nn\nclass Net(nn.Sequential):\n    pass", namespace)
    monkeypatch.setitem(sys.modules, "notebook", SimpleNamespace(**namespace))
    model = namespace["Net"](nn.Linear(WIDTH, 4), nn.Linear(4, 3))
    assert prove.proof_key(Chain(model, example()), ("1",), "stagewright.objects:Net") is None


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"way": "graph"', "\0\1"])
def test_a_damaged_proof_is_made_again(text: str, tmp_path: Path) -> None:
    prove_cut(Stack, ("second",))
    (file,) = (tmp_path / "stagewright" / "proofs").iterdir()
    file.write_text(text)
    assert not prove_cut(Stack, ("second",)).is_cached
    assert prove_cut(Stack, ("second",)).is_cached


def test_a_refused_cut_is_not_kept(monkeypatch: Patch, tmp_path: Path) -> None:
    FAULTS["a call is dropped"].fault(monkeypatch, Hits())
    with pytest.raises(Differs):
        prove_cut(Stack, ("second",))
    assert not (tmp_path / "stagewright").exists()


def test_a_proof_needs_no_cache(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not prove_cut(Stack, ("second",)).is_cached


# --- What it leaves alone ---------------------------------------------------------------------------------------------


def state_of_everything(model: nn.Module) -> list[Any]:
    """All bits that analysis could move: of the model, of the generators, and torch's global flags."""
    tensors = [(name, id(tensor), tensor.tolist(), tensor._version) for name, tensor in prove._named(model)]
    plain = [(path, dict(vars(module)), module.training) for path, module in model.named_modules()]
    numbers: Any = np.random.get_state(legacy=False)
    return [
        tensors,
        [(path, {name: repr(value) for name, value in held.items()}, mode) for path, held, mode in plain],
        [parameter.grad for parameter in model.parameters()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        numbers["state"]["key"].tolist(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_anomaly_enabled(),
        nn.Module.__call__,
        inspect.getattr_static(torch.autograd.Function, "apply"),
    ]


@pytest.mark.parametrize("factory", [Stack, Noisy, Normed, Averaging, FrozenNorm, Blocks])
def test_analysis_leaves_everything_as_it_was(factory: Callable[[], nn.Module]) -> None:
    model = factory()
    before = state_of_everything(model)
    chain = Chain(model, example())
    chain.cut(chain.by_shares([1, 1]))
    prove.prove(lambda: deepcopy(model), chain, chain.by_shares([1, 1]), "tests")
    assert state_of_everything(model) == before


def test_too_little_memory_is_one_line(monkeypatch: Patch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    with pytest.raises(UserError) as error:
        prove_cut(Stack, ("second",))
    assert "--unproven" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_factory_that_draws_what_no_seed_fixes_is_proven() -> None:
    def factory() -> nn.Module:
        model = Stack()
        values = np.random.default_rng().normal(size=(WIDTH, WIDTH)) * random.SystemRandom().random()
        model.first.linear.weight.data.copy_(torch.from_numpy(values))
        return model

    assert prove_cut(factory, ("second",)).difference < 1e-8


def test_a_stage_may_change_in_place_what_it_gets() -> None:
    assert prove_cut(between(lambda self, x: x.mul_(2.0)), ("mul_",), way=Way.GRAPH).difference < 1e-12


class Late(Averaging):
    """Evaluation reads in the second stage what training keeps in the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(self.between(x) if self.training else x)
        return self.head(x if self.training else x - self.mean)


def test_a_buffer_that_evaluation_reads_in_a_later_stage_is_sent_there() -> None:
    chain = Chain(Late(), example())
    assert "mean" in chain.cut(chain.by_names(["second"]))[1].evaluation_inputs
    assert prove_cut(Late, ("second",), way=Way.GRAPH).difference < 1e-12


def test_a_recording_that_differs_is_not_proven_by_another_one() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    chain = Chain(build(), torch.randn(4, 4))
    assert chain.trace is not None
    for node in chain.trace.training.graph.nodes:
        if node.target == "1":
            node.target = "2"
    with pytest.raises(Differs):
        prove.prove(build, chain, ["2"], "somewhere:build")
