"""A model traced without running it, and a cache of what that found.

Tracing a zoo model takes seconds, most of them imports of torch that nothing else here needs. Its shapes are kept in
the user's cache, under a digest of the code that they come from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stagewright import model as model_package
from stagewright.files import read_text, write_text
from stagewright.model.cut import Chain
from stagewright.model.load import build_model
from stagewright.model.walk import model_errors
from stagewright.model.zoo import ZOO, build
from stagewright.profile import shapes as shapes_module
from stagewright.profile.shapes import Convolution, Kind, Shape, meta_example, on_meta, trace_shapes


class TracedModel:
    """A model traced on tensors without storage: its chain of units, and the shape of each unit for one sample."""

    def __init__(self, name: str, classes: int | None, image: int | None) -> None:
        side = image or (ZOO[name].image if name in ZOO else 32)
        self._name = name
        self._classes = classes
        self._sample = (3, side, side)
        self.shapes = self._shapes()

    @cached_property
    def chain(self) -> Chain:
        name = self._name
        own = ":" in name
        module = build_model(name, 0, self._classes).to("meta") if own else on_meta(lambda: build(name, self._classes))
        return Chain(module, meta_example(self._sample))

    def _shapes(self) -> tuple[Shape, ...]:
        path = None
        if self._name in ZOO:
            path = _folder() / f"{self._name}-{_digest(self._name, self._classes, self._sample)}.json"
            with suppress(OSError, ValueError, KeyError, TypeError):
                return read_shapes(read_text(path))
        with model_errors(self._name, self._sample):
            found = trace_shapes(self.chain, self._sample)
        if path is not None:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, shapes_text(found))
        return found


@cache
def trace_model(name: str, classes: int | None = None, image: int | None = None) -> TracedModel:
    """Trace a zoo model or a user's own, on tensors without storage."""
    return TracedModel(name, classes, image)


def shapes_text(shapes: Sequence[Shape]) -> str:
    """Shapes as JSON."""
    return json.dumps([asdict(shape) for shape in shapes])


def read_shapes(text: str) -> tuple[Shape, ...]:
    """Shapes from JSON; ValueError, KeyError or TypeError where it has others."""
    entries: list[dict[str, Any]] = json.loads(text)
    if not entries:
        raise ValueError("no shapes")
    found = []
    for entry in entries:
        convolution = entry.pop("convolution")
        kind = Kind(entry.pop("kind"))
        found.append(Shape(**entry, kind=kind, convolution=Convolution(**convolution) if convolution else None))
    return tuple(found)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagewright" / "shapes"


def _digest(*about: object) -> str:
    return hashlib.sha256(repr((about, _code(), version("torch"))).encode()).hexdigest()[:16]


@cache
def _code() -> str:
    """A digest of the code that shapes come from."""
    files = [*Path(str(model_package.__file__)).parent.glob("*.py"), Path(str(shapes_module.__file__))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()
