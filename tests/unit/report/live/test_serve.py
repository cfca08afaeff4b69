"""`watch --serve`: one page for browsers on this machine."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagewright.cli.main import main
from stagewright.errors import UserError
from stagewright.report.live.serve import PageServer
from stagewright.run.report import runs_page
from tests.made_runs import make_run
from tests.waiting import LONG


@contextmanager
def serving(make_page: object = lambda path: "<p>page" if path == "/" else None) -> Iterator[PageServer]:
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


def test_serves_only_requests_that_name_this_machine() -> None:
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


def test_makes_a_page_once_while_it_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.report.live.serve.FRESH", LONG)
    made: list[int] = []

    def make(path: str) -> str:
        made.append(1)
        return "page"

    with serving(make) as server:
        for _ in range(5):
            ask(server, f"localhost:{server.server_port}")
    assert len(made) == 1


def test_an_error_of_the_page_is_a_503() -> None:
    def lost(path: str) -> str:
        raise UserError("it is gone")

    with serving(lost) as server:
        assert ask(server, f"localhost:{server.server_port}") == (503, "it is gone\n")


def test_all_runs_are_a_list_with_a_page_for_each(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "20260101-<b>")
    make_run(tmp_path / "runs" / ".deleted-x")
    with serving(lambda path: runs_page(tmp_path / "runs", path)) as server:
        host = f"localhost:{server.server_port}"
        status, page = ask(server, host)
        assert status == 200 and page.count("<td") == page.count("</td") and ".deleted" not in page
        assert '<a href="20260101-%3Cb%3E/">20260101-&lt;b&gt;</a>' in page and "320" in page
        status, page = ask(server, host, "/20260101-%3Cb%3E/")
        assert status == 200 and "vgg-small, stale 2-1" in page and '<a class="above" href="../">' in page
        for path in ("/20260101/", "/.deleted-x/", "/../runs/20260101-%3Cb%3E/", "/20260101-%3Cb%3E/plan.json"):
            assert ask(server, host, path)[0] == 404, path


def test_a_port_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    with serving() as server, pytest.raises(SystemExit):
        main(["watch", str(folder), "--serve", str(server.server_port)])
    assert f"can't serve on port {server.server_port}: Address already in use" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["watch", str(folder), "--serve", "99999"])
    assert "99999" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--once", "--json"])
def test_serving_excludes_once_and_json(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "--serve", "1", flag, str(make_run(tmp_path / "run"))])
    assert flag in capsys.readouterr().err
