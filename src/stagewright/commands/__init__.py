"""One file a command: `add` describes it to the parser, and what it runs is imported when it runs."""

from __future__ import annotations

from stagewright.commands import (
    bench,
    checkpoint,
    cluster,
    data,
    doctor,
    plan,
    profile,
    schedule,
    simulate,
    train,
    value,
)

COMMANDS = (doctor, profile, plan, simulate, train, checkpoint, schedule, data, bench, value, cluster)
