"""What training needs of a model's output, said in one line whoever runs the model first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class WrongOutput(ValueError):
    """A model runs, but what it returns can't be trained."""


def require_logits(output: Any, *, training: bool = True) -> None:
    """One tensor [samples, classes], and in training one that a gradient goes back from."""
    if not isinstance(output, Tensor):
        kind = type(output).__name__.removeprefix("immutable_")  # as a traced list is called
        raise WrongOutput(f"the model returns {kind}, not one tensor; return the logits alone")
    if training and not output.requires_grad:
        raise WrongOutput("no parameter of the model gets a gradient; at least one must require it")
    if output.dim() < 2:
        raise WrongOutput(f"the model returns shape {list(output.shape)}; it must return logits [samples, classes]")


@contextmanager
def running(name: str, sample: Sequence[int]) -> Iterator[None]:
    """Whatever a model's own code raises on samples of a shape is the user's to read, in one line."""
    try:
        yield
    except WrongOutput as error:
        raise ValueError(f"model '{name}': {error}") from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{name} can't run on input {list(sample)}: {type(error).__name__}: {reason[:160]}; give --image"
        ) from error
