"""Writes profile/zoo_shapes.json.gz: the shapes of the zoo's models as tracing finds them.

Run it after a change of a zoo model, of tracing or of torch: `python -m tests.make_shapes`. A test compares.
"""

from __future__ import annotations

from pathlib import Path

from stagewright.model.networks.zoo import ZOO
from stagewright.planning.known import SHIPPED, pack
from stagewright.planning.traced import trace_anew

FILE = Path(__file__).parents[1] / "src/stagewright/profile" / SHIPPED

if __name__ == "__main__":
    FILE.write_bytes(pack({name: trace_anew(name) for name in ZOO}))
