"""What a script imports: `Engine`, `train`, `plan`, `simulate`, `profile`, `inspect`, their values, and a run's events.

`options` has their typed keywords, which `make_options` writes; `given` what becomes of objects. Only
`stagewright/__init__.py` imports this folder, and only when a script asks for one of these names.
"""

from stagewright.api.engine import Engine
from stagewright.api.planning import inspect, plan, profile, simulate
from stagewright.api.training import train
from stagewright.errors import Interrupted, RunFailed, UserError
from stagewright.events import Evaluated, Saved, Step
from stagewright.run.train import Result

__all__ = [
    "Engine",
    "Evaluated",
    "Interrupted",
    "Result",
    "RunFailed",
    "Saved",
    "Step",
    "UserError",
    "inspect",
    "plan",
    "profile",
    "simulate",
    "train",
]
