"""Files that a user names: regular ones alone, within bounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagewright.errors import UserError
from stagewright.files import MOST_TEXT_BYTES, cache_folder, read_text, write_text
from stagewright.report.live.watch import Watch
from stagewright.run.report import make_page, read_rank_map, take_snapshot
from tests.commands import fails
from tests.limits import more_memory
from tests.made_runs import make_run

_TRAIN = ("train", "--placement", "0:0")
COMMANDS = {
    "configuration": (*_TRAIN, "--config", "{}"),
    "plan": ("train", "--plan", "{}"),
    "profile": (*_TRAIN, "--profile", "{}"),
    "PipeDream": ("profile", "m", "--samples", "8", "--pipedream", "{}"),
    "cluster": ("simulate", "vgg-small", "--batch", "8", "--cluster", "{}"),
    "topology": ("cluster", "import", "--device", "titan-v", "--topo", "{}"),
    "suite": ("bench", "{}"),
}


@pytest.mark.timeout(120)  # a pipe would block for ever
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
def test_what_is_no_file_of_text_is_refused_in_one_line(
    kind: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case _:
            path.touch()
            os.truncate(path, 30 * 2**30)
    with more_memory(2**30):
        shown = fails(capsys, *(word.format(path) for word in COMMANDS[command]))
    assert str(path) in shown and ("not a file" if kind != "large" else "bytes") in shown


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "monitor.jsonl", "env.json", "config.toml"])
def test_a_pipe_in_a_run_folder_does_not_block_its_readers(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    if name == "plan.json":
        with pytest.raises(UserError, match="pipe"):
            make_page([run])
        return
    make_page([run])
    take_snapshot(Watch(run, read_rank_map(run)), run)


def test_a_text_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * MOST_TEXT_BYTES)
    assert len(read_text(path)) == MOST_TEXT_BYTES
    path.write_bytes(b"x" * (MOST_TEXT_BYTES + 1))
    with pytest.raises(OSError, match=f"{MOST_TEXT_BYTES + 1} bytes.*{MOST_TEXT_BYTES}"):
        read_text(path)


@pytest.mark.timeout(120)
def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/proc/self/mem", str(tmp_path)):  # a pipe that nobody reads would block
        with pytest.raises(OSError) as raised:
            write_text(path, "x")
        assert raised.value.filename == path
    write_text(tmp_path / "new", "ü")
    assert (tmp_path / "new").read_text() == "ü"


def test_the_cache_folder_is_the_variables_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("proofs") == tmp_path / "xdg" / "stagewright" / "proofs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "stagewright"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)  # of a user without an entry, as in some containers
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "own"))
    assert cache_folder("profiles") == tmp_path / "own" / "profiles"
