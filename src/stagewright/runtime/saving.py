"""What a worker can keep of its state, as the worker sees it."""

from __future__ import annotations


class Saver:
    """Told to keep the replicas' state as it is now; the default keeps nothing."""

    def save(self, batch: int) -> None:
        """Have a copy of what `batch` batches have made; writing it goes on meanwhile."""

    def close(self) -> None:
        """Everything is written."""
