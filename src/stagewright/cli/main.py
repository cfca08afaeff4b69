"""Run a command: parse the command line, import the module that runs it, and report errors in one line."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

from stagewright.cli.parser import USER_ERROR, make_parser
from stagewright.errors import RunFailed, UserError, printable
from stagewright.run.folder import is_run, newest

_MOST_SHOWN = 800  # characters of an error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error that the user can fix becomes one line and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does: a terminal may not know a character
    parser = make_parser()
    _require_encodable(parser, sys.argv[1:] if arguments is None else arguments)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        _require_one_run(sys.argv[1:] if arguments is None else arguments, parsed)
        if not unknown[0].startswith("-"):
            parsed.parser.error(f"unexpected argument {unknown[0]}")
        parsed.parser.refuse_option(unknown[0])
    try:
        with _terminated():
            parsed.command.complete(parsed)
            _handler(parsed.command.run)(parsed)
    except (UserError, RunFailed) as error:
        _fail(str(error))
    except KeyboardInterrupt as error:
        _fail(f"interrupted{f' {error}' if str(error) else '; nothing is left running'}")
    except BrokenPipeError:
        sys.exit(USER_ERROR)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(f"{error.filename or 'a file'} could not be written: {error.strerror}; make room on the disk")
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}; give another path")


def _require_encodable(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """An error about an argument that can't be a path, as one with a zero byte: every command takes paths."""
    for argument in arguments:
        try:
            is_path = b"\0" not in os.fsencode(argument)
        except UnicodeEncodeError:
            is_path = False
        if not is_path:
            parser.error(f"argument {argument!a} has a character that no path or name can have")


def _handler(name: str) -> Callable[[argparse.Namespace], None]:
    """The function that runs a command, such as `plan:run` of this folder: imported only here."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch is imported: its warnings confuse users
    module, _, function = name.partition(":")
    handler: Callable[[argparse.Namespace], None] = getattr(import_module(f"stagewright.cli.{module}"), function)
    return handler


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
    """End with one readable line, without control characters that a terminal would obey."""
    line = " ".join(message.split())
    if len(line) > _MOST_SHOWN:
        line = f"{line[: _MOST_SHOWN // 2]} ... {line[-_MOST_SHOWN // 2 :]}"
    sys.stderr.write(f"stagewright: {printable(line)}\n")
    sys.exit(USER_ERROR)
