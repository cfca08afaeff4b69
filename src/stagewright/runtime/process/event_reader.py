"""Hears what ranks tell through the store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import Store

from stagewright.runtime.process.rank import EVENTS

Listen = Callable[[dict[str, Any]], None]
_POLL_SECONDS = 0.02


class EventReader:
    """A thread that takes one generation's events off the store, keeps the failures and passes on the rest."""

    def __init__(self, store: Store, listen: Listen) -> None:
        self.failures: list[dict[str, Any]] = []
        self._store = store
        self._listen = listen
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear what is there already, then stop; what went wrong while hearing goes wrong here."""
        self._closing.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._closing.wait(_POLL_SECONDS):
                self._drain()
            self._drain()
        except Exception as error:
            self._error = error

    def _drain(self) -> None:
        while self._store.queue_len(EVENTS):
            event = json.loads(self._store.queue_pop(EVENTS, block=False))
            if event["kind"] == "failure":
                self.failures.append(event)
            else:
                self._listen(event)
