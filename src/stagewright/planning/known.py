"""Models as plans see them, and those that are known without torch: it takes seconds to import and to trace a model.

The shapes of the zoo's models, as they are by default, come with the package (`profile/zoo_shapes.json.gz`; a test
traces them again). With other classes or images, or of another torch, those that were traced once are kept in the
user's cache, under a digest of the code that they come from.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import stagewright
from stagewright.files import cache_folder, read_text, write_text
from stagewright.plan.plan import TiedParameter
from stagewright.profile.shapes import Convolution, Kind, Shape

SHIPPED = "zoo_shapes.json.gz"
_CODE = ("model/**/*.py", "profile/shapes.py", "profile/trace.py")  # that shapes come from
Tied = Callable[[Sequence[str]], Sequence[TiedParameter]]  # by the cuts of a model


@dataclass(frozen=True, slots=True)
class Traced:
    """What a plan needs of a model: the shape of each unit for one sample, and what its cuts tie."""

    shapes: tuple[Shape, ...]
    tied: Tied
    rate: str  # what speed counts: images/s, or of a model of text samples/s

    def as_text(self) -> str:
        """As JSON, with the parameters that several units share."""
        names = [shape.name for shape in self.shapes]
        shared = [[tied.names, tied.homes, tied.size] for tied in self.tied(names[1:])]
        return json.dumps({"rate": self.rate, "shared": shared, "shapes": [asdict(shape) for shape in self.shapes]})


def read_traced(text: str) -> Traced:
    """A model from JSON; ValueError, KeyError or TypeError where it is none."""
    content: dict[str, Any] = json.loads(text)
    shapes = []
    for entry in content["shapes"]:
        geometry, kind = entry.pop("convolution"), Kind(entry.pop("kind"))
        shapes.append(Shape(**entry, kind=kind, convolution=Convolution(**geometry) if geometry else None))
    if not shapes:
        raise ValueError("no shapes")
    return Traced(tuple(shapes), _shared([shape.name for shape in shapes], content["shared"]), str(content["rate"]))


def _shared(units: Sequence[str], shared: Sequence[tuple[Sequence[str], Sequence[int], int]]) -> Tied:
    """What cuts tie, by the numbers of the units that use each parameter."""

    def tied(cuts: Sequence[str]) -> list[TiedParameter]:
        bounds = [units.index(cut) for cut in cuts]
        found = []
        for names, users, size in shared:
            homes = sorted({sum(user >= bound for bound in bounds) for user in users})
            if len(homes) > 1:
                found.append(TiedParameter(tuple(names), tuple(homes), size))
        return found

    return tied


def known_model(name: str, classes: int | None = None, image: int | None = None) -> Traced | None:
    """A model of the zoo that comes with the package, or that was traced before."""
    if classes is None and image is None and name in shipped():
        return read_traced(shipped()[name])
    with suppress(OSError, ValueError, KeyError, TypeError):
        return read_traced(read_text(_file(name, classes, image)))
    return None


def keep(model: Traced, name: str, classes: int | None, image: int | None) -> None:
    """Keep a model of the zoo for the next time, if the cache can be written."""
    path = _file(name, classes, image)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, model.as_text())


def pack(models: Mapping[str, Traced]) -> bytes:
    """The file of the zoo's shapes."""
    texts = {name: model.as_text() for name, model in models.items()}
    return gzip.compress(json.dumps({"torch": _release(), "models": texts}).encode(), mtime=0)


@cache
def shipped() -> Mapping[str, str]:
    """The models that come with the package, as JSON; none where another torch traced them."""
    packed = resources.files("stagewright.profile").joinpath(SHIPPED).read_bytes()
    content: dict[str, Any] = json.loads(gzip.decompress(packed))
    return content["models"] if content["torch"] == _release() else {}


def _release() -> str:
    """The first two numbers of torch's version: what autograd saves may change with them."""
    return ".".join(version("torch").split(".")[:2])


def _file(name: str, classes: int | None, image: int | None) -> Path:
    about = repr((name, classes, image, _code(), version("torch")))
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return cache_folder("shapes") / f"{plain}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"


@cache
def _code() -> str:
    """A digest of the code that shapes come from."""
    root = Path(str(stagewright.__file__)).parent
    files = sorted(path for pattern in _CODE for path in root.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
