"""A user's optimizer: how its factory is called, what it keeps of each parameter, and a proof that it may be split.

A factory takes a list of parameters and returns a `torch.optim.Optimizer` of them; one whose first argument is called
`named_parameters` takes pairs of name and parameter instead. Each stage builds one of its own parameters, so that the
optimizer must treat every parameter by itself (`compare_factory`). Parameters that it leaves out are frozen.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stagewright.errors import UserError, first_line

Factory = Callable[..., torch.optim.Optimizer]
Find = Callable[[str], Mapping[str, Tensor]]  # the tensors of one kind of state, by parameter name
Numbers = list[dict[str, Any]]  # of each of torch's groups: all but its parameters
_TENSOR, _NUMBER, _GROUP = "own", "own-number", "own-group"  # what is kept: tensors, numbers, numbers of its group
_STEPS = 2
_TOLERANCE = 1e-12  # of how far a parameter moves
_KEY = re.compile(r"[\w.-]+")


def build_own(factory: Factory, named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """The optimizer of some parameters; UserError where the factory fails, or makes what can't be stepped here."""
    few = f"{len(named)} parameters from '{named[0][0]}' on"
    try:
        made: Any = factory(list(named) if _takes_names(factory) else [tensor for _, tensor in named])
    except (Exception, SystemExit) as error:  # the user's code: report whatever it raises
        raise UserError(
            f"the optimizer factory raised {type(error).__name__} for {few}: {first_line(error)}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"the optimizer factory returned a {type(made).__name__}; return a torch.optim.Optimizer")
    given = {id(tensor) for _, tensor in named}
    foreign = [tensor for group in made.param_groups for tensor in group["params"] if id(tensor) not in given]
    if foreign:
        raise UserError(
            f"the optimizer factory got {few}, but its {type(made).__name__} holds {len(foreign)} other tensors, the "
            f"first of shape {list(foreign[0].shape)}; build it of the parameters that the factory gets"
        )
    needed = [name for name, entry in inspect.signature(made.step).parameters.items() if entry.default is entry.empty]
    if needed:
        raise UserError(
            f"the optimizer {type(made).__name__} needs a {needed[0]} in step(), which a pipeline can't give: it has "
            "no batch at hand to compute again; use an optimizer that steps from gradients alone"
        )
    return made


def _takes_names(factory: Factory) -> bool:
    try:
        return next(iter(inspect.signature(factory).parameters), "") == "named_parameters"
    except ValueError:  # a callable of C has no signature
        return False


# --- State by parameter names -----------------------------------------------------------------------------------------


def numbers_of(inner: torch.optim.Optimizer) -> Numbers:
    """What each group holds beside its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]


class OwnState:
    """Everything that an optimizer keeps, by kind (`own/CLASS/KEY`) and parameter name.

    Beside its state that is the numbers of its groups that it changed since it was made, such as a count of its own:
    each parameter keeps those of its group. Tensors may have any shape; None and Python's numbers become tensors.
    """

    def __init__(self, inner: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """`names`: of the parameters, by their id."""
        self._inner = inner
        self._made = numbers_of(inner)
        self._places = [(number, p) for number, group in enumerate(inner.param_groups) for p in group["params"]]
        self._names = [names[id(parameter)] for _, parameter in self._places]

    def save(self) -> dict[str, dict[str, Tensor]]:
        """The state now; UserError where a checkpoint can't hold it."""
        found: dict[str, dict[str, Tensor]] = {}
        for number, state in self._inner.state_dict()["state"].items():
            if not isinstance(number, int):
                raise self._error(f"keeps {number!r} beside its parameters' state")
            for key, value in state.items():
                kind = self._kind(_TENSOR if isinstance(value, Tensor) else _NUMBER, key)
                found.setdefault(kind, {})[self._names[number]] = self._encoded(key, value)
        for (number, _), name in zip(self._places, self._names, strict=True):
            for key, value in self._inner.param_groups[number].items():
                is_kept = key not in ("params", "lr", "initial_lr") and isinstance(value, int | float)
                if is_kept and value != self._made[number].get(key):
                    found.setdefault(self._kind(_GROUP, key), {})[name] = self._encoded(key, value)
        return found

    def load(self, kinds: Iterable[str], find: Find) -> None:
        """Give the optimizer the state that `save` had of its parameters, by its load_state_dict.

        Of the kinds it takes those of its own class: another one starts without state. `find` has a kind's tensors.
        """
        loaded = self._inner.state_dict()
        loaded["state"] = {}
        for kind in kinds:
            what, *rest = kind.split("/", 2)
            if what not in (_TENSOR, _NUMBER, _GROUP) or rest[0] != type(self._inner).__name__:
                continue
            tensors, key = find(kind), rest[1]
            for index, ((group, parameter), name) in enumerate(zip(self._places, self._names, strict=True)):
                if (value := tensors.get(name)) is None:
                    continue
                if what == _GROUP:
                    loaded["param_groups"][group][key] = value.item()
                else:
                    number = value.item() if what == _NUMBER and value.numel() else None
                    loaded["state"].setdefault(index, {})[key] = number if what == _NUMBER else _like(value, parameter)
        self._inner.load_state_dict(loaded)
        for index, (_, parameter) in enumerate(self._places):
            for key, saved in loaded["state"].get(index, {}).items():
                held = self._inner.state[parameter].get(key)
                if isinstance(held, Tensor) and held.dtype != saved.dtype:  # torch gives it the parameter's type
                    self._inner.state[parameter][key] = saved.to(held.device)

    def _error(self, what: str) -> UserError:
        return UserError(f"the optimizer {type(self._inner).__name__} {what}")

    def _kind(self, what: str, key: object) -> str:
        """The kind of a checkpoint's file, of which it is a part of the name."""
        if isinstance(key, str) and _KEY.fullmatch(key):
            return f"{what}/{type(self._inner).__name__}/{key}"
        raise self._error(f"keeps state under {key!r}; use letters, digits, . _ and -")

    def _encoded(self, key: str, value: object) -> Tensor:
        if isinstance(value, Tensor):
            return torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        if value is None:
            return torch.empty(0)
        if isinstance(value, int | float):
            return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        raise self._error(
            f"keeps a {type(value).__name__} as '{key}'; a checkpoint holds tensors and numbers of each parameter"
        )


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A saved tensor on the parameter's device; with its strides, where it has its shape."""
    if parameter.is_complex() and value.shape == (*parameter.shape, 2):
        value = torch.view_as_complex(value.contiguous())
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value


# --- The proof --------------------------------------------------------------------------------------------------------


def compare_factory(
    factory: Factory, parameters: Mapping[str, Tensor], pieces: Sequence[Sequence[str]]
) -> torch.optim.Optimizer:
    """Raise UserError unless an optimizer of each piece moves its parameters as one of the whole model would.

    Two steps on copies in double precision, with gradients that depend on a parameter's name alone. The pieces have
    another seed: an optimizer that draws random numbers is refused too, since replicas would draw their own. So is one
    whose state no checkpoint can hold. `parameters` are the trained ones by their first names in the whole model.
    Returns the optimizer of the whole model's copies.
    """
    with torch.random.fork_rng(devices=[]):
        inner, whole = _moves(factory, parameters, seed=0)
        for names in filter(None, pieces):
            _, moves = _moves(factory, {name: parameters[name] for name in names}, seed=1)
            for name, move in moves.items():
                _require_same(name, whole[name], move, parameters[name], len(pieces))
    return inner


def _moves(
    factory: Factory, parameters: Mapping[str, Tensor], seed: int
) -> tuple[torch.optim.Optimizer, dict[str, Tensor]]:
    """An optimizer of copies of parameters, and how far each of them moves in the steps."""
    torch.default_generator.manual_seed(seed)  # not those of GPUs
    doubled = {name: tensor.detach().cpu().to(_double(tensor)) for name, tensor in parameters.items()}
    copies = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in doubled.items()}
    inner = build_own(factory, list(copies.items()))
    state = OwnState(inner, {id(copy): name for name, copy in copies.items()})
    shown = [{key: repr(value) for key, value in group.items()} for group in numbers_of(inner)]  # lists may change
    for step in range(_STEPS):
        for name, copy in copies.items():
            copy.grad = _gradient(f"{step}/{name}", copy)
        try:
            inner.step()
        except Exception as error:  # the user's code: report whatever it raises
            raise UserError(
                f"step() of the optimizer {type(inner).__name__} raised {type(error).__name__}: {first_line(error)}"
            ) from error
    state.save()
    for before, now in zip(shown, numbers_of(inner), strict=True):
        for key, value in now.items():
            if not isinstance(value, int | float) and repr(value) != before.get(key):
                raise UserError(
                    f"the optimizer {type(inner).__name__} changes '{key}' of its groups, a {type(value).__name__}; a "
                    "checkpoint holds tensors and numbers of each parameter"
                )
    return inner, {name: copy.detach() - doubled[name] for name, copy in copies.items()}


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _gradient(text: str, parameter: Tensor) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(text.encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


def _require_same(name: str, whole: Tensor, piece: Tensor, parameter: Tensor, pieces: int) -> None:
    rounding = torch.finfo(torch.float64).eps * torch.linalg.vector_norm(parameter.detach().cpu().to(whole.dtype))
    difference = (whole - piece).abs()
    allowed = _TOLERANCE * torch.linalg.vector_norm(whole) + 4 * rounding
    if bool(torch.linalg.vector_norm(difference) <= allowed):
        return
    place = int(difference.nan_to_num(torch.inf).argmax())
    numbers = [torch.view_as_real(t).sum(-1) if t.is_complex() else t for t in (whole, piece)]
    moved, apart = (float(t.flatten()[place]) for t in numbers)
    raise UserError(
        f"the user's optimizer moves '{name}' by {moved!r}, and by {apart!r} when it is built again: it draws random "
        "numbers, and replicas would draw others; use one that doesn't"
        if pieces == 1
        else f"the user's optimizer moves '{name}' by {moved!r} with the whole model and by {apart!r} with its stage "
        "alone: it looks across parameters; use one stage or an optimizer that doesn't"
    )
