"""What is under way: the words that channels, collectives and devices have in common. Everything a rank is told: the configuration, the plan, and what crosses each cut."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class RunFailed(RuntimeError):
    """A rank failed; the message names it and what it was doing."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run."""

    def __init__(self, when: str, next_step: str = "") -> None:
        self.when = when
        super().__init__(f"{when}; nothing is left running{next_step and f'; {next_step}'}")
