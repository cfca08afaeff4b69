"""Which faults of a failing schedule are enough to make it fail."""

from __future__ import annotations

from collections.abc import Callable

from tests.soak.schedule import Schedule


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], attempts: int) -> Schedule:
    """The smallest failing part of a failing schedule that is found within so many attempts.

    First halves, as long as one of them fails by itself, then the same with pieces half as long left out, down to
    single faults (delta debugging). What fails at random may end up larger than it has to be, never as a schedule
    that was not seen to fail.
    """
    pieces, tried = 2, {schedule}
    while len(schedule) > 1:
        size = -(-len(schedule) // pieces)
        parts = [schedule[first : first + size] for first in range(0, len(schedule), size)]
        without = [tuple(fault for fault in schedule if fault not in part) for part in parts]
        for candidate in [*parts, *without] if pieces == 2 else without:
            if candidate in tried:
                continue
            if len(tried) > attempts:
                return schedule
            tried.add(candidate)
            if fails(candidate):
                schedule, pieces = candidate, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                return schedule
            pieces = min(2 * pieces, len(schedule))
    return schedule
