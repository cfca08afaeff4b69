"""A run that is watched: files that grow and are taken back, a screen of 80 columns, a page for this machine alone."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.cli.main import main
from stagewright.events import Restarted, Step
from stagewright.report.live.serve import PageServer
from stagewright.report.live.terminal import plot
from stagewright.report.live.watch import Tail, Watch, as_line, as_screen
from stagewright.run.folder import is_locked, run_lock
from stagewright.run.report import live_page, read_rank_map, take_snapshot
from tests.made_runs import make_run, steps, uses
from tests.waiting import LONG


def append(folder: Path, *records: Step | Restarted) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": type(r).__name__.lower(), **asdict(r)}) + "\n" for r in records)


def test_a_tail_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.read() == (True, [{"a": 1}])
    with path.open("a") as file:
        file.write('2}\nnonsense\n[3]\n{"a": 4}\n')
    assert tail.read() == (False, [{"a": 2}, {"a": 4}])
    assert tail.read() == (False, [])
    draft = tmp_path / "draft"
    draft.write_text('{"a": 1}\n')
    draft.replace(path)
    assert tail.read() == (True, [{"a": 1}])
    path.write_text("")
    assert tail.read() == (True, [])


def test_a_watch_follows_a_run_that_goes_back(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(5), is_finished=False, monitor=uses())
    watch = Watch(folder, read_rank_map(folder))
    assert watch.look(True).done == 5
    append(folder, *steps(8)[5:])
    moment = watch.look(True, ["0F1@0", "waits for 0RG1<2", "1B0@0"])
    assert (moment.done, moment.images_per_second, moment.state) == (8, 320.0, "running")
    kept = (folder / "metrics.jsonl").read_text().splitlines()[:4]
    (folder / "draft").write_text("\n".join(kept) + "\n")
    (folder / "draft").replace(folder / "metrics.jsonl")
    append(folder, Restarted(4, "killed"))
    moment = watch.look(True)
    assert (moment.done, moment.restarts) == (4, 1)
    assert as_line(moment) == "running  step 4/20  loss 1.6245  320 images/s  2.0 cores, 1,000 MiB  1 restarts"
    assert watch.look(False).state == "stopped"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_screen_fits_its_width(tmp_path: Path, width: int) -> None:
    folder = make_run(tmp_path / "run", monitor=uses(gpus=2))
    moment = Watch(folder, read_rank_map(folder)).look(True, ["starting", "waits for 0RG1<2"])
    console = Console(width=width, record=True, file=(tmp_path / "out").open("w"))
    console.print(as_screen(moment, width))
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    if width >= 80:
        assert "step 20 of 20" in text and "loss 0.5359" in text and "top-1 75.0%" in text
        assert "rank 1 (stage 0)  waits for 0RG1<2       0.50  105" in text
        assert "90%  2,000  250  61  power" in text


def test_a_plot_falls_where_the_values_fall() -> None:
    rows = plot([4.0, 3.0, 2.0, 1.0], 40, 4)
    assert rows == ["4 █   ", "  █▆  ", "  ██▃ ", "1 ███▁"]
    assert plot([], 80) == [] and plot([float("nan")], 80) == []
    assert len(plot([1.0] * 1000, 50)[0]) == 50


def test_watch_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    main(["watch", str(folder)])
    assert capsys.readouterr().out == ("finished  step 20/20  loss 0.5359  320 images/s  top-1 75.00% after step 20\n")
    main(["watch", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    main(["watch", str(folder), "--once"])
    assert "rank 2 (stage 1)" in capsys.readouterr().out


def test_a_finished_run_is_as_fast_as_its_summary_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps(20, speed=40.0), summary={"images_per_second": 90.0})
    main(["watch", str(folder), "--once"])
    assert "90 images/s" in capsys.readouterr().out
    watch = Watch(folder, read_rank_map(folder))
    assert watch.look(False).images_per_second == 90.0
    assert watch.look(True).images_per_second == pytest.approx(40.0), "of the last steps, while it runs"


def test_an_emulated_run_is_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["watch", str(make_run(tmp_path / "run", emulate=True, monitor=uses())), "--once"])
    printed = capsys.readouterr().out
    assert "all, one process  -" in printed and "rank 0" not in printed


def test_watch_takes_the_newest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["watch"])
    assert "there is no run in runs/" in capsys.readouterr().err
    make_run(tmp_path / "runs" / "a")
    main(["watch", "--json"])
    assert json.loads(capsys.readouterr().out)["run"] == "a"


def test_a_run_in_hands_is_running(tmp_path: Path) -> None:
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
        pass  # looking has left nothing behind


@contextmanager
def serving(make_page: object = lambda: "<p>page") -> Iterator[PageServer]:
    with PageServer(0, make_page) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, host: str | None, path: str = "/", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LONG)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_is_for_this_machine_alone() -> None:
    with serving() as server:
        port = server.server_port
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert ask(server, f"127.0.0.1:{port}") == (200, "<p>page")
        assert ask(server, f"localhost:{port}") == (200, "<p>page")
        for host in (
            None,
            "",
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1",
            f"127.0.0.1:{port + 1}",
            f"127.0.0.1.evil.example:{port}",
        ):
            status, text = ask(server, host)
            assert status in (400, 421) and "<p>page" not in text, host
        assert ask(server, f"127.0.0.1:{port}", "/../../etc/passwd")[0] == 404
        assert ask(server, f"127.0.0.1:{port}", method="POST")[0] == 501
        assert ask(server, f"127.0.0.1:{port}", method="HEAD") == (200, "")


def test_a_page_is_made_once_a_second() -> None:
    made: list[int] = []

    def make() -> str:
        made.append(1)
        return "page"

    with serving(make) as server:
        for _ in range(5):
            ask(server, f"localhost:{server.server_port}")
    assert len(made) == 1


def test_a_folder_that_goes_away_is_said_to_the_browser() -> None:
    def lost() -> str:
        raise ValueError("it is gone")

    with serving(lost) as server:
        assert ask(server, f"localhost:{server.server_port}") == (503, "it is gone\n")


def test_a_port_in_use_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    with serving() as server, pytest.raises(SystemExit):
        main(["watch", str(folder), "--serve", str(server.server_port)])
    assert f"can't serve on port {server.server_port}: Address already in use" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["watch", str(folder), "--serve", "99999"])
    assert "99999" in capsys.readouterr().err


def test_watching_needs_no_torch(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(3), is_finished=False)
    code = (
        "import sys\n"
        "from stagewright.run.folder import run_lock\n"
        "from stagewright.cli.main import main\nfrom pathlib import Path\n"
        f"with run_lock(Path({str(folder)!r})): main(['watch', {str(folder)!r}, '--json'])\n"
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=True)
    moment, heavy = done.stdout.splitlines()
    assert json.loads(moment)["doing"] == ["starting"] * 3 and heavy == "[]"


@pytest.mark.parametrize("flag", ["--once", "--json"])
def test_a_page_is_not_served_once(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "--serve", "1", flag, str(make_run(tmp_path / "run"))])
    assert flag in capsys.readouterr().err
