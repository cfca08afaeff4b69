"""Run folders on the disk: make, find, name and delete one, and lock one while it is being trained.

Imports nothing large, so that the command line can look for runs before it imports anything else.

A run leaves config.toml, env.json, plan.json, job.json, metrics.jsonl, monitor.jsonl, summary.json, trace.json,
memory.json, proof.json, weights.safetensors, report.html, report.md, log.txt, logs/ and checkpoints/; one that failed
has fault.txt. It is in runs/<id> by default. A name and tags that a user gives it are in label.json: the folder keeps
its id.

Commands take a run as a path, or by its name or id in runs/, the beginning of one, or `last` (`find_run`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagewright.errors import UserError, did_you_mean, first_line, is_text, printable
from stagewright.files import read_text

if sys.platform != "win32":  # where the command line says that nothing runs there
    import fcntl

PLAN_FILE = "plan.json"  # every run folder has one
WEIGHTS_FILE = "weights.safetensors"  # of a model that a script has given as an object
PROOF_FILE = "proof.json"  # what was proven of the cut; only a run that is cut has one
FAULT_FILE = "fault.txt"  # why the run failed, in one line
RUNS = "runs"  # the folder of runs where none is given
LAST = "last"  # of the runs
_LABEL_FILE = "label.json"
_LOCK_FILE = ".lock"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a name or a tag
_MOST_LABEL_BYTES = 2**14
_MOST_TAGS = 32
_MOST_NAMED = 3  # runs in an error
_DELETED = ".deleted-"  # what the name of a run begins with while it is being deleted


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    try:
        return (folder / PLAN_FILE).is_file()
    except OSError:  # the text is too long for a file name
        return False


def newest(runs: Iterable[Path]) -> Path:
    """The run that started last."""
    return max(runs, key=started)


def started(run: Path) -> float:
    """When a run started, or was last resumed, in seconds since the epoch; 0 where it is being deleted."""
    try:
        return (run / PLAN_FILE).stat().st_mtime
    except OSError:
        return 0.0


def all_runs(runs: Path = Path(RUNS)) -> list[Path]:
    """Every run in a folder of runs, by id; none where there is no such folder."""
    try:
        return sorted(folder for folder in runs.iterdir() if not folder.name.startswith(".") and is_run(folder))
    except OSError:
        return []


# --- Names and tags ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Label:
    """What a user calls a run."""

    name: str = ""
    tags: tuple[str, ...] = ()


def read_label(run: Path) -> Label:
    """The label of a run; of a file that is missing or not ours, what is right in it."""
    try:
        found = json.loads(read_text(run / _LABEL_FILE, _MOST_LABEL_BYTES))
    except (OSError, ValueError, RecursionError):
        return Label()
    if not isinstance(found, dict):
        return Label()
    name, tags = found.get("name"), found.get("tags")
    known = [tag for tag in tags if _is_word(tag)] if isinstance(tags, list) else []
    return Label(str(name) if _is_word(name) and name != LAST else "", tuple(dict.fromkeys(known))[:_MOST_TAGS])


def name_run(run: Path, name: str) -> Label:
    """Give a run a name that no other run beside it has, as name or as id; an empty one takes its name away."""
    if name and (not _is_word(name) or name == LAST):
        what = f"'{LAST}' stands for the newest run" if name == LAST else "a name has 1 to 64 of a-z, A-Z, 0-9, . _ -"
        raise UserError(f"a run can't be named '{name[:80]}': {what}; choose another")
    for other in all_runs(run.parent) if name else ():
        if other != run and name in (other.name, read_label(other).name):
            raise UserError(f"run {other.name} already has the name '{name}'; choose another, or rename that one")
    return _write_label(run, replace(read_label(run), name=name))


def tag_run(run: Path, added: Collection[str], removed: Collection[str]) -> Label:
    """Add tags to a run and remove others."""
    label = read_label(run)
    for tag in (*added, *removed):
        if not _is_word(tag):
            raise UserError(f"'{tag[:80]}' can't be a tag: it has 1 to 64 of a-z, A-Z, 0-9, . _ -; choose another")
    for tag in removed:
        if tag not in label.tags:
            known = did_you_mean(tag, label.tags) if label.tags else "it has none"
            raise UserError(f"run {run.name} has no tag '{tag}'; {known}")
    tags = [tag for tag in dict.fromkeys((*label.tags, *added)) if tag not in removed]
    if len(tags) > _MOST_TAGS:
        raise UserError(f"run {run.name} would have {len(tags)} tags; give it at most {_MOST_TAGS}")
    return _write_label(run, replace(label, tags=tuple(tags)))


def _write_label(run: Path, label: Label) -> Label:
    draft = run / f".{_LABEL_FILE}.{secrets.token_hex(4)}"
    draft.write_text(f"{json.dumps(asdict(label))}\n")
    draft.replace(run / _LABEL_FILE)
    return label


def _is_word(value: object) -> bool:
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


# --- Which run a word means -------------------------------------------------------------------------------------------


def find_run(text: str, runs: Path = Path(RUNS)) -> Path:
    """The run that a word means: a path, or in `runs` a name, an id, the beginning of only one of these, or `last`.

    What has a slash, or is there, is a path, whatever it holds: the command that reads it says what is wrong.
    """
    if "/" in text or text in ("", ".", "..") or _exists(text):
        return Path(text)
    known = all_runs(runs)
    if text == LAST:
        if not known:
            raise UserError(f"there are no runs in {runs}/; train one, or give a run folder")
        return newest(known)
    names = {run: (run.name, read_label(run).name) for run in known}
    exact = [run for run, own in names.items() if text in own]
    found = exact or [run for run, own in names.items() if any(name.startswith(text) for name in own)]
    if len(found) == 1:
        return found[0]
    words = [name for own in names.values() for name in own if name]
    if not found:
        near = did_you_mean(text, [*words, LAST]) if words else f"there are no runs in {runs}/"
        shown = near if near.endswith("?") or not words else "stagewright runs lists all"
        raise UserError(f"no run is named '{text[:200]}', and no folder; {shown}")
    some = ", ".join(read_label(run).name or run.name for run in found[:_MOST_NAMED])
    more = ", ..." if len(found) > _MOST_NAMED else ""
    raise UserError(f"'{text[:200]}' begins {len(found)} runs: {some}{more}; give more of the name")


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # the text is too long for a file name
        return False


def find_in_run(text: str) -> Path:
    """The run that a word means, or by RUN/... what is in it: RUN/best, RUN/checkpoints/120."""
    first, slash, rest = text.partition("/")
    if not slash or not first or first in (".", "..") or _exists(first):
        return find_run(text)
    try:
        return find_run(first) / rest
    except UserError:
        return Path(text)


def delete_run(run: Path) -> None:
    """Delete a run that no process trains; renamed first, so an interrupted delete never looks like a run."""
    if not is_run(run) or run.is_symlink():
        raise UserError(f"{run} is not a run folder, so it is not deleted; see stagewright runs")
    with run_lock(run):
        doomed = run.with_name(f"{_DELETED}{run.name}")
        if doomed.exists():
            doomed = run.with_name(f"{_DELETED}{run.name}-{secrets.token_hex(4)}")
        run.rename(doomed)
        for folder in (doomed, *run.parent.glob(f"{_DELETED}*")):  # the others are of deletes that were interrupted
            shutil.rmtree(folder, onerror=_raise_unless_gone)


def _raise_unless_gone(function: object, path: str, caught: tuple[object, BaseException, object]) -> None:
    if not isinstance(caught[1], FileNotFoundError):  # another process deletes it too
        raise caught[1]


def size_on_disk(folder: Path) -> int:
    """The bytes that the files of a folder take on the disk; links are not followed."""
    total = 0
    folders = [folder]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                with suppress(OSError):  # deleted meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total


def read_fault(run: Path) -> str:
    """Why a run failed, in one line; empty where it has not."""
    try:
        return printable(read_text(run / FAULT_FILE, _MOST_LABEL_BYTES).strip())
    except (OSError, UnicodeDecodeError):
        return ""


@contextmanager
def failure_recorded(run: Path) -> Iterator[None]:
    """Leave why a run failed in its folder; one that was stopped has not failed."""
    (run / FAULT_FILE).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            (run / FAULT_FILE).write_text(f"{printable(first_line(error, 2000))}\n")
        raise


def new_folder(runs: str, name: str) -> Path:
    """Make a new folder in `runs`, named after the current time and `name`, that only its user can open."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if not is_text(str(Path(runs).absolute())):
        raise UserError(f"can't store the path {Path(runs).absolute()} as UTF-8; choose another with --runs")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = Path(runs).absolute() / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(0o700, parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"can't make the folder {folder}: {error.strerror}; choose another with --runs") from error
    raise UserError(f"{runs} already has 999 folders named {stamp}-{name}; choose another folder with --runs")


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the context is open; the system frees it however the process ends."""
    with (folder / _LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run {folder} is being trained by another process; wait for it, or stop it") from None
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process is training this run now."""
    try:
        with (folder / _LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
