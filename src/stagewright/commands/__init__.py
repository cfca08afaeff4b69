"""One file a command: `add` describes it to the parser, and what it runs is imported when it runs."""

from __future__ import annotations

from stagewright.commands import (
    bench,
    checkpoint,
    cluster,
    compare,
    data,
    doctor,
    plan,
    profile,
    report,
    schedule,
    simulate,
    train,
    value,
    watch,
)

COMMANDS = (
    *(doctor, profile, plan, simulate, train, watch, report, checkpoint, schedule, data, bench, compare, value),
    cluster,
)
