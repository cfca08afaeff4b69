"""The options of a run as a command line gives them, for `train` and `schedule`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagewright.config.sections import options
from stagewright.config.toml import Tables, changed_keys, keys_of, parse_assignment, read_toml, with_new_names
from stagewright.run.folder import is_run


def read_layers(parsed: argparse.Namespace) -> tuple[list[Tables], set[str]]:
    """The tables of --config, then of --set, then of flags; later ones win. Also the keys that the user gave.

    A file may list every option: what has its default there does not count as given. Nothing of a run's own file does.
    """
    layers: list[Tables] = [parse_assignment(text) for text in parsed.set]
    joined = {option.key for option in options() if option.is_joined}
    for key, value in vars(parsed).items():
        section, dot, name = key.partition(".")
        if dot:
            layers.append({section: {name: ",".join(value) if key in joined else value}})
    given = keys_of(*layers)
    if not parsed.config:
        return layers, given
    file = read_toml(parsed.config)
    if is_run(Path(parsed.config).parent):
        return [with_new_names(file), *layers], given
    return [file, *layers], given | changed_keys(file)
