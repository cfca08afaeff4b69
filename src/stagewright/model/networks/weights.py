"""A model's first weights: read from safetensors files (`--init`), and which of them are frozen (`--freeze`).

A file is not trusted: its header is compared with the model before any tensor is read, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from types import MethodType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stagewright.errors import UserError, counted, did_you_mean, first_line
from stagewright.files import open_regular, read_text

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PREFIXES = ("module.", "_orig_mod.", "model.")  # that wrappers put in front of every name
_COUNTS = "num_batches_tracked"  # of BatchNorm, which older files lack
_NAMED = 3  # tensors in an error


@dataclass(frozen=True, slots=True)
class Start:
    """Where a model's first weights came from."""

    source: str
    digest: str  # of the files
    tensors: int  # that were read
    anew: tuple[str, ...] = ()  # parameters that are new all the same
    remarks: tuple[str, ...] = ()  # about those, and about what of the files is not used

    def __str__(self) -> str:
        return f"weights of {self.source} ({counted(self.tensors, 'tensor')})"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    is_real: bool  # of a type that can be converted into another real one


# --- Reading ----------------------------------------------------------------------------------------------------------


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that can be read, or that would have to be converted first."""
    return (folder / _WHOLE).exists() or (folder / _INDEX).exists() or _pickle_in(folder) is not None


def weight_files(source: str) -> tuple[Path, ...]:
    """The files of a safetensors file, or of a folder with one or with the shards of an index."""
    path = Path(source)
    if path.suffix in _PICKLES:
        raise _is_pickle(path)
    if not path.is_dir():
        found: tuple[Path, ...] = (path,)
    elif (path / _INDEX).exists():
        found = tuple(path / name for name in _shards(path / _INDEX))
    elif (path / _WHOLE).exists():
        found = (path / _WHOLE,)
    elif (pickled := _pickle_in(path)) is not None:
        raise _is_pickle(pickled)
    else:
        raise UserError(f"--init {source}: the folder has no {_WHOLE} and no {_INDEX}; name a .safetensors file")
    for file in found:
        with _reported(file):
            open_file(file).close()
    return found


def open_file(path: Path) -> BufferedReader:
    """A regular file to read."""
    return os.fdopen(open_regular(path), "rb")


def digest_of(files: Sequence[Path]) -> str:
    """A hash of what files hold, in their order."""
    whole = hashlib.blake2b(digest_size=16)
    for path in files:
        with _reported(path), open_file(path) as file:
            whole.update(hashlib.file_digest(file, "blake2b").digest())
    return whole.hexdigest()


def _pickle_in(folder: Path) -> Path | None:
    return next((path for path in sorted(folder.glob("*.bin")) if path.is_file()), None)


def _is_pickle(path: Path) -> UserError:
    made = path.with_suffix(".safetensors")
    convert = (
        f"import torch, safetensors.torch as s; w = torch.load('{path}', weights_only=True); "
        f"s.save_file({{n: t.contiguous().clone() for n, t in w.items()}}, '{made}')"
    )
    return UserError(f'{path} is a pickle, which may run code and is never read; convert it: python -c "{convert}"')


def _shards(index: Path) -> list[str]:
    """The names of the files of an index, all in its folder."""
    try:
        names = set(json.loads(read_text(index))["weight_map"].values())
    except OSError as error:
        raise UserError(f"{index}: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} has no weight_map from tensors to files; save the model again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{index} names '{name}', which is no .safetensors file of its folder; save the model again"
            )
    return sorted(names)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Within, whatever is wrong with a file becomes one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"--init: {path}: {reason}; name a .safetensors file, or a folder with one") from error
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"--init: {path} is no readable safetensors file ({first_line(error, 120)}); save it again"
        ) from error


def _stored(files: Sequence[Path]) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for path in files:
        with _reported(path), safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in found:
                    raise UserError(f"--init: '{name}' is in {found[name].path} and in {path}; save the model again")
                part = tensors.get_slice(name)
                is_real = str(part.get_dtype()).startswith(("F", "BF"))
                found[name] = _Stored(path, name, tuple(part.get_shape()), is_real)
    return found


# --- Starting from a file ---------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, source: str) -> Start:
    """Copy a file's tensors into the model's parameters and buffers of the same names, converted to their types.

    A head of another size, and one that the file lacks, keeps its initial values; anything else that does not fit is
    an error, before the model is changed.
    """
    files = weight_files(source)
    own = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    stored, remarks = _renamed(_stored(files), own, source)
    unexpected = [name for name in stored if name not in own]
    first: dict[int, str] = {}  # a tied tensor has several names, of which a file may have one
    held: dict[str, list[str]] = {}
    for name, tensor in own.items():
        held.setdefault(first.setdefault(id(tensor), name), []).extend([name] if name in stored else [])
    missing = [name for name, known in held.items() if not known and not name.endswith(_COUNTS)]
    present = {first: known[0] for first, known in held.items() if known}
    unlike = {name: key for name, key in present.items() if stored[key].shape != tuple(own[name].shape)}
    head = _head(model)
    anew = _replaced(model, head, own, {name: stored[key].shape for name, key in unlike.items()})
    anew += [name for name in missing if name in head] if head <= set(missing) else []
    _refuse("missing from it", [name for name in missing if name not in anew], source)
    _refuse("not in the model", unexpected, source)
    wrong = [(name, stored[key].shape, own[name].shape) for name, key in unlike.items() if name not in anew]
    texts = [f"{name} {list(theirs)}, {list(ours)} in the model" for name, theirs, ours in wrong]
    _refuse("of another shape", texts, source)
    kinds = [name for name, key in present.items() if own[name].is_floating_point() and not stored[key].is_real]
    _refuse("not of a real type", kinds, source)
    for name in anew:
        there = f"{list(stored[unlike[name]].shape)} in {source}" if name in unlike else f"not in {source}"
        remarks.append(f"{name} {there}, {list(own[name].shape)} in the model: starts anew")
    read = {first: known for first, known in held.items() if known and first not in anew}
    _copy(own, stored, read)
    return Start(source, digest_of(files), len(read), tuple(anew), tuple(remarks))


def _renamed(stored: Mapping[str, _Stored], own: Collection[str], source: str) -> tuple[dict[str, _Stored], list[str]]:
    """The file's tensors by the model's names: where no name is known, without what wrappers put in front of all."""
    if not stored or any(name in own for name in stored):
        return dict(stored), []
    theirs, ours = _common_prefix(stored), _common_prefix(own)
    renamed = {ours + name.removeprefix(theirs): tensor for name, tensor in stored.items()}
    if theirs == ours or not any(name in own for name in renamed):
        return dict(stored), []
    return renamed, [f"the names in {source} begin with '{theirs}', those of the model with '{ours}': matched without"]


def _common_prefix(names: Collection[str]) -> str:
    prefix = ""
    while more := next((p for p in _PREFIXES if all(name.startswith(prefix + p) for name in names)), ""):
        prefix += more
    return prefix


def _head(model: nn.Module) -> set[str]:
    """The parameters of the last module that has some."""
    owners = [path for path, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    own = [(path, model.get_submodule(path).named_parameters(recurse=False)) for path in owners[-1:]]
    return {f"{path}.{name}".lstrip(".") for path, named in own for name, _ in named}


def _replaced(
    model: nn.Module, head: Collection[str], own: Mapping[str, Tensor], unlike: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """The mis-shaped parameters that are rows of a head of another size: of the last module, or like it."""
    ends = {id(own[name]) for name in head if name in own}
    sizes = {(shape[0], own[name].shape[0]) for name, shape in unlike.items() if id(own[name]) in ends and shape}
    if len(sizes) != 1:
        return []
    found = []
    for name, shape in unlike.items():
        tensor, is_embedding = own[name], isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        is_sized = bool(shape) and {(shape[0], *tensor.shape[:1])} == sizes and shape[1:] == tuple(tensor.shape[1:])
        if is_sized and isinstance(tensor, nn.Parameter) and (not is_embedding or id(tensor) in ends):
            found.append(name)
    return found


def _refuse(what: str, names: Sequence[str], source: str) -> None:
    if names:
        raise UserError(
            f"--init {source}: {counted(len(names), 'tensor')} {what}: {_listed(names, '; ')}; use weights of this "
            "model, or the model of these weights"
        )


def _copy(own: Mapping[str, Tensor], stored: Mapping[str, _Stored], read: Mapping[str, Sequence[str]]) -> None:
    """Copy each tensor; where the file has a tied one under several names, they must be equal."""
    for path in dict.fromkeys(one.path for one in stored.values()):
        with _reported(path), safe_open(path, "pt") as tensors, torch.no_grad():
            for first, names in read.items():
                if stored[names[0]].path == path:
                    own[first].copy_(tensors.get_tensor(stored[names[0]].name))
    for first, (_, *others) in read.items():
        for name in others:
            with _reported(stored[name].path), safe_open(stored[name].path, "pt") as tensors:
                if not torch.equal(tensors.get_tensor(stored[name].name).to(own[first].dtype), own[first].detach()):
                    raise UserError(
                        f"--init: '{name}' and '{first}' have different values in {stored[name].path}, but are one "
                        "tensor in the model; use a model in which they are not tied"
                    )


def check_loaded(model: nn.Module, absent: Collection[str], unused: Collection[str], source: str) -> Start:
    """What transformers has read of a folder into one of its models; an error unless only the model's end is new.

    A folder may have the weights of another head: a masked language model becomes a classifier, whose last modules the
    file lacks.
    """
    names = [name for name, _ in model.named_parameters()]
    first = next((index for index, name in enumerate(names) if name in absent), len(names))
    between = [name for name in names[first:] if name not in absent]
    if first == 0 or between:
        _refuse("missing from it or of another shape", [name for name in names if name in absent], source)
    anew = [f"{name} {list(model.get_parameter(name).shape)}" for name in names[first:]]
    remarks = [f"{_listed(anew)}: not in {source}, or there of another shape, so new"] if anew else []
    remarks += [f"not used of {source}: {_listed(sorted(unused))}"] if unused else []
    return Start(source, digest_of(weight_files(source)), first, tuple(names[first:]), tuple(remarks))


def noting_frozen(start: Start, model: nn.Module) -> Start:
    """The same, with a remark where parameters are new and will stay so, since they are frozen."""
    fixed = [name for name in start.anew if not model.get_parameter(name).requires_grad]
    if not fixed:
        return start
    module = fixed[0].rpartition(".")[0]
    remark = f"frozen at new values: {_listed(fixed)}; to train them, give --freeze '!{module}' as well"
    return replace(start, remarks=(*start.remarks, remark))


def _listed(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def require_same(source: str, digest: str) -> None:
    """An error where files have changed since their hash was taken, or are others on this machine."""
    if (found := digest_of(weight_files(source))) != digest:
        raise UserError(f"--init {source} has changed since the run was prepared (hash {digest}, now {found})")


# --- Freezing ---------------------------------------------------------------------------------------------------------


def freeze(model: nn.Module, text: str) -> None:
    """Freeze the parameters that comma-separated patterns name: by * and ?, or by a module that they are in.

    Those that a pattern behind `!` names are trained; where all patterns have one, every other parameter is frozen. A
    normalisation whose parameters are all frozen keeps its running statistics: it stays in evaluation mode.
    """
    patterns = [part.strip() for part in text.split(",") if part.strip()] or [text]
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(_matches(name, pattern.removeprefix("!")) for name, _ in named):
            paths = [path for path, module in model.named_modules() if path and any(True for _ in module.parameters())]
            near = did_you_mean(pattern.removeprefix("!"), [*paths, *(name for name, _ in named)])
            raise UserError(f"--freeze {pattern} names no parameter of the model; {near}")
    frozen = {id(parameter) for name, parameter in named if _is_frozen(name, patterns)}
    if not frozen:
        raise UserError(f"--freeze {text} freezes nothing: every parameter is excluded by a '!'; leave it out")
    trained = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in frozen]
    if not trained:
        raise UserError(
            f"--freeze {text} leaves none of {counted(len(named), 'parameter')} to train; leave out what is to be "
            "trained (--freeze '!head' freezes all but it)"
        )
    for _, parameter in named:
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    for path, module in model.named_modules():
        own = [id(parameter) in frozen for parameter in module.parameters(recurse=False)]
        if getattr(module, "running_mean", None) is not None and (
            all(own) if own else _is_frozen(f"{path}.running_mean", patterns)
        ):
            module.eval()
            module.train = MethodType(_stays, module)


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of `train`: the module stays in evaluation mode."""
    return module


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _is_frozen(name: str, patterns: Sequence[str]) -> bool:
    trained = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    frozen = [pattern for pattern in patterns if not pattern.startswith("!")]
    return (not frozen or any(_matches(name, p) for p in frozen)) and not any(_matches(name, p) for p in trained)


def count_frozen(model: nn.Module) -> int:
    """How many numbers of a model are not trained."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters() if not parameter.requires_grad)
