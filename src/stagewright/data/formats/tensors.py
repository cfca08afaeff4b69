"""Samples as tensors of a safetensors file: any named fields that begin with the number of samples.

The file is mapped, not read: a sample costs memory when it is asked for. Only targets of integers and inputs
named `..._ids` are looked at in full, once, because they are class numbers and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stagewright.config.sources import SourceOptions
from stagewright.data.formats.fields import IGNORED, Fields, Indices
from stagewright.errors import UserError, first_line
from stagewright.metrics import IMAGES, SAMPLES

_TARGETS = {"label", "labels", "target", "targets"}
_IMAGES = {"image", "images"}
_MOST_FIELDS = 64
_INTEGERS = {torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64}
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # that torch computes little with
_OTHERS = {torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
_AT_ONCE = 2**22  # numbers that are looked at in one piece
_HASHED = 2**26  # bytes of a target that enter the fingerprint whole
_SAMPLED = 64  # samples of everything else


class TensorSource:
    """Fields of a safetensors file; `image` or `images` of bytes become fractions of 255."""

    def __init__(self, path: str, ignore_index: int | None = None) -> None:
        """`ignore_index`: a label that counts nowhere, beside -100, and is no class."""
        self._path = path
        self._ignored = (IGNORED, IGNORED if ignore_index is None else ignore_index)
        self.has_ignored = False  # labels
        self._fields = _read_fields(path)
        self.targets = tuple(name for name in self._fields if is_target(name))
        self.unit = IMAGES if _IMAGES & self._fields.keys() else SAMPLES
        self.classes = max((self._classes(name) for name in self.targets), default=0)

    def __len__(self) -> int:
        return len(next(iter(self._fields.values())))

    def batch(self, indices: Indices) -> Fields:
        where = torch.from_numpy(indices)
        return {name: self._converted(name, tensor[where]) for name, tensor in self._fields.items()}

    @cached_property
    def vocabulary(self) -> int:
        """One more than the largest number of the inputs named `..._ids`, which are tokens; 0 where there is none."""
        largest = -1
        for name, tensor in self._fields.items():
            if name.endswith("_ids") and name not in self.targets and tensor.dtype in _INTEGERS:
                largest = max((largest, *(int(piece.max()) for piece in _pieces(tensor))))
        return largest + 1

    @cached_property
    def fingerprint(self) -> str:
        few = torch.arange(0, len(self), max(1, len(self) // _SAMPLED))
        inputs = [tensor for name, tensor in self._fields.items() if name not in self.targets]
        about = "".join(repr((tensor.shape, tensor.dtype)) for tensor in inputs)
        digest = blake2b(about.encode(), digest_size=16)
        if self._fields.keys() != {"images", "labels"}:
            digest.update(repr([*self._fields]).encode())
        for name in self.targets:
            tensor = self._fields[name]
            tensor = tensor if tensor.nbytes <= _HASHED else tensor[few]
            _update(digest, tensor.long() if tensor.dtype in _INTEGERS else tensor)
        for tensor in inputs:
            _update(digest, tensor[few])
        return digest.hexdigest()

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype in _UNSIGNED or (name in self.targets and tensor.dtype in _INTEGERS):
            return tensor.long()
        return tensor.float() / 255 if tensor.dtype == torch.uint8 and name in _IMAGES else tensor

    def _classes(self, name: str) -> int:
        """One more than the largest class number of a target; 0 where it holds none."""
        if self._fields[name].dtype not in _INTEGERS:
            return 0
        largest = -1
        for piece in _pieces(self._fields[name]):
            counted = piece[(piece != self._ignored[0]) & (piece != self._ignored[1])]
            self.has_ignored |= len(counted) < len(piece)
            if not len(counted):
                continue
            largest = max(largest, int(counted.max()))
            if (smallest := int(counted.min())) < 0:
                raise UserError(
                    f"tensors file {self._path}: the smallest number of '{name}' is {smallest}; classes count from 0, "
                    f"and {IGNORED} and --ignore-index are ignored; store numbers that are no classes as floats"
                )
        return largest + 1


def open_tensors(text: str, options: SourceOptions) -> TensorSource:
    return TensorSource(text.partition(":")[2], options.ignore_index)


def is_target(name: str) -> bool:
    """Whether a field of this name is a target."""
    return name in _TARGETS


def _update(digest: blake2b, tensor: Tensor) -> None:
    if tensor.numel():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """All numbers, a bounded part at a time."""
    if tensor.numel():
        yield from (piece.long() for piece in torch.split(tensor.reshape(-1), _AT_ONCE))


def _read_fields(path: str) -> Fields:
    if not Path(path).is_file():
        raise UserError(f"tensors file {path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            if len(names) > _MOST_FIELDS:
                raise UserError(f"tensors file {path} contains {len(names)} fields; at most {_MOST_FIELDS} are read")
            if not any(not is_target(name) for name in names):
                raise UserError(
                    f"tensors file {path} contains {', '.join(names) or 'nothing'}; it needs an input as well, a field "
                    "not named label, target or the like, such as 'images'"
                )
            fields = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise UserError(f"tensors file {path} is not a complete safetensors file ({first_line(error)})") from error
    first, expected = next(iter(fields.items()))
    for name, tensor in fields.items():
        least = 2 if name in _IMAGES else 1
        if tensor.dtype not in _INTEGERS | _OTHERS:
            raise UserError(f"tensors file {path}: field '{name}' is {tensor.dtype}; store it as float32 or int64")
        if tensor.dim() < least:
            raise UserError(
                f"tensors file {path}: {name} {list(tensor.shape)} needs at least {least} dimensions, of which the "
                "first is the number of samples"
            )
        if expected.dim() and len(tensor) != len(expected):
            raise UserError(
                f"tensors file {path}: {first} {list(expected.shape)} and {name} {list(tensor.shape)} do not match; "
                "all fields must begin with the number of samples"
            )
    return fields
