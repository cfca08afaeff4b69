"""What a worker can keep of its state, as the worker sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Extra(Protocol):
    """State of a stage besides its tensors: what `state` gives as JSON goes back in by `load`."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class Saver:
    """Told to keep the replicas' state as it is now; the default keeps nothing."""

    def save(self, batch: int) -> None:
        """Have a copy of what `batch` batches have made; writing it goes on meanwhile."""

    def close(self) -> None:
        """Everything is written."""
