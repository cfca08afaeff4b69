"""One story per bug that users met, so that none comes back."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from html import unescape
from pathlib import Path

import pytest
from torch import nn

import stagewright
from benchmarks.learning.runs import DIVERGED
from stagewright import __main__ as entry
from stagewright.cli.command.options import OPTIONS
from stagewright.cli.main import main
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.events import Record, Step
from stagewright.metrics import speed_words
from stagewright.report.live.terminal import PipeSafeConsole, RunConsole
from stagewright.run import prepare as preparing
from stagewright.run.folder import new_folder, run_lock
from stagewright.run.prepare import prepare
from stagewright.run.report import open_run
from stagewright.run.train import run
from stagewright.runtime.checkpoint import folder as checkpoints
from stagewright.runtime.checkpoint.format import hash_file
from stagewright.runtime.comm.unix_socket import socket_folder
from stagewright.runtime.multinode.nodes import bound_to
from stagewright.runtime.multinode.tunnel import TunnelServer, check_access
from stagewright.voice import Voice
from tests.commands import prints
from tests.made_runs import make_run
from tests.pictures import jpeg
from tests.unit.api.test_training import make_net
from tests.waiting import LONG


def test_warnings_do_not_break_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--placement", "0:0-2.0:3", "--mode", "sync", "--batch", "8", "--microbatches", "2")
    for command in (["schedule"], ["simulate", "vgg-small", "--cluster", "titan-v-8"]):
        main([*command, *few, "--json"])
        printed = capsys.readouterr()
        assert json.loads(printed.out)["plan"]["microbatches"] == 2
        assert printed.err.startswith("warning: 2 microbatches for 3 replicas")


def test_a_crowded_schedule_leaves_out_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = ("--placement", "0:0.0:1", "--mode", "stale", "--batch", "14", "--microbatches", "14")
    row = prints(capsys, "schedule", *plan, "--backward", "2,2", "--batches", "1").splitlines()[0]
    numbers = [int(number) for number in re.findall(r"F(\d+)", row)]
    assert numbers == sorted(set(numbers)) and len(numbers) < row.count("F") == 14


def test_a_terminal_without_unicode_gets_ascii() -> None:
    command = ["schedule", "--placement", "0:0.0:1"]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = [sys.executable, "-m", "stagewright", *command]
    done = subprocess.run(program, env=os.environ | ascii_only, capture_output=True, timeout=LONG)
    assert done.returncode == 0 and b"F0" in done.stdout and b".." in done.stdout, done.stderr


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        console = PipeSafeConsole(file=closed)
        tables = {
            "model": {"name": f"{__name__}:make_net"},
            "plan": {"batch": 16},
            "data": {"image": 8, "samples": 32},
            "run": {"steps": 4, "emulate": True, "runs": str(tmp_path), "log_every": 1},
        }
        result = run(make_config(tables), console)
        assert console.quiet
    assert len(result.steps) == 4 and (result.folder / "summary.json").exists()


def test_weights_go_to_the_run_folder_when_the_export_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights could not be written to /proc/w.safetensors.*they are in (\S+)\)"):
        stagewright.train(make_net, image=8, samples=16, batch=16, steps=1, emulate=True, runs=str(tmp_path),
                         export="/proc/w.safetensors")  # fmt: skip
    assert list(tmp_path.glob("*/weights.safetensors"))


def test_an_interrupt_during_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "stagewright.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "stagewright.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit):
        entry.main()
    assert capsys.readouterr().err == "stagewright: interrupted before it started\n"


@pytest.mark.parametrize("machine, known", [("127.0.0.2", ["127.0.0.2"]), ("127.0.0.3", [])], ids=["named", "NAT"])
def test_strangers_do_not_keep_a_machine_from_starting(machine: str, known: list[str]) -> None:
    """One host held 400 connections to the tunnel, and its 64 slots were taken whenever machine 1 tried.

    A machine of --nodes has slots of its own; one behind the same address as the strangers waits for its turn.
    """
    token, host, far = "a token of tests, long enough", "127.0.0.1", "127.0.0.3"
    refused: list[str] = []
    listener = bound_to(host, 0)
    address = (host, int(listener.getsockname()[1]))
    with socket.socket() as store, contextlib.ExitStack() as strangers:
        store.bind((host, 0))
        store.listen(1)
        server = TunnelServer(listener, int(store.getsockname()[1]), token, float(LONG), refused.append, known)
        strangers.callback(server.close)
        for _ in range(80):  # connections are accepted in their order, so all of these before the machine's
            strangers.enter_context(socket.create_connection(address, LONG, (far, 0)))
        check_access(address, machine, token, LONG)
    assert set(refused) <= {far}


@pytest.mark.parametrize("where", ["data", "runs", "here"])
def test_paths_that_are_not_utf_8_are_refused_before_a_run_starts(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / os.fsdecode(b"\xfe")
    odd.mkdir()
    monkeypatch.chdir(odd if where == "here" else tmp_path)
    options = {"data": ["--data", f"folder:{odd}"], "runs": ["--runs", str(odd)], "here": ["--runs", "runs"]}[where]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--model", "resnet8", "--image", "8", "--batch", "8", "--steps", "1", "--emulate", *options])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "UTF-8" in shown and shown.count("\n") == 1 and shown[:-1].isprintable()


TINY = ("--model", f"{__name__}:make_net", "--image", "8", "--samples", "32", "--batch", "16", "--emulate")


def test_a_run_that_is_being_trained_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", *TINY, "--steps", "2", "--checkpoint-every", "1", "--runs", str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    for named in (folder, folder / "checkpoints" / "1"):
        with run_lock(folder), pytest.raises(SystemExit) as ended:
            main(["train", "--resume", str(named), "--steps", "4"])
        assert ended.value.code == 2 and f"{folder} is being trained" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_run_whose_folder_was_deleted_keeps_its_weights_and_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody tidied up `runs/` while a run trained, and its weights were lost at the end."""
    show = RunConsole.show

    def delete_first(self: RunConsole, record: Record) -> None:
        if isinstance(record, Step) and record.batch == 1:
            shutil.rmtree(tmp_path / "runs")
        show(self, record)

    monkeypatch.setattr(RunConsole, "show", delete_first)
    weights = tmp_path / "w.safetensors"
    result = stagewright.train(make_net, image=8, samples=32, batch=16, steps=4, emulate=True, monitor_every=0,
                               runs=str(tmp_path / "runs"), export=str(weights))  # fmt: skip
    assert weights.exists() and len(result.steps) == 4
    assert [step.batch for step in open_run(result.folder).steps] == [2, 3]
    assert "was deleted" in (result.folder / "log.txt").read_text()
    assert result.folder.stat().st_mode & 0o777 == 0o700


