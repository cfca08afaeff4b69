"""Proves a cut: compares the pieces of a plan with the model as its author wrote it, before anything is trained.

The pieces run one after another in this process, through their real boundaries: what crosses is detached, copied and a
new leaf. The generators are seeded once, before the first piece, so draws equal the author's exactly where they come in
the same order. Compared are outputs, gradients of all parameters, buffers, and Python attributes that the forward
changes; in training twice, with the initial weights and with all parameters moved by noise, so that none is zero, and
in evaluation. Everything runs on copies in double precision, where equal code gives equal numbers; in single precision
for a model that can't run in double, or computes in autocast.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from stagewright import torch_internals
from stagewright.errors import UserError, first_line
from stagewright.files import cache_folder, read_text, write_text
from stagewright.model.call import Inputs, differentiable, leaves_of, samples_like
from stagewright.model.chain import WAYS, Chain
from stagewright.model.load import convert
from stagewright.model.pieces import Piece, backward, run
from stagewright.model.standin import Build, analysing, copied, stand_ins
from stagewright.torch_internals import TABLES, autocast_noted

SAMPLES = 4  # other than those that a forward is recorded with, so that its sizes are proven too
_TOLERANCE = 1e-8  # relative, in double precision
_ROUNDINGS = 100  # in single precision: how many times what a rounding of the input changes
_LARGEST_TOLERANCE = 1e-3
_FLOOR = 1e-6  # of the largest gradient: below it, a gradient is rounding
_NOISE = 0.05  # of a parameter's own size, by which the second run moves it
_SEEDS = (20_231, 7)
_COPIES = 6  # the author's copy and the pieces' copy, their gradients, and as much again for activations
_VERSION = 1
_LONGEST = 2000  # characters of an attribute that a proof is known by
Found = TypeVar("Found")
_Compared = tuple[float, float, str]  # the largest difference, the tolerance and the precision


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proven: how the model was cut, the largest relative difference, and what it took."""

    way: str
    stages: int
    samples: int
    precision: str
    difference: float
    tolerance: float
    seconds: float
    is_cached: bool = False

    def __str__(self) -> str:
        what = f"{self.stages} stages computed what the whole model does"
        differs = f"largest difference {self.difference:.1e}" if self.difference else "no difference"
        how = f"{self.precision}, {self.samples} samples, {differs}"
        when = "proven before" if self.is_cached else f"proven in {self.seconds:.1f} s"
        return f"{what} ({how}; {when})"


class Differs(UserError):
    """The pieces of a cut do not compute what the author's model does."""


@dataclass(slots=True)
class _Outcome:
    """What one run of a forward, and its backward, left behind."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def first_proven(chain: Chain, attempt: Callable[[Chain], Found]) -> Found:
    """What `attempt` returns for the first way of cutting whose pieces it does not find to differ.

    The chain's own way is tried first. An error of a later way, such as a unit that only the first one has, is no news:
    the first difference is.
    """
    first: Differs | None = None
    for way in (chain.way, *(way for way in WAYS if way is not chain.way)):
        if first is not None:
            chain = chain.by(way)
        if chain.way is not way:
            continue  # the model can't be cut in this way
        try:
            return attempt(chain)
        except Differs as error:
            first = first or error
        except UserError as error:
            raise first or error from None
    assert first is not None
    raise first


def prove(build: Build, chain: Chain, cuts: Sequence[str], identity: str) -> Proof:
    """Prove that a model cut before these units computes what it does uncut; `Differs` names the first difference.

    `build` makes the model of the chain, each time anew; `identity` is what its factory is known by.
    """
    began = time.perf_counter()
    key = proof_key(chain, cuts, identity)
    path = None if key is None else cache_folder("proofs") / f"{key}.json"
    if path is not None:
        with suppress(OSError, ValueError):  # none, or a damaged one
            return replace(TypeAdapter(Proof).validate_json(read_text(path)), is_cached=True)
    _require_memory(chain.model)
    with analysing(), autocast_noted() as regions:
        try:
            difference, tolerance, precision = _compare(build, chain, cuts, torch.float64)
        except Differs:
            raise
        except Exception:  # the model's code fails in double precision, or lacks an operation, or no cut is found
            regions.append("any")
        try:
            if regions:  # autocast leaves double precision alone
                difference, tolerance, precision = _compare(build, chain, cuts, torch.float32)
        except UserError:
            raise
        except Exception as error:  # the model's code may raise anything
            raise Differs(
                f"the {len(cuts) + 1} stages could not be compared with the whole model: {type(error).__name__}: "
                f"{first_line(error, 160)}; use one stage, or train it as it is by --unproven"
            ) from error
    took = time.perf_counter() - began
    proof = Proof(str(chain.way), len(cuts) + 1, SAMPLES, precision, difference, tolerance, took)
    if path is not None:
        with suppress(OSError):  # a full or read-only disk: proven again the next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asdict(proof)))
    return proof


def _require_memory(model: nn.Module) -> None:
    """An error where the copies of a model would not fit into this machine's memory."""
    needed = _COPIES * 8 * sum(tensor.numel() for _, tensor in _named(model))
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"proving the cut needs about {needed / 2**30:.1f} GiB of memory for copies of the model and "
            f"{free / 2**30:.1f} GiB are free; free some, or train it unproven with --unproven"
        )


