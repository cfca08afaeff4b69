"""Bad values for every option and argument of every command, up to where ranks or measurements would start.

A value is refused with one printable line and exit code 2, or accepted. No input takes more than `_MOST_MEMORY` bytes,
`_MOST_SECONDS` of CPU time or `_MOST_WAIT` seconds, also where it names a pipe, a device or a folder.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from stagewright.cli import bench, machine, runs
from stagewright.cli import train as train_command
from stagewright.cli.main import main
from stagewright.cli.parser import COMMANDS
from stagewright.hardware.doctor import check
from stagewright.profile import measure
from stagewright.run import profile, train
from stagewright.run.script import OPTIONS
from tests.limits import cpu_time, more_memory
from tests.made_runs import make_run
from tests.models import CLASSES, SIDE
from tests.pictures import jpeg, make_folder
from tests.smi_texts import TITAN_8
from tests.unit.test_fuzz_readers import CLUSTER
from tests.waiting import LONG

ALL = bool(os.environ.get("STAGEWRIGHT_ALL_OPTIONS"))  # every value of every option: `make soak`
_SAMPLE = 50  # of them otherwise
_PROCESSES = 60 if ALL else 4  # of them also run as a process of their own
_MOST_MEMORY = 3 * 2**30
_MOST_SECONDS = 60.0
_MOST_WAIT = 120

VALUES = (
    *("", " ", "-1", "0", "1", "2", "0.5", "-0.5", "1e9", "1e400", "-1e400", "1e-400", "nan", "inf", "-inf", "1_000"),
    *("x", "True", "null", "-", "--", "@x", "%s", "9" * 10, "9" * 25, "9" * 5000, "-" + "9" * 25, "x" * 100_000),
    *("٣", "²", "\uff11", "0x10", "\x1b[2J", "a\nb", "\udcff", "\u202e", "ü"),
    *("0:0-99999999", "0:7-0", "0:0,0:0", "99999999:0", "0:0.0:0", "0:0-1.0:2", "3,1", "2:1", "1,", ",", ":", "0-3"),
    *(
        "run.seed=",
        "run.seed=x",
        "=",
        "a=b",
        "rtx-4090=nan",
        "tests.models:missing",
        "os:getcwd",
        "os:abort.x",
        "../..",
    ),
    *("imagenet/x", "1,1,1/0,0,0", "nan,1,1/1,1,1", "127.0.0.1,127.0.0.2", "[::1", "127.0.0.1:99999,x"),
    *("fp32,fp32", "fp32,x", "8,", "0,8", "1," * 1000 + "1"),
    *(
        f"{kind}{{{place}}}"
        for place in ("missing", "dir", "pipe", "zero", "binary", "deep")
        for kind in ("", "folder:")
    ),
    *(f"{kind}:{{{place}}}" for place in ("missing", "dir", "pipe", "zero") for kind in ("tar", "ofrecord", "tensors")),
    *("{pipe}/x", "{binary}/x", "{dir}/" + "x" * 300, "/proc/self/mem", "{dir}/missing/x.html"),
)
# Lines that are accepted. An option is tried on the lines that name it at their end, or on those that name none.
_TRAIN = f"train --model tests.models:plain --classes {CLASSES} --image {SIDE} --batch 8 --runs {{dir}}/runs"
_TWO = "--placement 0:0.0:1"
LINES: dict[str, tuple[str, ...]] = {
    "doctor": ("doctor",),
    "selftest": ("selftest",),
    "profile": (f"profile tests.models:plain --samples 2 --image {SIDE}",),
    "inspect": (f"inspect tests.models:plain --image {SIDE}",),
    "plan": ("plan vgg-small --cluster {cluster} --devices 2 --batch 8 --lr 0.1",),
    "simulate": ("simulate vgg-small --cluster {cluster} --batch 8",),
    "train": (
        f"{_TRAIN} {_TWO}",
        f"{_TRAIN} {_TWO} --data folder:{{images}} --val folder:{{images}} | --val --limit --class-names --crop "
        "--jitter --cutout --normalize --decode --loader-threads --ahead --max-bad --eval-every",
        f"{_TRAIN} {_TWO} --emulate --optimizer adamw | --beta1 --beta2 --eps --config --set --threads --monitor-every",
        f"{_TRAIN} {_TWO} --lr-schedule poly | --lr-power --lr-final --warmup --lr",
        f"{_TRAIN} {_TWO} --lr-schedule step --lr-steps 1 --steps 2 | --lr-steps --lr-gamma",
        f"{_TRAIN} {_TWO} --checkpoint-every 1 | --keep --checkpoint-minutes --checkpoint-every --max-restarts",
        f"{_TRAIN} --placement 0:0.1:0 --nodes 127.0.0.1,127.0.0.2 --node-index 0 | --nodes --node-index --token "
        "--join-timeout --lost-timeout --placement",
        "train --resume {kept} --steps 5 --runs {dir}/runs | --resume --steps --epochs --placement --mode --plan "
        "--versions --batch --data --model --seed --optimizer --precision --microbatches --classes --image "
        "--set --config",
    ),
    "run": (f"run {{binary}} {_TWO}",),
    "watch": ("watch {run} --once",),
    "report": ("report {run} -o {dir}/page.html",),
    "runs list": ("runs list --runs {dir}",),
    "runs name": ("runs name {run} baseline",),
    "runs tag": ("runs tag {run}",),
    "runs delete": ("runs delete {run}",),
    "completion": ("completion fish",),
    "checkpoint list": ("checkpoint list {kept}",),
    "checkpoint show": ("checkpoint show {kept}",),
    "checkpoint verify": ("checkpoint verify {kept}",),
    "checkpoint export": ("checkpoint export {kept} {dir}/w.safetensors",),
    "schedule": ("schedule --placement 0:0.0:1 --batch 8",),
    "data inspect": ("data inspect folder:{images} --sheet {dir}/sheet.png --image 32",),
    "data index": ("data index folder:{images}",),
    "data convert": ("data convert folder:{images} tar:{new}",),
    "data bench": ("data bench --images 16 --repeats 1",),
    "bench": ("bench quick --runs {dir}/runs",),
    "compare": ("compare {run} {run}",),
    "value": ("value vgg-small --cluster rtx-4090-1 --cluster rtx-3090-2 --devices 1 --batch 8",),
    "cluster list": ("cluster list",),
    "cluster import": ("cluster import --topo {topo} --device titan-v",),
    "demo": ("demo",),
}


class Started(BaseException):
    """What starts ranks or measures was called: the options are accepted."""


def start(*_: Any, **__: Any) -> NoReturn:
    raise Started


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files that values and lines name; nothing that a command would start is started."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dir").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "cluster").write_text(CLUSTER)
    (tmp_path / "topo").write_text(TITAN_8)
    make_folder(tmp_path / "images", {f"{index % 2}/{index}.jpg": jpeg(index) for index in range(16)})
    make_run(tmp_path / "run")
    main(f"{_TRAIN} --emulate --steps 2 --checkpoint-every 1".replace("{dir}", str(tmp_path)).split())
    (kept,) = (tmp_path / "runs").iterdir()
    monkeypatch.chdir(tmp_path / "dir")
    monkeypatch.setenv("STAGEWRIGHT_TOKEN", "sixteen letters or more")
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(OPTIONS, "{}")  # which `run` sets
    for module, name in STARTERS:
        monkeypatch.setattr(module, name, start)
    names = ("missing", "dir", "pipe", "binary", "deep", "cluster", "topo", "images", "run")
    return {name: str(tmp_path / name) for name in names} | {"kept": str(kept), "zero": "/dev/zero"}


STARTERS: tuple[tuple[Any, str], ...] = (
    *((train, name) for name in ("launch", "Emulation")),
    (measure, "time_units"),
    (profile, "background_load"),
    (bench.data, "measure"),
    (runs.PageServer, "serve_forever"),
    (check, "try_measuring"),
    (machine, "run_checks"),
    (train_command.runpy, "run_path"),
)


def inputs() -> list[list[str]]:
    """The words of every command with one bad value: of an option, or in place of an argument."""
    found = []
    for command in COMMANDS:
        lines = [line.partition(" | ") for line in LINES[command.name]]
        named = {flag for _, _, flags in lines for flag in flags.split()}
        for line, _, flags in lines:
            words = line.split()
            for option in command.takes:
                if option.type is bool or option.flag not in (flags.split() or {option.flag} - named):
                    continue
                kept = without(words, option.flag, option.short)
                found += [[*kept, f"{option.flag}={value}"] for value in VALUES]
            first = len(command.name.split())
            for at in range(first, first + len(command.arguments)):
                found += [[*words[:at], value, *words[at + 1 :]] for value in VALUES]
    return found


def without(words: list[str], *flags: str) -> list[str]:
    """The words without options, which all have one value."""
    return [word for at, word in enumerate(words) if word not in flags and (at == 0 or words[at - 1] not in flags)]


@contextmanager
def within_limits() -> Iterator[None]:
    def end(number: int, frame: object) -> NoReturn:
        raise AssertionError(f"waits for more than {_MOST_WAIT} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_MOST_WAIT)
    try:
        with more_memory(_MOST_MEMORY), cpu_time(_MOST_SECONDS):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Whether a command is accepted or refused; anything else fails."""
    shown = [word if len(word) < 200 else f"{word[:40]}...{len(word)} characters" for word in words]
    try:
        with within_limits():
            main(words)
    except Started:
        return "accepted"
    except SystemExit as ended:
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if not line.startswith("warning: ")]
        assert ended.code == 2 and len(lines) == 1 and error.endswith("\n"), (shown, ended.code, error)
        assert len(lines[0]) < 1200 and lines[0].isprintable(), (shown, error)
        return "refused"
    except BaseException as error:
        error.add_note(f"words: {shown}")
        raise
    finally:
        capsys.readouterr()
    return "accepted"


