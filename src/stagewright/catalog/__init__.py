"""Hardware, links, software and clusters as TOML, each figure with its source and date."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from stagewright.catalog.tables import make_catalogue
from stagewright.catalog.values import Catalogue
from stagewright.cluster import Cluster

_FILES = ("devices.toml", "links.toml", "software.toml", "clusters.toml", "calibration.toml")


@cache
def shipped() -> Catalogue:
    """The catalogue that comes with the package."""
    return read_catalogue(())


def price_source(device: str) -> str:
    """Where the catalogue's price of a device comes from, and when it was one."""
    tables: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("devices.toml").read_text())
    figure = tables["device"].get(device, {}).get("usd")
    source = tables["source"].get(figure[1], {}) if isinstance(figure, list) else {}
    return f"{source.get('date', 'no date')}: {source.get('text', 'no source')}"


def open_cluster(text: str) -> tuple[Catalogue, Cluster]:
    """A cluster by name, or the one that a user's own file describes, with what that file adds to the catalogue."""
    if not (text.endswith(".toml") or Path(text).is_file()):
        catalogue = shipped()
        return catalogue, catalogue.cluster(text)
    catalogue = read_catalogue([text])
    own = list(_read_file(text).get("cluster", {}))
    if len(own) != 1:
        raise ValueError(f"cluster file {text} describes {len(own)} clusters; describe one as [cluster.NAME]")
    return catalogue, catalogue.clusters[own[0]]


def read_catalogue(own_files: Iterable[str], overrides: Mapping[str, Any] | None = None) -> Catalogue:
    """The shipped files, then a user's own over them, then single values as a calibration tries them."""
    tables: dict[str, dict[str, Any]] = {}
    folder = resources.files(__package__)
    for name in _FILES:
        _merge(tables, tomllib.loads(folder.joinpath(name).read_text()))
    for path in own_files:
        _merge(tables, _read_file(path))
    _merge(tables, overrides or {})
    return make_catalogue(tables)


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cluster file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cluster file {path}: not TOML: {error}") from error


def _merge(tables: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(tables.get(key, {}), dict):
            _merge(tables.setdefault(key, {}), value)
        else:
            tables[key] = value