def test_a_second_interrupt_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = RunConsole.show

    def interrupt(self: RunConsole, record: Record) -> None:
        show(self, record)
        if isinstance(record, Step) and record.batch == 2:
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(RunConsole, "show", interrupt)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by runs as well
    try:
        with pytest.raises(KeyboardInterrupt, match=r"by SIGHUP.*--resume .*-make_net"):
            stagewright.train(make_net, image=8, samples=32, batch=16, steps=4, emulate=True, checkpoint_every=1,
                             runs=str(tmp_path))  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, before)


EVIL = "\x1b[2J\rx\nstagewright: forged\u202e[b]"  # clears the screen, forges a line, turns text around, is markup


UNIT = "layer\x1b[2J\u202e[b]"


def make_evil() -> nn.Module:
    return nn.Sequential(OrderedDict({"first": nn.Flatten(), UNIT: nn.Linear(192, 10)}))


def test_names_do_not_control_the_terminal_or_forge_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of units, classes, files and folders went to the screen, report.md and log.txt as they were."""
    images = tmp_path / EVIL / "data"
    for name in ("cat", EVIL):
        (images / name).mkdir(parents=True)
        (images / name / f"{EVIL}.jpg").write_bytes(jpeg(8))
    (images / "cat" / f"bad{EVIL}.jpg").write_bytes(b"not a picture")
    shown: list[str] = []

    def run_command(*arguments: object) -> None:
        with contextlib.suppress(SystemExit):
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        shown.append(captured.out + captured.err)

    run_command("data", "inspect", f"folder:{images}", "--sheet", tmp_path / f"{EVIL}.png")
    run_command("data", "index", f"folder:{images}x")
    run_command("data", "convert", f"folder:{images}", f"tar:{tmp_path}/{EVIL}.tar")
    few = ("--model", f"{__name__}:make_evil", "--image", "8", "--batch", "2", "--microbatches", "2", "--emulate")
    plan = ("--placement", "0:0.0:1", "--cut", UNIT, "--runs", tmp_path / EVIL, "--lr", "0.5")
    run_command("train", *few, *plan, "--data", f"folder:{images}", "--steps", "3", "--checkpoint-every", "1")
    (folder,) = (tmp_path / EVIL).glob("*-make_evil-*")
    run_command("report", folder)
    run_command("watch", folder, "--once")
    run_command("compare", folder, folder)
    run_command("checkpoint", "list", folder)
    run_command("checkpoint", "show", folder)
    run_command("checkpoint", "verify", folder / "checkpoints" / EVIL)
    run_command("plan", EVIL)
    run_command("train", EVIL)
    run_command("train", f"--{EVIL}", "1")
    run_command("train", "--mode", EVIL)
    run_command("report", f"{folder}{EVIL}")
    shown += [(folder / name).read_text() for name in ("report.md", "log.txt")]
    shown.append(unescape(re.sub("<(script|style).*?</(script|style)>", "", (folder / "report.html").read_text())))
    for text in shown:
        assert text and not [line for line in text.split("\n") if not line.isprintable()]
        assert not re.search("^stagewright: forged", text, re.MULTILINE)
    assert sum("forged" in text for text in shown) >= 12, "the names are shown, as escapes"
    tables = {"checkpoints": json.loads(prints(capsys, "checkpoint", "list", str(folder), "--json"))["checkpoints"]}
    assert tables["checkpoints"][0]["folder"].startswith(str(folder)), "JSON has names as they are"


def test_everything_printed_is_cleaned_in_one_place() -> None:
    """`print` is for JSON, and `console.print` for tables and timelines: text goes through `say` and `print_lines`."""
    found = []
    for path in Path(stagewright.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and "print" in (name := ast.unparse(node.func))[-5:]:
                raw = [argument for argument in node.args if isinstance(argument, ast.JoinedStr | ast.BinOp)]
                is_json = ast.unparse(node.args[0]).startswith("json.dumps")
                if raw or (name == "print" and not is_json and path.name != "background_load.py"):
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(node)[:60]}")
    assert not found


SMALL = ("--model", f"{__name__}:make_net", "--image", "8", "--batch", "8", "--samples", "16", "--emulate")


def test_a_run_says_what_its_speed_and_accuracy_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed of a short run counted its warm-up, top-1 was of training data; a clock jump made seconds negative."""
    clock = itertools.count(2e9, -1000.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    out = prints(capsys, "train", *SMALL, "--steps", "4", "--eval-every", "2", "--runs", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    words = speed_words(summary["images_per_second"], summary["steady_steps"])
    assert f"done: 4 steps, {words}\n" in out and words in (folder / "report.md").read_text()
    assert "(16 samples of the training data)" in out and summary["evaluated_on"] == "training data"
    assert "on 16 samples of the training data" in (folder / "report.md").read_text()
    assert "on training data" in prints(capsys, "watch", str(folder), "--once")
    assert json.loads(prints(capsys, "watch", str(folder), "--json"))["evaluated_on"] == "training data"
    assert 0 <= summary["seconds"] < LONG


def test_a_speed_names_the_steps_that_it_counts() -> None:
    assert speed_words(2867.4, 41) == "2,867 images/s over the last 41"
    assert speed_words(0.25, 41) == "0.25 images/s over the last 41"
    assert "not known" in speed_words(1714.0, 0) and "1,714 images/s" in speed_words(1714.0, 0)
    assert "not known" in speed_words(None, 0)
    assert speed_words(2867.4, None) == "2,867 images/s", "a summary of an earlier version"


def test_a_resume_hashes_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"model": make_net, "image": 8, "samples": 16, "batch": 8, "emulate": True, "runs": str(tmp_path)}
    folder = stagewright.train(**few, steps=2, checkpoint_every=2).folder  # type: ignore[arg-type]
    read: list[Path] = []
    monkeypatch.setattr(checkpoints, "hash_file", lambda path: (read.append(path), hash_file(path))[1])
    stagewright.train(resume=str(folder), steps=4)
    assert sorted(read) == sorted((folder / "checkpoints/2").glob("*.safetensors"))


def test_ranks_connect_where_tmpdir_is_longer_than_a_socket_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with socket_folder("stagewright-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(folder) / "stream"))
        assert Path(folder).stat().st_mode & 0o777 == 0o700


def test_run_folders_are_closed_to_other_users(tmp_path: Path) -> None:
    assert new_folder(str(tmp_path / "runs"), "x").stat().st_mode & 0o777 == 0o700


COUNTS = sorted(flag for flag, option in OPTIONS.items() if option.type is int and not option.key)


@pytest.mark.parametrize("flag", COUNTS)
def test_counts_of_every_command_have_an_upper_bound(flag: str) -> None:
    """`bench --repeats 1000000000` began, and would have run for years."""
    with pytest.raises(UserError, match=rf"{flag} is 1000000000000000; give .*at most [0-9]+$"):
        OPTIONS[flag].check(10**15)


def test_a_run_whose_loss_exploded_fails_after_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--lr 1e9` ended at a finite loss of 1e16, and that was "done"."""
    options = ("--image", "8", "--batch", "8", "--no-learnable", "--emulate", "--steps", "8", "--lr", "1e9")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--model", f"{__name__}:make_evil", *options, "--runs", str(tmp_path)])
    shown = capsys.readouterr()
    (folder,) = tmp_path.iterdir()
    assert ended.value.code == 2 and "done: 8 steps" in shown.out
    grew = r"stagewright: the loss grew from \S+ to \S+e\+\d+, so the run diverged; .*--lr than 1e\+09.*\n"
    assert re.fullmatch(grew, shown.err)
    assert DIVERGED.search(shown.err), "a study counts it as diverged, not as failed"
    assert "diverged" in json.loads((folder / "summary.json").read_text())["diverged"]
    assert "The run diverged" in (folder / "report.md").read_text()


def test_more_cpu_ranks_than_cores_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "num_cores", lambda: 2)
    tables = {
        "model": {"name": f"{__name__}:make_net"},
        "data": {"image": 8, "samples": 64},
        "plan": {"batch": 64, "mode": "dp"},
        "run": {"runs": str(tmp_path)},
    }

    def warnings(ranks: int, **run: object) -> list[str]:
        said: list[str] = []
        prepare(make_config(tables, {"plan": {"placement": f"0:0-{ranks - 1}"}, "run": run}), Voice(said.append))
        return [warning for warning in said if "core" in warning]

    (warning,) = warnings(3)
    assert "3 CPU ranks" in warning and "2 cores" in warning
    assert not warnings(2) and not warnings(8, emulate=True) and len(warnings(2, threads=2)) == 1


def test_names_that_a_terminal_or_a_file_can_not_encode_are_shown_as_escapes(tmp_path: Path) -> None:
    """A run folder that is not UTF-8 had no report, and a name with an accent ended a command on an ASCII terminal."""
    folder = make_run(tmp_path / os.fsdecode(b"run\xff"), model="ré seau")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = [sys.executable, "-m", "stagewright", "report", str(folder)]
    done = subprocess.run(program, env=os.environ | ascii_only, capture_output=True, timeout=LONG)
    assert done.returncode == 0 and rb"r\xe9 seau" in done.stdout and rb"run\udcff/report.html" in done.stdout, (
        done.stderr
    )
    assert r"run\\udcff" in (folder / "report.md").read_text(encoding="utf-8")


@pytest.mark.xdist_group("a group")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_one_process_runs_all_tests_of_a_group(request: pytest.FixtureRequest) -> None:
    """With pytest 9.2 both processes of a test run took some, and made again what a group makes once: two minutes."""
    assert request.node.nodeid.endswith("@a group")