def _compare(build: Build, chain: Chain, cuts: Sequence[str], weights: torch.dtype) -> _Compared:
    """Compare the pieces with the author's model; raises at the first difference that is beyond the tolerance.

    Compared is what the chain has recorded, which is what trains. Where that does not hold in this precision, as code
    that names a type, the model is recorded in it; and what was recorded in single precision holds at least in that.
    """
    differs = False
    if chain.trace and chain.recorded and not (weights is torch.float64 and chain.trace.names_types):
        try:
            return _compare_cut(build, lambda copy: chain.on(copy).cut(cuts), chain.example, weights)
        except Differs:
            if weights is torch.float32 and chain.is_in_single:
                raise
            differs = chain.is_in_single
        except Exception:  # which the other recording tells, if it is one of this precision too
            pass

    def cut_anew(copy: nn.Module) -> tuple[Piece, ...]:
        example = samples_like(chain.example, SAMPLES, weights, _SEEDS[0]).first(1)
        return Chain(copy, example, way=chain.way, build=lambda: convert(build(), weights)).cut(cuts)

    found = _compare_cut(build, cut_anew, chain.example, weights)
    return _compare(build, chain, cuts, torch.float32) if differs else found


def _compare_cut(
    build: Build, cut: Callable[[nn.Module], Sequence[Piece]], example: Inputs, weights: torch.dtype
) -> _Compared:
    given = samples_like(example, SAMPLES, weights, _SEEDS[0])
    author, copy = (convert(build(), weights) for _ in range(2))
    _give_state(author, copy)
    author.train()
    pieces = cut(copy)
    with ExitStack() as stack:
        for piece in pieces:  # as in ranks: every stage has buffers of its own, and parameters that are other objects
            stack.enter_context(stand_ins((piece.training, piece.evaluation), copied))
        return _compare_runs(author, pieces, given, weights)


def _compare_runs(author: nn.Module, pieces: Sequence[Piece], given: Inputs, weights: torch.dtype) -> _Compared:
    first_buffers, names = _buffers(author), _first_names(author)
    tolerance = _TOLERANCE if weights is torch.float64 else _rounding_tolerance(author, given, _SEEDS[0])
    differences = []

    def compare(seed: int, mode: str) -> None:
        expected = _run_author(author, given, seed, training=mode == "training")
        found = _run_pieces(pieces, given, seed, names, training=mode == "training")
        differences.append(_difference(expected, found, pieces, tolerance, mode))

    compare(_SEEDS[0], "training")
    for seed in _SEEDS[1:]:
        _move(author, pieces, seed)
        compare(seed, "training")
    pairs = [(name, first_buffers.get(name), buffer) for name, buffer in author.named_buffers()]
    _require_own(pieces, {name for name, before, now in pairs if before is None or not torch.equal(before, now)})
    author.eval()
    compare(_SEEDS[0], "evaluation")
    return max(differences), tolerance, str(weights).removeprefix("torch.")


