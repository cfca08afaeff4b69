"""What a run takes from its model's name and from its data where the options leave it open.

Classes, image size and normalization, the folders to train and evaluate on, the batch and the epochs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from stagewright.config.sections import AUTO, DEFAULT_BATCH, Config
from stagewright.config.sources import KINDS, kind_of, knows_classes, names_images
from stagewright.data.decode import Decoder
from stagewright.data.formats.folders import list_classes
from stagewright.data.sources import ImageSource, Source
from stagewright.errors import UserError
from stagewright.hardware.devices import num_devices
from stagewright.model.load import find_entry
from stagewright.model.networks.configured import Task, saved_weights, suited_model
from stagewright.model.networks.libraries import Package, package_of
from stagewright.planning.question import USUAL_SAMPLES
from stagewright.planning.traced import trace_model
from stagewright.runtime.process.assemble import open_data
from stagewright.voice import SILENT, Voice

_LEAST_BATCHES = 8  # of an epoch, where the batch was not given
_USUAL_STEPS = 100  # that few images are trained for, where neither steps nor epochs were given
_LEAST_SIDE, _SIDE_STEP = 64, 32  # of images that are smaller than the model's
_FEW_IMAGES = 1_000  # the smallest sets that such models are trained on from random weights have thousands
_MANY_CLASSES = 1_000  # of ImageNet: trained weights of such a model are public
_MOST_SEEN = 16  # images that are decoded to know their size
_SPLITS = ("val", "valid", "validation", "test")  # folders beside train/, the first that there is is evaluated on


def resolve_model(config: Config, voice: Voice = SILENT) -> Config:
    """Fill in what a model's name tells: classes, image size, normalization, and the weights beside its configuration.

    Classes are the data's where it knows them, and images as large as the data's where these are smaller than the
    model's; what was filled in from the data is a note. Of any other model there are 10 classes and images of side 32.
    """
    data, name = config.data, config.model.name
    if package_of(name) is Package.TRANSFORMERS and (task := _task_of(config)) is not None:
        name = suited_model(name, task)
        if name != config.model.name:
            voice.warn(
                f"the data has {task}, so {name.rpartition('@')[2]} is trained; choose by {config.model.name}@CLASS"
            )
    entry, init = find_entry(name, data.image), config.model.init or saved_weights(name)
    source = _glance(config) if knows_classes(data.source) and config.run.resume is None else None
    classes = config.model.classes or (entry.classes if entry else 10)
    takes_classes = entry is None or (entry.has_classes and saved_weights(name) is None)
    is_of_classes = config.loss.name in ("auto", "cross-entropy")
    if config.model.classes is None and takes_classes and is_of_classes and source is not None and source.classes:
        classes = max(2, source.classes)
        voice.note(f"{classes} classes")
    if data.image is None and init is None and isinstance(source, ImageSource) and entry is not None:
        usual = _usual_side(source)
        side = _side_of(name, classes, entry.image, usual)
        if side < entry.image:
            data = replace(data, image=side)
            voice.note(f"images of side {side}, as the median has {usual} pixels (the model's is {entry.image})")
    if entry is not None and not entry.has_classes and classes != entry.classes:
        raise UserError(
            f"--classes {classes} changes nothing with {name}, which has {entry.classes} outputs, its vocabulary; "
            "leave it out"
        )
    if data.normalize == "auto" and any(map(names_images, filter(None, (data.source, data.val)))):
        data = replace(data, normalize=entry.normalize if entry else "imagenet")
    model = replace(config.model, name=name, classes=classes, init=init)
    return replace(config, model=model, data=replace(data, image=data.image or (entry.image if entry else 32)))


def with_split(config: Config, voice: Voice) -> Config:
    """The configuration whose folder of images has train/ and val/ as two sets of data, not as two classes."""
    kind, _, where = config.data.source.partition(":")
    found: set[str] = set()
    with suppress(OSError):  # reported when it is opened
        found = set(list_classes(Path(where))) if kind == "folder" and where else found
        if not list_classes(Path(where) / "train"):
            found = set()
    if "train" not in found or not found <= {"train", *_SPLITS}:
        return config
    data = replace(config.data, source=f"folder:{Path(where) / 'train'}")
    held = next((name for name in _SPLITS if name in found), None)
    words = f"trains on {Path(where) / 'train'}"
    if data.val is None and held is not None:
        data = replace(data, val=f"folder:{Path(where) / held}")
        words += f", evaluates on {held}"
    voice.note(words)
    return replace(config, data=data)


def with_sizes(config: Config, samples: int, voice: Voice) -> Config:
    """The configuration with a batch and a number of epochs that suit its data, where these are left open."""
    plan, run, is_real = config.plan, config.run, config.data.source != "synthetic"
    if plan.file is not None:
        return config  # it has its own batch
    if plan.batch is None:
        is_wide = is_open(config) and run.device == "cuda" and not run.emulate
        usual = max(DEFAULT_BATCH, USUAL_SAMPLES * num_devices("cuda")) if is_wide else DEFAULT_BATCH
        most = max(samples // _LEAST_BATCHES, min(samples, _LEAST_BATCHES))
        batch = usual if usual <= most else 1 << (most.bit_length() - 1)
        count = plan.microbatches or 1
        plan = replace(plan, batch=count * max(1, batch // count))
        if is_real:
            voice.note(f"batch {plan.batch}")
    if run.steps is None and run.epochs is None and names_images(config.data.source):
        epochs = -(-_USUAL_STEPS // max(1, samples // (plan.batch or 1)))
        if epochs > 1:
            run = replace(run, epochs=epochs)
            voice.note(f"{epochs} epochs")
    return replace(config, plan=plan, run=run)


def few_images(config: Config, samples: int) -> str | None:
    """A line of advice where a model of ImageNet starts from random weights on very few images."""
    entry = find_entry(config.model.name, config.data.image)
    is_large = entry is not None and entry.classes >= _MANY_CLASSES
    if samples >= _FEW_IMAGES or not is_large or config.model.init or not names_images(config.data.source):
        return None
    return (
        f"advice: {samples:,} images are few for {config.model.name} with random weights (fewer than {_FEW_IMAGES:,}); "
        "--init FILE starts from trained ones"
    )


def is_open(config: Config) -> bool:
    """Whether the placement is left to the planner."""
    return config.plan.placement == AUTO and config.plan.file is None


def _glance(config: Config) -> Source:
    """The training data before there is a model, to know what it has."""
    data = config.data
    data = replace(data, normalize="imagenet", image=data.image or 32, decode="cpu", cutout=0)
    return open_data(replace(config, model=replace(config.model, classes=1), data=data), config.data.source)


def _usual_side(source: ImageSource) -> int:
    """The shorter side of the median image, of some of them."""
    decoder = Decoder()
    spread = np.linspace(0, len(source) - 1, min(_MOST_SEEN, len(source))).astype(int)
    return int(np.median([min(source.first_good(int(index), decoder)[1].shape[:2]) for index in spread]))


def _side_of(name: str, classes: int, side: int, usual: int) -> int:
    """The side that a zoo model gets its images in: its own, or where they are smaller, one that does not enlarge them.

    None is below 64 pixels, nor one that the model does not take.
    """
    smaller = max(_LEAST_SIDE, usual // _SIDE_STEP * _SIDE_STEP)
    if ":" in name:
        return side
    if smaller >= side:
        return side
    try:
        trace_model(name, classes, smaller)
    except UserError:
        return side
    return smaller


def _task_of(config: Config) -> Task | None:
    """What data and loss ask of a model, where that is clear before there is a model."""
    kind, loss = kind_of(config.data.source), config.loss.name
    if loss == "next-token" or (loss == "auto" and kind is KINDS["tokens"]):
        return Task.NEXT_TOKEN
    if loss not in ("auto", "cross-entropy") or kind is KINDS["synthetic"]:
        return None
    if kind is None or not kind.has_labels:
        source = _glance(config)
        fields = source.batch(np.arange(1))
        targets = [fields[name] for name in source.targets]
        if not targets or targets[0].dim() != 1 or targets[0].is_floating_point():
            return None
    return Task.CLASSES
