"""`stagewright bench`: its options, and the mistakes people make with them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from stagewright.cli import bench
from stagewright.cli.main import main
from tests.commands import fails


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stagse"], ["unknown suite 'stagse'", "did you mean 'stages'?"]),
        (["zzz"], ["unknown suite 'zzz'", "known: homelab, quick"]),
        (["/no/such.toml"], ["/no/such.toml", "No such file"]),
        (["quick", "--only", "nothing"], ["matches none of 2", "small VGG, dp, synthetic"]),
        (["quick", "--cluster", "titan-v-8"], ["--simulate as well"]),
        (["quick", "--simulate", "--cluster", "titan"], ["unknown cluster 'titan'", "titan-v-8"]),
        (["quick", "--set", "plan.bath=3"], ["plan.bath"]),
        (["quick", "--repeats", "0"], ["--repeats is 0; give at least 1"]),
        (["quick", "--steps", "-1"], ["--steps is -1; give at least 0"]),
        (["quick", "--set", "data.jitter=0.4"], ["--jitter 0.4 changes nothing with --data synthetic"]),
    ],
    ids=" ".join,
)
def test_bad_options_are_reported_in_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(capsys, "bench", *arguments, "--runs", str(tmp_path / "runs"))
    assert all(word in line for word in words), line
    assert not list(tmp_path.glob("runs/*")), "a bench that never began leaves no folder"


@pytest.mark.parametrize("name", ["peers", "overhead", "published", "learning", "models"])
def test_a_benchmark_of_ours_is_named_whatever_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--rows", "x.toml"], ["--quick"]):
        assert f"run python -m benchmarks {name} in a checkout" in fails(capsys, "bench", name, *options)
    assert f"python -m benchmarks {name}" in fails(capsys, "bench", "--steps", "3", name)


def test_a_request_becomes_a_shell_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(bench, "measure_and_show", lambda name, measure, command, *_, **__: taken.append(command))
    words = ["bench", "quick", "--only", "lag 1", "--data", "tar:/data/a b/*.tar", "--set", 'run.device="cuda"']
    with pytest.raises(TypeError):  # there is no outcome
        main([*words, "--repeats", "2", "--simulate", "--runs", str(tmp_path)])
    expected = ["quick", "--repeats", "2", *words[2:], "--simulate"]
    assert shlex.split(taken[0]) == ["stagewright", "bench", *expected]
