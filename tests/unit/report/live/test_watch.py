"""A run that is watched: files that grow and are taken back, a screen of 80 columns, a page for this machine alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.cli.main import main
from stagewright.events import Restarted
from stagewright.report.live.terminal import plot
from stagewright.report.live.watch import Tail, Watch, as_line, as_screen
from stagewright.report.words import format_duration
from stagewright.run.folder import is_locked, name_run, run_lock
from stagewright.run.report import live_page, read_rank_map, take_snapshot
from stagewright.runtime.stage.recorder import FlightRecorder
from stagewright.runtime.status_file import status_path
from stagewright.schedule.action import Action, Op
from tests.made_runs import append, make_run, steps, usage
from tests.waiting import LONG


def test_a_tail_reads_every_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.read() == (True, [b'{"a": 1}'])
    with path.open("a") as file:
        file.write('2}\nnonsense\n[3]\n{"a": 4}\n')
    assert tail.read() == (False, [b'{"a": 2}', b"nonsense", b"[3]", b'{"a": 4}'])
    assert tail.read() == (False, [])
    draft = tmp_path / "draft"
    draft.write_text('{"a": 1}\n')
    draft.replace(path)
    assert tail.read() == (True, [b'{"a": 1}'])
    path.write_text("")
    assert tail.read() == (True, [])


def test_a_watch_follows_a_run_that_was_restarted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(5), is_finished=False, monitor=usage())
    watch = Watch(folder, read_rank_map(folder))
    assert watch.snapshot(True).done == 5
    append(folder, *steps(8)[5:])
    snapshot = watch.snapshot(True, ["0F1@0", "waits for 0RG1<2", "1B0@0"])
    assert (snapshot.done, snapshot.images_per_second, snapshot.state) == (8, 320.0, "running")
    kept = (folder / "metrics.jsonl").read_text().splitlines()[:4]
    (folder / "draft").write_text("\n".join(kept) + "\n")
    (folder / "draft").replace(folder / "metrics.jsonl")
    append(folder, Restarted(4, "killed"))
    snapshot = watch.snapshot(True)
    assert (snapshot.done, snapshot.restarts) == (4, 1)
    assert (
        as_line(snapshot) == "running  step 4/20  loss 1.6245  320 images/s  3 s left  2.0 cores, 1,000 MiB  1 restart"
    )
    assert watch.snapshot(False).state == "stopped"


def test_it_says_what_a_run_does_now(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(5), is_finished=False)
    (folder / "job.json").write_text(json.dumps({"batches": 20, "evaluation": {"samples": 1000}}))
    (folder / "ranks").mkdir()
    recorders = [FlightRecorder(status_path(folder, rank)) for rank in range(3)]

    def now(*actions: Action) -> str:
        for action in actions:
            recorders[action.rank].begin(action)
        with run_lock(folder):
            return take_snapshot(Watch(folder, read_rank_map(folder)), folder).doing

    assert now() == "starting 3 ranks"
    assert now(Action(Op.FORWARD, 0, 0, 4, 1), Action(Op.RECV_GRAD, 1, 0, 3, None, 2)) == "training"
    assert now(Action(Op.BACKWARD, 2, 1, 3, 1), Action(Op.FORWARD, 0, 0, 8, None)) == "training"
    sends = Action(Op.SEND_ACT, 1, 0, 9, None, 2)
    assert (
        now(sends, Action(Op.FORWARD, 0, 0, 10, None), Action(Op.FORWARD, 2, 1, 9, None)) == "evaluating 176 of 1,000"
    )
    assert now(Action(Op.FORWARD, 2, 1, 62, None)) == "evaluating 1,000 of 1,000"
    recorders[1].save()
    assert now() == "writing a checkpoint"
    (folder / "job.json").write_text(json.dumps({"evaluation": {"samples": "many"}}))
    recorders[1].begin(sends)
    assert now() == "evaluating"


def test_durations_are_as_people_say_them() -> None:
    shown = [format_duration(seconds) for seconds in (0.4, 59.6, 3600, 7505, 86_400 * 1.5)]
    assert shown == ["400 ms", "59.6 s", "1 h", "2 h 5 min", "1 day 12 h"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_screen_fits_its_width(tmp_path: Path, width: int) -> None:
    folder = make_run(tmp_path / "run", monitor=usage(gpus=2))
    snapshot = Watch(folder, read_rank_map(folder)).snapshot(True, ["starting", "waits for 0RG1<2"])
    console = Console(width=width, record=True, file=(tmp_path / "out").open("w"))
    console.print(as_screen(snapshot, width))
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    if width >= 80:
        assert "step 20 of 20" in text and "loss 0.5359" in text and "top-1 75.0%" in text
        assert "rank 1 (stage 0)  waits: receive gradients of 1      0.50  105" in text
        assert "90%  2,000  250  61  power" in text


def test_a_plot_follows_the_values() -> None:
    rows = plot([4.0, 3.0, 2.0, 1.0], 40, 4)
    assert rows == ["4 █   ", "  █▆  ", "  ██▃ ", "1 ███▁"]
    assert plot([], 80) == [] and plot([float("nan")], 80) == []
    assert len(plot([1.0] * 1000, 50)[0]) == 50


def test_watch_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    main(["watch", str(folder)])
    assert capsys.readouterr().out == (
        "finished  step 20/20  loss 0.5359  320 images/s  top-1 75.00%  top-5 99.00% on training data after step 20\n"
    )
    main(["watch", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    main(["watch", str(folder), "--once"])
    assert "rank 2 (stage 1)" in capsys.readouterr().out


def test_the_speed_of_a_finished_run_is_that_of_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps(20, speed=40.0), summary={"images_per_second": 90.0})
    main(["watch", str(folder), "--once"])
    assert "90.0 images/s" in capsys.readouterr().out
    watch = Watch(folder, read_rank_map(folder))
    assert watch.snapshot(False).images_per_second == 90.0
    assert watch.snapshot(True).images_per_second == pytest.approx(40.0), "over the last steps, while it runs"


def test_a_named_run_is_shown_by_its_name_and_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "20260101-a")
    name_run(folder, "baseline")
    main(["watch", str(folder), "--once"])
    assert "baseline (20260101-a): finished" in capsys.readouterr().out
    assert "<h1>baseline: " in live_page(folder)


def test_an_emulated_run_is_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["watch", str(make_run(tmp_path / "run", emulate=True, monitor=usage())), "--once"])
    printed = capsys.readouterr().out
    assert "all, one process  -" in printed and "rank 0" not in printed


def test_watch_chooses_the_newest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["watch"])
    assert "runs/" in capsys.readouterr().err
    make_run(tmp_path / "runs" / "a")
    main(["watch", "--json"])
    assert json.loads(capsys.readouterr().out)["run"] == "a"


def test_a_run_is_running_while_its_folder_is_locked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(3), is_finished=False)
    watch = Watch(folder, read_rank_map(folder))
    assert not is_locked(folder)
    with run_lock(folder):
        assert is_locked(folder)
        assert take_snapshot(watch, folder).state == "running"
        page = live_page(folder)
        assert 'data-poll="2"' in page and ">Now<" in page
    assert take_snapshot(watch, folder).state == "stopped"
    assert "data-poll" not in live_page(folder)
    with run_lock(folder):
        pass  # a snapshot leaves no lock behind


def test_watching_imports_no_torch(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(3), is_finished=False)
    code = (
        "import sys\n"
        "from stagewright.run.folder import run_lock\n"
        "from stagewright.cli.main import main\nfrom pathlib import Path\n"
        f"with run_lock(Path({str(folder)!r})): main(['watch', {str(folder)!r}, '--json'])\n"
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=True)
    snapshot, heavy = done.stdout.splitlines()
    assert json.loads(snapshot)["doing"] == ["starting"] * 3 and heavy == "[]"
