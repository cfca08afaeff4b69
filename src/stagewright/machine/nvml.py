"""NVIDIA's management library: one place that loads it, and questions that may have no answer."""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any


class NoNvml(RuntimeError):
    """The library is not there, or does not work; the text says why."""


class Nvml:
    """An opened library; what a card, a driver or a container does not tell is None."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ask("nvmlShutdown")

    def ask(self, question: str, *arguments: Any) -> Any:
        """What a function of the library answers; None where it is missing or fails."""
        function = getattr(self._library, question, None)
        try:
            answer = None if function is None else function(*arguments)
        except (self._library.NVMLError, UnicodeDecodeError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def constant(self, name: str) -> Any:
        """A number by its name in the library; None in a release that has no such name."""
        return getattr(self._library, name, None)

    def handles(self) -> list[Any]:
        """Every GPU that this process may ask about, by index."""
        found = (self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(self.ask("nvmlDeviceGetCount") or 0))
        return [handle for handle in found if handle is not None]


def open_nvml() -> Nvml:
    """Load and start the library; NoNvml says why that can't be."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(str(error)) from error
    except OSError as error:
        raise NoNvml(f"NVML: {error.strerror or error}") from error
    return Nvml(pynvml)
