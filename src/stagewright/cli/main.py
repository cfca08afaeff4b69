"""Run a command: parse the command line, import the module that runs it, and report errors in one line."""

from __future__ import annotations

import argparse
import gc
import io
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from stagewright.cli.command.command import USER_ERROR, Parser, imported, one_line
from stagewright.cli.parser import make_parser, moved_bench
from stagewright.cluster.placement import parse_placement
from stagewright.config.sections import AUTO
from stagewright.errors import DISK_FULL, RunFailed, UserError
from stagewright.hardware.versions import untested_versions
from stagewright.report.live.progress import ProgressLine
from stagewright.run.folder import is_run, newest
from stagewright.runtime.process.children import SpareRanks

_SEPARATOR = re.compile(r"(--[^=]*=|-\w=?)--")
_TAG = re.compile(r"\+|-[^-]")
_COMPUTED = ("simulate", "value", "schedule", "cluster list")  # commands that only compute; so does plan --cluster


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error that the user can fix becomes one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names and files may hold what is no text
    parser = make_parser()
    arguments, rest = _split(sys.argv[1:] if arguments is None else arguments)
    if not arguments:
        sys.stdout.write(parser.screen())
        sys.exit(USER_ERROR)
    if arguments[0] == "bench" and (elsewhere := moved_bench(str(arguments[1:2] and arguments[1]))) is not None:
        _fail(elsewhere)  # before its old options are refused
    _require_usable(parser, arguments)
    _require_known(parser, arguments)
    parsed, unknown = parser.parse_known_args(arguments)
    parsed.rest = rest
    if unknown:
        _require_one_run(arguments, parsed)
        if not unknown[0].startswith("-"):
            parsed.parser.error(f"unexpected argument {unknown[0]}")
        parsed.parser.refuse_option(unknown[0])
    try:
        with _terminated():
            parsed.command.complete(parsed)
            _require_linux(parsed)
            for line in untested_versions():
                sys.stderr.write(f"warning: {line}\n")
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's warnings, which it reads as it is imported
            with ExitStack() as stack:
                parsed.spare = stack.enter_context(spare) if (spare := _spare_ranks(parsed)) else None
                with ProgressLine(f"loading stagewright {parsed.command.name}"), _importing():
                    handler = imported(f"cli.{parsed.command.run}")
                handler(parsed)
    except (UserError, RunFailed) as error:
        _fail(str(error))
    except KeyboardInterrupt as error:
        _fail(f"interrupted{f' {error}' if str(error) else '; nothing is left running'}")
    except BrokenPipeError:
        sys.exit(USER_ERROR)
    except OSError as error:
        if error.errno in DISK_FULL:
            _fail(f"{error.filename or 'a file'} could not be written: {error.strerror}; make room on the disk")
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}; give another path")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command, and those of something else; `runs` alone lists runs.

    Behind `--` they are of the script that `run` runs; of `runs tag`, +TAG and -TAG would look like options.
    """
    words = list(arguments)
    match words:
        case ["runs", *_] if not words[1:] or words[1].startswith("-"):
            return words if {"-h", "--help", "--help-all"} & set(words[1:2]) else ["runs", "list", *words[1:]], []
        case ["runs", "tag", *rest]:
            tags = [word for word in rest if _TAG.match(word) and word != "-h"]
            return [word for word in words if word not in tags], tags
        case ["run", *_] if "--" in words:
            place = words.index("--")
            return words[:place], words[place + 1 :]
    return words, []


def _require_linux(parsed: argparse.Namespace) -> None:
    """An error on another system, but for commands that only compute; on Windows for every command."""
    system, name = platform.system(), parsed.command.name
    is_computed = name in _COMPUTED or (name == "plan" and parsed.cluster is not None)
    if system == "Linux" or (is_computed and system == "Darwin"):
        return
    instead = "use WSL2" if system == "Windows" else "use a Linux machine or container"
    shown = "macOS" if system == "Darwin" else system
    raise UserError(
        f"stagewright {name} needs Linux and this is {shown}: ranks rely on its signals, sockets and /proc; {instead} "
        "(docs/install.md)"
    )


def _require_known(parser: Parser, arguments: Sequence[str]) -> None:
    """An error about a command, an action or an option that there is not, before one about what is missing."""
    words = list(arguments)
    for what in ("command", "action"):
        if not parser.parsers or not words or words[0].startswith("-"):
            break
        parser.require_name(words[0], what)
        parser = parser.parsers[words.pop(0)]
    for word in words[:1] if parser.parsers else words:
        if word.startswith("--") and word != "--" and word.partition("=")[0] not in parser.flags:
            parser.refuse_option(word)


def _require_usable(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """An error about an argument that can't be a path, as one with a zero byte: every command takes paths.

    Also about a value that is `--`: argparse takes it for a separator, and the option would have no value.
    """
    for argument in arguments:
        if _SEPARATOR.fullmatch(argument):
            parser.error(f"argument {argument} has -- as its value; give another")
        try:
            is_path = b"\0" not in os.fsencode(argument)
        except UnicodeEncodeError:
            is_path = False
        if not is_path:
            parser.error(f"argument {argument!a} has a character that no path or name can have")


def _spare_ranks(parsed: argparse.Namespace) -> SpareRanks | None:
    """Processes that become the ranks of a training run, as far as the command line tells how many there are."""
    given = vars(parsed)
    is_elsewhere = bool({"RANK", "SLURM_PROCID"} & set(os.environ))  # a launcher has started the ranks
    if parsed.command.name != "train" or parsed.explain or given.get("run.emulate") or is_elsewhere:
        return None
    placement, count = given.get("plan.placement", AUTO), 1
    if placement != AUTO:
        try:
            count = len({device for devices in parse_placement(placement) for device in devices})
        except UserError:
            return None  # training says why
    if given.get("nodes.list") is not None or count > (os.cpu_count() or 1):
        return None
    return SpareRanks(count, compiles=bool(given.get("run.compile")))


@contextmanager
def _importing() -> Iterator[None]:
    """Import torch and the rest a fifth faster, and end the process half a second sooner.

    Modules stay, so the garbage collector need not look at them: not as they grow, not later, and not at the end.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _terminated() -> Iterator[None]:
    """Let SIGTERM end a command and its processes as Ctrl-C does; training handles the signal itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _require_one_run(arguments: Sequence[str], parsed: argparse.Namespace) -> None:
    """An error where a shell pattern has matched several runs but the command takes one."""
    runs = [Path(argument) for argument in arguments if is_run(Path(argument))]
    if len(runs) > 1 and "second" not in parsed:  # `compare` takes two
        _fail(f"{len(runs)} runs match; give one, such as {newest(runs)}")


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"stagewright: {one_line(message)}\n")
    sys.exit(USER_ERROR)
