"""A run that a script drives by its own loop: who this process is, and what it does for the script.

    launcher     prepares the job, then runs the same script once per rank and watches the ranks; it never trains
    rank         a process that the launcher has started: it trains its stage
    alone        one process that trains everything: one device, or all ranks emulated

`Ranks` is what the script's engine uses of any of the last two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NoReturn

import torch
from rich.console import Console
from torch import Tensor

from stagewright.config.sections import Config
from stagewright.errors import Interrupted, RunFailed, UserError, printable
from stagewright.report.live.terminal import say, voice_of
from stagewright.run.opening import Launch, Opening
from stagewright.run.prepare import headline
from stagewright.run.train import Host, begun, hosted, run
from stagewright.runtime.checkpoint.history import read_history
from stagewright.runtime.process.assemble import ScriptParts
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.external import find_rank
from stagewright.runtime.process.session import Session
from stagewright.runtime.process.torch_flags import keep_freed_memory, preserved_flags
from stagewright.runtime.script.rank import ScriptRank
from stagewright.voice import Voice

WriteStates = Callable[[list[dict[str, Tensor]]], object]
OPTIONS = "STAGEWRIGHT_OPTIONS"  # environment variable: tables of options that `stagewright run` was given
USER_ERROR = 2  # the exit code


def launch_script(given: Config | Opening) -> NoReturn:
    """Run the script that called this once per rank, to its end; this process ends with it."""
    console = Console(stderr=True)
    try:
        run(given, _Quiet(stderr=True), script=script_command())
    except (UserError, RunFailed, Interrupted) as error:
        what = "interrupted " if isinstance(error, Interrupted) else ""
        say(console, f"stagewright: {what}{printable(str(error))}", soft_wrap=True)
        sys.exit(USER_ERROR)
    sys.exit(0)


class _Quiet(Console):
    """Shows what is said, but no progress: the script prints its own."""

    @property
    def is_terminal(self) -> bool:
        return False


def script_command() -> tuple[str, ...]:
    """The command that runs this script again."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is None or hasattr(sys, "ps1"):
        raise UserError(
            "an Engine with several ranks runs its script once per rank, and this is no script; save it as a file, or "
            "in a notebook use stagewright.train(...)"
        )
    return (sys.executable, *sys.orig_argv[1:])


def is_launched(config: Config) -> bool:
    """Whether torchrun or srun has started this process, one of several."""
    return find_rank(config) is not None


class Local:
    """All ranks in this process."""

    def __init__(self, given: Config | Opening) -> None:
        if isinstance(given, Config) and given.run.threads is None and not given.run.emulate:
            given = replace(given, run=replace(given.run, threads=torch.get_num_threads()))  # emulated: as real ranks
        self._stack, console = ExitStack(), _Quiet(stderr=True)
        voice = Voice(voice_of(console).warn)
        made = self._stack.enter_context(begun(given, voice, Launch(is_scripted=True)))
        self.job, self._take_chain = made.job, made.take_chain
        self.history = read_history(self.job)
        say(console, *headline(self.job))
        self._host: Host = self._stack.enter_context(hosted(made, voice, Console(quiet=True)))

    def open(self, script: ScriptParts) -> Session:
        job, ledger = self.job, self._host.ledger
        self._stack.enter_context(preserved_flags([0] if job.config.run.device == "cuda" else []))
        torch.set_num_threads(job.config.run.threads or 1)
        keep_freed_memory()
        script = replace(script, keeps_model=job.plan.world == 1)
        self._session = Emulation(job, ledger.handle, ledger.settled, script=script, chain=self._take_chain())
        return self._session

    def call(self, what: str, where: str, contents: str = "") -> None:
        """Nobody else could do anything different."""

    def save(self, write: WriteStates) -> None:
        write(list(self._session.states().values()))

    def close(self) -> None:
        self._session.close()
        self._host.ledger.drain()
        self._stack.close()

    def abandon(self, error: BaseException) -> None:
        """End without a result, because of an error."""
        with suppress(BaseException):  # it is raised where it came from
            self._stack.__exit__(type(error), error, error.__traceback__)


Ranks = Local | ScriptRank  # of this process, and how they reach those of others


@dataclass(frozen=True, slots=True)
class OneLineErrors:
    """A `sys.excepthook` that shows errors of the user's in one line, as commands do; a rank reports any error."""

    previous: Callable[..., object]
    report: Callable[[BaseException], object] | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.report is not None:
            self.report(error)
        elif isinstance(error, UserError | RunFailed):
            sys.stderr.write(f"stagewright: {printable(str(error))}\n")
        else:
            self.previous(kind, error, trace)
