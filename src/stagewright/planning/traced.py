"""A model traced without running it, and a cache of what that found.

Tracing a model takes seconds, most of them imports of torch that nothing else here needs. The shapes of the zoo's
models, as they are by default, come with the package (`profile/zoo_shapes.json.gz`; a test traces them again). With
other classes, images or another torch, a zoo model's are kept in the user's cache, under a digest of the code that they
come from.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, cached_property
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stagewright import model as model_package
from stagewright.errors import UserError
from stagewright.files import cache_folder, read_text, write_text
from stagewright.model.call import Form
from stagewright.model.chain import Chain
from stagewright.model.load import build_model, construct, find_entry
from stagewright.model.networks.libraries import package_of
from stagewright.model.networks.weights import freeze
from stagewright.model.networks.zoo import ZOO, Entry
from stagewright.model.walk import model_errors
from stagewright.objects import is_given
from stagewright.plan.plan import TiedParameter
from stagewright.profile import shapes as shapes_module
from stagewright.profile.shapes import Convolution, Kind, Shape, meta_example, on_meta, to_meta, trace_shapes

SHIPPED = "zoo_shapes.json.gz"
Tied = Callable[[Sequence[str]], Sequence[TiedParameter]]


class TracedModel:
    """A model traced on tensors without storage: its chain of units, and the shape of each unit for one sample."""

    def __init__(
        self, name: str, classes: int | None, form: Form, image: int | None = None, frozen: str | None = None
    ) -> None:
        self._name = name
        self._classes = classes
        self._form = form
        self._image = image
        self._frozen = frozen
        self.shapes = self._shapes()

    @cached_property
    def chain(self) -> Chain:
        return Chain(self._model(), meta_example(self._form))

    def tied(self, cuts: Sequence[str]) -> Sequence[TiedParameter]:
        """The parameters that several stages would use if the model were cut before some units."""
        return tied_by(self.chain)(cuts) if self._may_tie else ()

    @cached_property
    def _may_tie(self) -> bool:
        """Whether a parameter may be used twice: no module of the zoo is, so there a parameter has two names."""
        named = list(self._model().named_parameters(remove_duplicate=False))
        return self._name not in ZOO or len({id(parameter) for _, parameter in named}) < len(named)

    def _model(self) -> Any:
        return meta_model(self._name, self._classes, self._image, self._frozen)

    def _shapes(self) -> tuple[Shape, ...]:
        path = None
        if self._name in ZOO and self._frozen is None:
            if self._classes is None and self._form == form_of(self._name) and self._name in shipped_shapes():
                return read_shapes(shipped_shapes()[self._name])
            path = cache_folder("shapes") / f"{self._name}-{_digest(self._name, self._classes, self._form)}.json"
            with suppress(OSError, ValueError, KeyError, TypeError):
                return read_shapes(read_text(path))
        with model_errors(self._name, self._form):
            found = trace_shapes(self.chain)
        if path is not None:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, shapes_text(found))
        return found


def trace_model(
    name: str,
    classes: int | None = None,
    image: int | None = None,
    form: Form | None = None,
    frozen: str | None = None,
) -> TracedModel:
    """Trace a model by its name, on tensors without storage, that look like an image or as `form` says."""
    make = TracedModel if is_given(name) else _traced  # a script may give one name to several objects
    return make(name, classes, form or form_of(name, image), image, frozen)


@cache
def _traced(name: str, classes: int | None, form: Form, image: int | None, frozen: str | None) -> TracedModel:
    return TracedModel(name, classes, form, image, frozen)


def meta_model(name: str, classes: int | None = None, image: int | None = None, frozen: str | None = None) -> Any:
    """A model by its name, whose tensors have no storage; `frozen` are patterns of parameters that are not trained."""
    if ":" in name and package_of(name) is None:
        return to_meta(build_model(name, 0, classes, frozen=frozen))
    try:
        model = on_meta(lambda: construct(name, classes, image))
    except UserError:
        if package_of(name) is None:
            raise
        model = to_meta(build_model(name, 0, classes, image=image))  # code that reads a value while it builds
    if frozen is not None:
        freeze(model, frozen)
    return model


@cache
def _known(name: str) -> Entry | None:
    return find_entry(name)


def form_of(name: str, image: int | None = None) -> Form:
    """What a model takes by default, as far as its name tells; of the user's own, an image."""
    entry = _known(name)
    if entry is not None and entry.tokens is not None:
        return Form.text(entry.tokens)
    return Form.image(image or (entry.image if entry else 32), entry.channels if entry else 3)


def rate_of(name: str) -> str:
    """What a model's speed counts: images, or of a model of text samples."""
    entry = _known(name)
    return "samples/s" if entry is not None and entry.tokens is not None else "images/s"


def tied_by(chain: Chain) -> Tied:
    """The parameters that several stages would use if a model were cut before some units."""
    return lambda cuts: [TiedParameter(*tied) for tied in chain.tied(cuts)]


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


def shipped_text(models: Iterable[str]) -> bytes:
    """The file of the zoo's shapes, as this torch traces them."""
    chains = {name: Chain(meta_model(name), meta_example(form_of(name))) for name in models}
    found = {name: shapes_text(trace_shapes(chain)) for name, chain in chains.items()}
    return gzip.compress(json.dumps({"torch": _release(), "models": found}).encode(), mtime=0)


@cache
def shipped_shapes() -> Mapping[str, str]:
    """The shapes that come with the package, as JSON, by model; none where another torch traced them."""
    packed = resources.files("stagewright.profile").joinpath(SHIPPED).read_bytes()
    content: dict[str, Any] = json.loads(gzip.decompress(packed))
    return content["models"] if content["torch"] == _release() else {}


def _release() -> str:
    """The first two numbers of torch's version: what autograd saves may change with them."""
    return ".".join(version("torch").split(".")[:2])


def _digest(*about: object) -> str:
    return hashlib.sha256(repr((about, _code(), version("torch"))).encode()).hexdigest()[:16]


@cache
def _code() -> str:
    """A digest of the code that shapes come from."""
    files = [*Path(str(model_package.__file__)).parent.rglob("*.py"), Path(str(shapes_module.__file__))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()