@pytest.mark.skipif(not ALL, reason="takes a minute")
def test_the_lines_themselves_are_accepted(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, line in enumerate(line for lines in LINES.values() for line in lines):
        words = filled(line.partition(" | ")[0].split(), places | {"new": str(tmp_path / f"new-{number}")})
        assert outcome(words, capsys) == "accepted", line


@pytest.mark.timeout(7200)
def test_bad_values_are_refused_in_one_line_or_accepted(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = inputs() if ALL else random.Random("options").sample(inputs(), _SAMPLE)
    found: Counter[str] = Counter()
    for number, words in enumerate(cases):
        found[outcome(filled(words, places | {"new": str(tmp_path / f"new-{number}")}), capsys)] += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    with capsys.disabled():
        print(f"{len(cases)} values: {dict(found)}; peak memory of the process {peak} MiB")
    assert found["refused"] > found["accepted"] > 0


def test_bad_values_end_a_process_in_one_line(places: dict[str, str], tmp_path: Path) -> None:
    """Those that are refused before anything starts: the same, from a shell."""
    generator = random.Random("processes")
    cases = [words for words in inputs() if words[0] in ("schedule", "report", "checkpoint", "cluster", "compare")]
    for number, words in enumerate(generator.sample(cases, _PROCESSES)):
        program = [
            sys.executable,
            "-m",
            "stagewright",
            *filled(words, places | {"new": str(tmp_path / f"new-{number}")}),
        ]
        done = subprocess.run(program, capture_output=True, stdin=subprocess.DEVNULL, timeout=LONG)
        lines = [line for line in done.stderr.splitlines() if not line.startswith(b"warning: ")]
        assert done.returncode in (0, 2) and len(lines) == (done.returncode == 2), (program[3:], done.stderr)


def filled(words: list[str], places: dict[str, str]) -> list[str]:
    """The words with paths for the names of places between braces."""
    return [word.format_map(places) if "{" in word else word for word in words]
