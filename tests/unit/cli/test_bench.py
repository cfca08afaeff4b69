"""`stagewright bench`: its options, and the mistakes people make with them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from stagewright.cli.bench import Request, run_bench
from stagewright.cli.main import main


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stagse"], ["unknown suite 'stagse'", "did you mean 'stages'?"]),
        (["/no/such.toml"], ["/no/such.toml", "No such file"]),
        (["quick", "--only", "nothing"], ["matches none of 2", "small VGG, dp, synthetic"]),
        (["overhead", "--only", "nothing"], ["matches none of 1 cases"]),
        (["quick", "--cluster", "titan-v-8"], ["--simulate as well"]),
        (["quick", "--simulate", "--cluster", "titan"], ["unknown cluster 'titan'", "titan-v-8"]),
        (["quick", "--set", "plan.bath=3"], ["plan.bath"]),
        (["published", "--only", "vgg16"], ["does not use --only", "takes --rows, --given"]),
        (["data", "--steps", "3"], ["does not use --steps", "takes --repeats"]),
        (["overhead", "--set", "plan.batch=3"], ["does not use --set", "--repeats, --steps, --only"]),
        (["monitor", "--cluster", "titan-v-8"], ["does not use --cluster", "takes none"]),
        (["quick", "--seeds", "2"], ["does not use --seeds"]),
        (["peers", "--repeats", "0"], ["--repeats is 0; give at least 1"]),
        (["peers", "--steps", "-1"], ["--steps is -1; give at least 0"]),
        (["quick", "--set", "data.jitter=0.4"], ["--jitter 0.4 changes nothing with --data synthetic"]),
        (["learning", "--repeats", "2", "--data", "synthetic"], ["does not use --repeats"]),
    ],
    ids=" ".join,
)
def test_bad_options_are_reported_in_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(capsys, *arguments, "--runs", str(tmp_path / "runs"))
    assert all(word in line for word in words), line
    assert not list(tmp_path.glob("runs/*")), "a bench that never began leaves no folder"


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown suite 'zzz'.*; known: homelab, quick"):
        run_bench(Request("zzz"))


def test_a_request_becomes_a_shell_command() -> None:
    request = Request(
        "learning",
        data="tar:/data/a b/*.tar",
        overrides=({"run": {"device": "cuda"}},),
        only="lag 1",
        seeds=2,
        target=91.5,
        reuse=("runs/x",),
        real=True,
    )
    asked = ["--only", "lag 1", "--data", "tar:/data/a b/*.tar", "--set", 'run.device="cuda"', "--seeds", "2"]
    more = ["--target", "91.5", "--reuse", "runs/x", "--real"]
    assert shlex.split(request.command) == ["stagewright", "bench", "learning", *asked, *more]


def test_models_are_tried_and_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "models", "--only", "torch_stacked_gru", "--json"])
    found = json.loads(capsys.readouterr().out)
    (tried,) = found["models"]
    assert tried["stages"] == 4 and tried["way"] == "graph" and not tried["refused"]
    assert max(tried["sync"], tried["stale"]) < 1e-9
    assert "torch" in found["versions"]


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "bench", "models", "--only", "torch_stacked_grv")
    assert "torch_stacked_gru" in message