def _require_own(pieces: Sequence[Piece], moved: Collection[str]) -> None:
    """An error where a stage evaluates with what another one trains; here they share it, ranks would not."""
    homes: dict[int, set[int]] = {}
    for stage, piece in enumerate(pieces):
        for _, tensor in _named(piece.training):
            homes.setdefault(id(tensor), set()).add(stage)
    for stage, piece in enumerate(pieces):
        for name, tensor in _named(piece.evaluation):
            others = homes.get(id(tensor), {stage})
            if stage not in others and (tensor.requires_grad or name in moved):
                raise Differs(
                    f"the {len(pieces)} stages do not compute what the whole model does: in evaluation, stage {stage} "
                    f"uses '{name}', which stage {min(others)} trains; use one stage, or cut elsewhere"
                )


def _give_state(author: nn.Module, copy: nn.Module) -> None:
    """Make two builds of a model equal: a factory may draw numbers that no seed fixes."""
    own = dict(_named(copy))
    with torch.no_grad():
        for name, tensor in _named(author):
            if name not in own or own[name].shape != tensor.shape:
                raise UserError(f"the factory builds a different model each time: '{name}' is in only one of two")
            own[name].copy_(tensor)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _move(author: nn.Module, pieces: Sequence[Piece], seed: int) -> None:
    """Move all parameters by noise, the same in the author's model and in the pieces."""
    noises: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in author.named_parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            size = float(real.double().square().mean().sqrt()) or _NOISE
            noise = _NOISE * size * torch.randn(real.shape, generator=generator, dtype=torch.float64)
            real.add_(noise.to(real.dtype))
            noises[name] = parameter.detach()
        first = _first_names(author)
        for root in {root for piece in pieces for root in (piece.training, piece.evaluation)}:
            for name, parameter in root.named_parameters(remove_duplicate=False):
                parameter.copy_(noises[first[name]])


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _weights_of(outputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Weights of the outputs in the number whose gradient is compared."""
    found = []
    for index, output in enumerate(outputs):
        generator = torch.Generator().manual_seed(seed + index)
        found.append(torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype))
    return found


def _run_author(model: nn.Module, given: Inputs, seed: int, *, training: bool) -> _Outcome:
    before = _attributes(model)
    model.zero_grad(set_to_none=True)
    _seed(seed)
    with torch.set_grad_enabled(training):
        output = given.map(torch.clone).call(model)
    if training:
        roots = differentiable(output)
        torch_internals.backward(roots, _weights_of(roots, seed))
    gradients = {name: _dense(parameter.grad) for name, parameter in model.named_parameters(remove_duplicate=False)}
    # One that a forward makes is compared once a later one changes it: until then it only says that it was made.
    changed = {name: value for name, value in _attributes(model).items() if before.get(name, value) != value}
    return _Outcome([leaf.detach() for leaf in leaves_of(output)], gradients, _buffers(model), changed)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every parameter's name -> the first name of that parameter."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _run_pieces(
    pieces: Sequence[Piece], given: Inputs, seed: int, names: Mapping[str, str], *, training: bool
) -> _Outcome:
    """Run all pieces forward and then backward, as ranks do: what crosses a boundary is a copy, and a new leaf."""
    for piece in pieces:
        piece.train(training)
        for root in (piece.training, piece.evaluation):
            root.zero_grad(set_to_none=True)
    _seed(seed)
    with torch.set_grad_enabled(training):
        done = run(pieces, given.map(torch.clone).tensors, training=training)
    outputs = leaves_of(done[-1].output)
    if training:
        backward(done, _weights_of(differentiable(outputs), seed))
    found = _Outcome([leaf.detach() for leaf in outputs])
    for piece in pieces:
        own: set[str] = set()
        for name, parameter in piece.training.named_parameters():
            first, gradient = names.get(name, name), _dense(parameter.grad)
            if first in own:
                continue  # a stage that has two tensors for one parameter lacks a part of its gradient
            own.add(first)
            others = found.gradients.get(first)  # of the other homes of a tied parameter
            found.gradients[first] = others if gradient is None else gradient if others is None else others + gradient
        found.buffers |= _buffers(piece.training)
        found.attributes |= _attributes(piece.training)
    found.gradients |= {name: found.gradients[first] for name, first in names.items() if first in found.gradients}
    return found


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _attributes(model: nn.Module) -> dict[str, Any]:
    """The plain numbers and texts among the attributes of all modules, by name."""
    root = getattr(model, "whole", model)
    return {
        f"{path}.{name}" if path else name: value
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and name != "training" and not name.startswith("__")
    }


def _rounding_tolerance(author: nn.Module, given: Inputs, seed: int) -> float:
    """How much of a difference is rounding: what the author's own model makes of inputs moved by it."""
    kept = _buffers(author)
    plain = _run_author(author, given, seed, training=True)
    _restore(author, kept)
    rounded = given.map(
        lambda field: field * (1 + torch.finfo(field.dtype).eps) if field.is_floating_point() else field
    )
    other = _run_author(author, rounded, seed, training=True)
    _restore(author, kept)
    noises = [_relative(*pair) for pair in zip(plain.outputs, other.outputs, strict=True)]
    pairs = zip(plain.gradients.values(), other.gradients.values(), strict=True)
    noises += [_relative(one, two, _scale(plain)) for one, two in pairs if one is not None and two is not None]
    return min(_LARGEST_TOLERANCE, max(_ROUNDINGS * max(noises, default=0.0), 1e-6))


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _scale(outcome: _Outcome) -> float:
    there = (gradient for gradient in outcome.gradients.values() if gradient is not None and gradient.numel())
    made = [float(gradient.abs().max()) for gradient in there]
    return _FLOOR * max(made, default=0.0)


def _relative(some: Tensor | None, other: Tensor | None, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest number; infinite where only one is there, or of that shape."""
    if some is None or other is None or some.shape != other.shape:
        return 0.0 if some is other else math.inf
    if torch.equal(some, other):
        return 0.0
    difference = (some.to(torch.complex128) - other.to(torch.complex128)).abs().max()
    return float(difference / max(float(some.abs().max()), floor, 1e-300)) if torch.isfinite(difference) else math.inf


def _difference(expected: _Outcome, found: _Outcome, pieces: Sequence[Piece], tolerance: float, mode: str) -> float:
    """The largest relative difference between two outcomes; raises where it is beyond the tolerance."""
    stages = {name: str(stage) for stage, piece in enumerate(pieces) for name, _ in _named(piece.training)}
    differences = {"the number of outputs": 0.0 if len(expected.outputs) == len(found.outputs) else math.inf}
    for index, (one, other) in enumerate(zip(expected.outputs, found.outputs, strict=False)):
        what = "the output" if len(expected.outputs) == 1 else f"output {index}"
        differences[what] = _relative(one, other)
    floor = _scale(expected)
    owned = {id(gradient) for name, gradient in expected.gradients.items() if found.gradients.get(name) is not None}
    for name, gradient in expected.gradients.items():
        twin = found.gradients.get(name)
        if twin is not None or id(gradient) not in owned:  # else a tied one, which a stage has under another name
            place = f"'{name}' of stage {stages.get(name, 'none')}"
            differences[f"the gradient of {place}"] = _relative(gradient, twin, floor)
    for name in (name for name in expected.buffers if name in found.buffers):
        place = f"'{name}' of stage {stages.get(name, 'none')}"
        differences[f"buffer {place}"] = _relative(expected.buffers[name], found.buffers[name])
    for name, value in expected.attributes.items():
        is_same = name in found.attributes and found.attributes[name] == value
        differences[f"attribute '{name}'"] = 0.0 if is_same else math.inf
    for what, difference in differences.items():
        if not difference <= tolerance:
            amount = "it is there in one of them only" if difference == math.inf else f"by {difference:.1e}"
            raise Differs(
                f"the {len(pieces)} stages do not compute what the whole model does: in {mode}, {what} differs "
                f"({amount}, at most {tolerance:.0e} is rounding); use one stage, or train it as it is by --unproven"
            )
    return max(differences.values())


def proof_key(chain: Chain, cuts: Sequence[str], identity: str) -> str | None:
    """What a proof depends on: the model's code and what was recorded of it, this package's code, versions and cuts.

    None where some code is in no file, as that of a notebook: it may be other code the next time.
    """
    model, example, files = chain.model, chain.example, {_source_of(type(module)) for module in chain.model.modules()}
    if None in files:
        return None
    files |= {torch_internals.__file__, *(str(path) for path in Path(__file__).parent.glob("*.py"))}
    factory = sys.modules.get(identity.partition(":")[0])
    files |= {getattr(factory, "__file__", None)}
    digest = hashlib.blake2b(digest_size=20)
    for name in sorted(filter(None, files)):
        digest.update(hashlib.blake2b(Path(name).read_bytes()).digest())
    first: dict[int, str] = {}
    named = [(first.setdefault(id(t), name), name, t) for name, t in _named(model)]
    described: list[Any] = [
        (_VERSION, torch.__version__, np.__version__, str(chain.way), list(cuts), identity),
        [(list(tensor.shape[1:]), str(tensor.dtype)) for tensor in example.tensors],
        (example.names, chain.trace_error),
        repr(model),
        [(name, known, list(t.shape), str(t.dtype), t.requires_grad) for known, name, t in named],
    ]
    for module in model.modules():
        plain = [(name, _described(value)) for name, value in vars(module).items() if name not in TABLES]
        described.append((f"{type(module).__module__}.{type(module).__qualname__}", plain))
    for recording in (chain.trace.training, chain.trace.evaluation) if chain.trace else ():
        described += [(n.op, n.name, _described(n.target), str(n.args), str(n.kwargs)) for n in recording.graph.nodes]
    digest.update(json.dumps(described, default=str).encode())
    return digest.hexdigest()


def _described(value: Any) -> str:
    """A value without addresses in memory."""
    if callable(value):
        inner = getattr(value, "func", value)  # of a partial
        where = (getattr(inner, "__module__", ""), getattr(inner, "__qualname__", type(inner).__qualname__))
        return f"{where} {getattr(value, 'args', '')} {getattr(value, 'keywords', '')}"
    return re.sub(r"0x[0-9a-f]+", "", repr(value))[:_LONGEST]


def _source_of(kind: type) -> str | None:
    """The file of a class; None for one of a notebook or a command line."""
    path = None
    with suppress(TypeError, OSError):
        path = inspect.getsourcefile(kind)
    return path if path is not None and Path(path).is_file() else None


def keeps_state(build: Build, example: Inputs, attributes: Sequence[str]) -> bool:
    """Whether Python attributes that forwards change are state.

    They are where a number among them changes again in a second forward, or where that forward, with everything else
    put back, returns something else.
    """
    model = build().train()
    given = samples_like(example, SAMPLES, torch.float32, _SEEDS[0])
    seen: list[tuple[list[Tensor], dict[str, Any]]] = []
    with analysing(), torch.no_grad():
        buffers = _buffers(model)
        for _ in range(2):
            _seed(_SEEDS[0])
            made = leaves_of(given.map(torch.clone).call(model))
            seen.append((made, {name: value for name, value in _attributes(model).items() if name in attributes}))
            _restore(model, buffers)
    (outputs, numbers), (later_outputs, later_numbers) = seen
    return numbers != later_numbers or not all(map(torch.equal, outputs, later_outputs))
