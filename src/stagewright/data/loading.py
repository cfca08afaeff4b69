"""How samples are loaded, and how many of them may be bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from stagewright.data.images import Bad
from stagewright.data.records import DataError


class Decode(StrEnum):
    """Where images are decoded."""

    CPU = "cpu"
    GPU = "gpu"
    ONCE = "once"  # on the CPU, and kept on the device


@dataclass(frozen=True, slots=True)
class Loading:
    """The type and device of samples, the threads, how far they work ahead, and how many records may be bad."""

    dtype: torch.dtype = torch.float32
    threads: int = 1
    ahead: int = 4  # microbatches
    max_bad: int = 0
    tell: Callable[[Bad], None] = lambda bad: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    decode: Decode = Decode.CPU

    def __post_init__(self) -> None:
        for flag, value, least in (("--loader-threads", self.threads, 1), ("--ahead", self.ahead, 0)):
            if value < least:
                raise ValueError(f"{flag} is {value}; give at least {least}")
        if self.max_bad < 0:
            raise ValueError(f"--max-bad is {self.max_bad}; give the bad records to allow, from 0 on")


class BadRecords:
    """Records that could not be used, each counted once; too many end the run."""

    def __init__(self, loading: Loading) -> None:
        self._most = loading.max_bad
        self._tell = loading.tell
        self._seen: set[int] = set()

    def count(self, bad: Bad) -> None:
        if bad.index in self._seen:
            return
        self._seen.add(bad.index)
        self._tell(bad)
        if len(self._seen) > self._most:
            raise DataError(
                f"{len(self._seen)} bad records, {self._most} are allowed; the last: {bad.reason}; "
                "mend the data, or allow more with --max-bad"
            )
