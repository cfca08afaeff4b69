"""Models of transformers by their configuration: `hf:CONFIG`, or `hf:CONFIG@CLASS`.

A configuration is a folder with a config.json, such a file, or the name of a model type, whose default it then is.
Nothing is downloaded; code that lies beside a configuration is never run, and no weights but safetensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import UserError, did_you_mean, first_line
from stagewright.files import read_text
from stagewright.model.networks.libraries import USUAL_SIDE, Package, built, import_library, normalization, package_of
from stagewright.model.networks.weights import has_weights, weight_files
from stagewright.model.networks.zoo import Entry

_CONFIG = "config.json"
_PREPROCESSOR = "preprocessor_config.json"
_MOST_TOKENS = 512  # of a sample to plan with, where the data is not known
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length")  # where a configuration has its longest text
# Fields that name code to fetch and run; they are left out.
_FOREIGN = ("auto_map", "custom_pipelines", "attn_implementation", "_attn_implementation", "experts_implementation")
_COUNTS = ("num", "layer", "depth", "label")  # in names of fields that say how many of something a model has
_MOST_COUNT = 2**20
_MOST_NUMBER = 2**40


class Task(StrEnum):
    """What data and loss ask of a model."""

    CLASSES = "one class per sample"
    NEXT_TOKEN = "the next token of a text"


class _Head(Enum):
    """What a class of transformers computes at its end, by the name of the table with the classes that do."""

    NONE = "MODEL_MAPPING"
    IMAGE = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"
    SEQUENCE = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"
    AUDIO = "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING"
    CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING"
    MASKED = "MODEL_FOR_MASKED_LM_MAPPING"
    TRANSLATION = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"


_CLASSIFIERS = (_Head.IMAGE, _Head.SEQUENCE, _Head.AUDIO)
_OF_TEXT = (_Head.CAUSAL, _Head.MASKED, _Head.TRANSLATION)  # one output for each token of the vocabulary


class Configured:
    """A model of transformers by its configuration."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._library = import_library(Package.TRANSFORMERS.module)
        self._source, self._asked = name.partition(":")[2], ""
        if "@" in self._source and not Path(self._source).exists():
            self._source, _, self._asked = self._source.rpartition("@")
        self.fields = self._read()
        self.config = self._make_config()
        self.kind = self._find_class()

    @property
    def folder(self) -> Path | None:
        """The folder of the configuration, which may have weights too."""
        return Path(self._source) if Path(self._source).is_dir() else None

    def entry(self, image: int | None = None) -> Entry:
        """What the configuration says of the model, built for images of that side."""
        config, has_classes = self.config, not self._computes(*_OF_TEXT)
        side = self._number("image_size", USUAL_SIDE)
        if image is not None and getattr(config, "image_size", None) is not None:
            config.image_size = image
        return Entry(
            self._build,
            image=image or side,
            classes=self._number("num_labels" if has_classes else "vocab_size", 2),
            tokens=self._tokens(),
            channels=self._number("num_channels", 3),
            normalize=self._normalization(),
            has_classes=has_classes,
        )

    def _number(self, name: str, usual: int) -> int:
        """A number of the configuration, the last of several; `usual` where it has none."""
        found = getattr(self.config, name, None)
        number = found[-1] if isinstance(found, list | tuple) and found else usual if found is None else found
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UserError(f"model '{self.name}': {name} of its configuration is {found!r:.80}; give at least 1")
        return number

    def suited(self, task: Task) -> str:
        """The model's name, with the class that suits a task where its own does not and none was asked for."""
        heads: tuple[_Head, ...] = ()
        if task is Task.CLASSES and not self._computes(*_CLASSIFIERS):
            heads = (_Head.IMAGE, _Head.SEQUENCE)
        elif task is Task.NEXT_TOKEN and not self._computes(_Head.CAUSAL, _Head.TRANSLATION) and not self._encodes:
            heads = (_Head.CAUSAL,)
        found = [] if self._asked else [kind for head in heads for kind in self._classes(head)]
        return f"{Package.TRANSFORMERS}:{self._source}@{found[0].__name__}" if found else self.name

    @staticmethod
    def is_saved(folder: str) -> bool:
        """Whether a folder is of transformers, which then reads its weights: it knows their older names."""
        return (Path(folder) / _CONFIG).is_file()

    def load(self, folder: str, classes: int | None, image: int | None) -> tuple[nn.Module, set[str], set[str]]:
        """The model in single precision with a folder's weights; the names that it lacks, and that are not used."""
        weight_files(folder)  # reports what can't be read before transformers tries
        self._configure(self.entry(image).classes if classes is None else classes)
        options: dict[str, Any] = {"config": self.config, "dtype": torch.float32, "output_loading_info": True}
        options |= {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
        with self._quiet():
            made: Any = built(self.name, partial(self.kind.from_pretrained, folder), **options)
        model, said = made
        unlike = {entry if isinstance(entry, str) else entry[0] for entry in said["mismatched_keys"]}
        return model.train(), {*said["missing_keys"], *unlike}, set(said["unexpected_keys"])

    def _configure(self, classes: int) -> None:
        if not self._computes(*_OF_TEXT):
            self.config.num_labels = classes

    def _build(self, classes: int) -> nn.Module:
        self._configure(classes)
        with self._quiet():
            return built(self.name, self.kind, config=self.config)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Within, transformers prints nothing: what it says is checked, and said in one line."""
        logging = self._library.utils.logging
        before, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(before)
            if has_bar:
                logging.enable_progress_bar()

    def _read(self) -> Mapping[str, Any]:
        """The fields of the configuration; none of a model type, whose configuration is transformers' default."""
        path = Path(self._source)
        if path.is_dir():
            path = path / _CONFIG
        elif not path.is_file():
            if self._source in self._library.CONFIG_MAPPING:
                return {}
            if "/" not in self._source and not self._source.endswith(".json"):
                raise Package.TRANSFORMERS.unknown(self._source, self._library.CONFIG_MAPPING.keys())
            raise UserError(
                f"model '{self.name}': there is no folder or file {self._source}, and nothing is downloaded; get a "
                f"model of the hub by hf download {self._source} --local-dir DIR, then use hf:DIR"
            )
        fields = _without_foreign(_read_object(path, self.name))
        if (wrong := _beyond(fields)) is not None:
            raise UserError(f"model '{self.name}': {wrong[0]} of {path} is {wrong[1]}; give at most {wrong[2]}")
        if not isinstance(fields.get("model_type"), str):
            raise UserError(f"model '{self.name}': {path} has no model_type; name a configuration of transformers")
        return fields

    def _make_config(self) -> Any:
        kind = self.fields.get("model_type", self._source)
        if kind not in self._library.CONFIG_MAPPING:
            raise UserError(
                f"model '{self.name}': its model_type {kind!r} is not part of transformers "
                f"{self._library.__version__}, and code that lies beside a configuration is never run; make the model "
                "in a factory of your own"
            )
        if "quantization_config" in self.fields:
            raise UserError(f"model '{self.name}' is quantized, so it can't be trained; use it with weights in bf16")
        try:
            with self._quiet():
                return self._library.CONFIG_MAPPING[kind].from_dict(dict(self.fields))
        except Exception as error:  # of a field's value, which transformers checks in many ways
            raise UserError(
                f"model '{self.name}': transformers raised {type(error).__name__} for its configuration: "
                f"{first_line(error, 200)}"
            ) from error

    def _find_class(self) -> Any:
        """The class that was asked for, that of the configuration, or without a head the usual one of its type."""
        saved = self.fields.get("architectures")
        name = self._asked or (str(saved[0]) if isinstance(saved, list) and saved else "")
        if not name:
            return self._usual_class()
        found: Any = getattr(self._library, name, None)
        if not isinstance(found, type) or getattr(found, "config_class", None) is None:
            family = type(self.config).__name__.removesuffix("Config")
            known = [other for other in dir(self._library) if other.startswith(family)]
            raise UserError(
                f"model '{self.name}': transformers {self._library.__version__} has no model class '{name}'; "
                f"{did_you_mean(name, known)}"
            )
        takes: Any = getattr(found, "config_class")  # noqa: B009
        if not isinstance(self.config, takes):
            raise UserError(
                f"model '{self.name}': class {name} takes a {takes.__name__}, and this configuration is a "
                f"{type(self.config).__name__}; name a class of its own family"
            )
        return found if self._asked or found not in self._classes(_Head.NONE) else self._usual_class()

    def _usual_class(self) -> Any:
        """The head that a model type usually has: decoders predict the next token, all others classify."""
        heads = (_Head.CAUSAL,) if not self._encodes else ()
        found = [kind for head in (*heads, _Head.IMAGE, _Head.SEQUENCE) for kind in self._classes(head)]
        if not found:
            raise UserError(
                f"model '{self.name}' neither classifies nor predicts the next token; name the class to train: "
                f"hf:{self._source}@CLASS"
            )
        return found[0]

    @property
    def _encodes(self) -> bool:
        """Whether a token sees those behind it."""
        return bool(self._classes(_Head.MASKED)) or bool(self._classes(_Head.TRANSLATION))

    def _classes(self, head: _Head) -> tuple[Any, ...]:
        """The classes of this model type with a head."""
        found = getattr(self._library, head.value).get(type(self.config), ())
        return tuple(found) if isinstance(found, tuple) else (found,)

    def _computes(self, *heads: _Head) -> bool:
        return any(self.kind in self._classes(head) for head in heads)

    def _tokens(self) -> int | None:
        if getattr(self.kind, "main_input_name", None) != "input_ids":
            return None
        known = [getattr(self.config, name, None) for name in _LENGTHS]
        return min([_MOST_TOKENS, *(length for length in known if isinstance(length, int) and length > 0)])

    def _normalization(self) -> str:
        path = None if self.folder is None else self.folder / _PREPROCESSOR
        if path is None or not path.is_file():
            return "imagenet"
        fields = _read_object(path, self.name)
        mean, std = (fields.get(name) for name in ("image_mean", "image_std"))
        is_known = all(isinstance(one, list) and all(isinstance(x, int | float) for x in one) for one in (mean, std))
        return normalization(mean or (), std or ()) if is_known and mean and std else "imagenet"


def _without_foreign(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, and of those inside it, without what names code to fetch."""
    return {
        name: _without_foreign(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in _FOREIGN
    }


def _beyond(fields: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """The first field with a number beyond its bound, and both: transformers makes a list of each layer and label."""
    for name, value in fields.items():
        if isinstance(value, dict) and (inner := _beyond(value)) is not None:
            return inner
        most = _MOST_COUNT if any(word in name for word in _COUNTS) else _MOST_NUMBER
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > most:
                return name, number, most
    return None


def _read_object(path: Path, model: str) -> Mapping[str, Any]:
    """The fields of a JSON file with one object."""
    try:
        fields = json.loads(read_text(path))
    except OSError as error:
        raise UserError(f"model '{model}': {path}: {error.strerror}; name a folder with a {_CONFIG}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"model '{model}': {path} is not JSON ({first_line(error, 80)})") from error
    if not isinstance(fields, dict):
        raise UserError(f"model '{model}': {path} holds a {type(fields).__name__}, not an object with fields")
    return fields


def version_of(name: str) -> str:
    """What a model of a package is, beside its name: the version of its package, and its configuration."""
    package = package_of(name)
    assert package is not None
    fields = Configured(name).fields if package is Package.TRANSFORMERS else {}
    return f"{package.version} {json.dumps(fields, sort_keys=True)}"


def saved_weights(name: str) -> str | None:
    """The folder of a model's configuration, where it has weights too."""
    folder = Configured(name).folder if package_of(name) is Package.TRANSFORMERS else None
    return str(folder) if folder is not None and has_weights(folder) else None


def suited_model(name: str, task: Task) -> str:
    """A model's name, with the class of transformers that suits the task where its own does not; others as they are."""
    return Configured(name).suited(task) if package_of(name) is Package.TRANSFORMERS else name
