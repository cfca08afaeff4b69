"""A model traced without running it, on tensors without storage, where `known` has no shapes of it."""

from __future__ import annotations

from functools import cache
from typing import Any

from stagewright.config.sections import Config
from stagewright.errors import UserError
from stagewright.model.call import Form
from stagewright.model.chain import Chain
from stagewright.model.load import build_model, construct, find_entry
from stagewright.model.networks.libraries import package_of
from stagewright.model.networks.weights import freeze
from stagewright.model.networks.zoo import ZOO, Entry
from stagewright.model.walk import model_errors
from stagewright.objects import is_given
from stagewright.plan.plan import TiedParameter
from stagewright.planning.known import Tied, Traced, keep, known_model
from stagewright.profile.trace import meta_example, on_meta, to_meta, trace_shapes


def trace_model(
    name: str,
    classes: int | None = None,
    image: int | None = None,
    form: Form | None = None,
    frozen: str | None = None,
) -> Traced:
    """Trace a model by its name, on tensors that look like an image or as `form` says."""
    usual, entry = form_of(name, image), ZOO.get(name)
    if entry is not None:  # as it comes with the package
        classes, image = (
            None if asked == own else asked for asked, own in ((classes, entry.classes), (image, entry.image))
        )
    make = _trace if is_given(name) else _traced  # a script may give one name to several objects
    return make(name, classes, image, None if form == usual else form, frozen)


def trace_config(config: Config, form: Form | None = None) -> Traced:
    """Trace the model of a configuration."""
    return trace_model(config.model.name, config.model.classes, config.data.image, form, config.model.freeze)


def _trace(name: str, classes: int | None, image: int | None, form: Form | None, frozen: str | None) -> Traced:
    is_usual = name in ZOO and form is None and frozen is None
    if is_usual and (known := known_model(name, classes, image)) is not None:
        return known
    chain = chain_of(name, classes, image, form, frozen)
    with model_errors(name, chain.example.form):
        found = Traced(trace_shapes(chain), tied_by(chain), rate_of(name))
    if is_usual:
        keep(found, name, classes, image)
    return found


_traced = cache(_trace)


def trace_anew(
    name: str,
    classes: int | None = None,
    image: int | None = None,
    form: Form | None = None,
    frozen: str | None = None,
) -> Traced:
    """Trace a model, known or not."""
    with model_errors(name, form or form_of(name, image)):
        chain = chain_of(name, classes, image, form, frozen)
        return Traced(trace_shapes(chain), tied_by(chain), rate_of(name))


def chain_of(
    name: str,
    classes: int | None = None,
    image: int | None = None,
    form: Form | None = None,
    frozen: str | None = None,
) -> Chain:
    """The chain of units of a model by its name, on tensors without storage."""
    form = form or form_of(name, image)
    with model_errors(name, form):
        return Chain(meta_model(name, classes, image, frozen), meta_example(form))


def chain_of_config(config: Config, form: Form | None = None) -> Chain:
    """That of a configuration's model."""
    return chain_of(config.model.name, config.model.classes, config.data.image, form, config.model.freeze)


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
