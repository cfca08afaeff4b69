"""What must be the same on every machine of a run, and how to say what is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from pydantic import TypeAdapter

from stagewright import __version__
from stagewright.config.toml import as_tables
from stagewright.runtime.job import Job

# Each machine has its own of these: where files are, how it works through them, which machine it is.
_OWN = {
    "data.source",
    "data.val",
    "data.class_names",
    "data.loader_threads",
    "data.ahead",
    "plan.file",
    "plan.profile",
    "run.export",
    "run.log_every",
    "run.monitor_every",
    "run.resume",
    "run.runs",
    "run.track",
    "nodes.index",
    "nodes.token",
}
_MISSING = "nothing"


def consistency_values(job: Job) -> dict[str, Any]:
    """Versions, options, the data's fingerprint and the plan, each under a name that a user knows."""
    facts: dict[str, Any] = {"stagewright": __version__, "torch": torch.__version__}
    for section, values in as_tables(job.config).items():
        facts |= {f"{section}.{name}": value for name, value in values.items()}
    facts = {name: value for name, value in facts.items() if name not in _OWN}
    facts["data fingerprint"] = job.fingerprint
    facts |= {f"plan {name}": value for name, value in job.plan.describe().items()}
    facts["model and schedule"] = _digest(job)
    return facts


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first fact that differs, in the order of the first, with both values."""
    for name in dict.fromkeys([*own, *other]):
        here, there = own.get(name, _MISSING), other.get(name, _MISSING)
        if json.dumps(here) != json.dumps(there):
            return name, here, there
    return None


def _digest(job: Job) -> str:
    """Everything else that ranks are told: what crosses each cut, and when they pause."""
    same = TypeAdapter(Job).dump_python(replace(job, folder="", resume=None, config=type(job.config)()))
    text = json.dumps(
        same, sort_keys=True, default=lambda value: sorted(value) if isinstance(value, Set) else str(value)
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
