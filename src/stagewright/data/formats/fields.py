"""A microbatch as named tensors, and the types that its fields are converted to."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stagewright.errors import UserError

Indices = NDArray[np.int64]  # of samples
Fields = dict[str, Tensor]  # one tensor per name; all begin with the number of samples
IGNORED = -100  # a target that no loss counts, as torch's ignore_index


def cast(fields: Mapping[str, Tensor], targets: Collection[str], dtype: torch.dtype) -> Fields:
    """Floating inputs as `dtype`, floating targets as that or as fp32, whichever is wider; other types unchanged."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: tensor.to(wide if name in targets else dtype) if tensor.is_floating_point() else tensor
        for name, tensor in fields.items()
    }


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to a GPU it is copied from pinned memory, and the host does not wait for that."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def only_pair(fields: Fields, targets: Collection[str]) -> tuple[Tensor, Tensor]:
    """The only input and the only target, where something takes no more than these."""
    inputs, wanted = sorted(fields.keys() - set(targets)), sorted(fields.keys() & set(targets))
    if len(inputs) != 1 or len(wanted) != 1:
        raise UserError(
            f"the data has {len(inputs)} inputs ({', '.join(inputs) or 'none'}) and {len(wanted)} targets "
            f"({', '.join(wanted) or 'none'}); this needs one of each"
        )
    return fields[inputs[0]], fields[wanted[0]]
