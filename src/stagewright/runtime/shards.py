"""Files of tensors: safetensors, written in pieces and hashed on the way, so that no thread is held up for long."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

_PIECE = 4 * 2**20  # bytes
_ALIGNMENT = 8
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write tensors to a file that is on the disk afterwards; its size and its hash."""
    digest = hashlib.blake2b(digest_size=32)
    size = 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(tensors):
            view = memoryview(piece)
            while view:  # an unbuffered write may take less than all
                view = view[file.write(view) :]
            digest.update(piece)
            size += len(piece)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def hash_file(path: Path) -> str:
    """The hash that `write_shard` gave."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def sync_folder(path: Path) -> None:
    """Have the folder's names on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for first in range(0, len(content), _PIECE):
            yield content[first : first + _PIECE]
