"""The shipped study of a text, made small: its plain PyTorch loop, and the stages that must learn what it learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main as command
from benchmarks.learning.plain import main, require_plain, train_plain
from benchmarks.learning.runs import TrainedRun, batches_per_epoch, earlier_runs, read_scores
from benchmarks.learning.trials import StudyOptions, TrialRun, open_study, trial_runs_of
from stagewright.bench.suite import SuiteOptions, configurations_of, read_suite
from stagewright.config.toml import FIXED, as_toml, make_config
from stagewright.errors import UserError
from stagewright.events import Evaluated, Step
from stagewright.run.train import run
from tests.marks import soak

PLAIN, SYNC, LAG, PREDICTED = "plain PyTorch", "2 stages, sync", "2 stages, lag 1", "2 stages, lag 1, predict"
SMALL: dict[str, dict[str, Any]] = {
    "model": {"name": "tests.tasks:tied"},
    "data": {"context": 5},
    "schedule": {"warmup": 3},
    "run": {"precision": "fp64", "epochs": 2, "eval_every": 5},
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Tokens below 11: 8 batches of 16 samples of 5, and 7 samples to evaluate on."""
    tokens = np.random.default_rng(0).integers(11, size=5 * (8 * 16 + 7) + 2).astype("<u2")
    tokens[: 5 * 8 * 16 + 1].tofile(tmp_path / "train.bin")
    tokens[5 * 8 * 16 + 1 :].tofile(tmp_path / "val.bin")
    return tmp_path


def small_study(text: Path, seeds: int = 1, **changes: Any) -> dict[str, TrialRun]:
    data, val = (f"tokens:{text}/{name}.bin" for name in ("train", "val"))
    options = StudyOptions("text", data, val, seeds, overrides=(SMALL,), **changes)
    return {trial_run.key[1]: trial_run for trial_run in trial_runs_of(options, open_study(options))}


def test_sync_in_tied_stages_learns_what_the_plain_loop_does(text: Path) -> None:
    trials = small_study(text)
    records: list[Step | Evaluated] = []
    train_plain(trials[PLAIN].config, records.append)
    losses = [record.loss for record in records if isinstance(record, Step)]
    scores = [(record.batch, record.metrics["perplexity"]) for record in records if isinstance(record, Evaluated)]
    assert [batch for batch, _ in scores] == [5, 10, 15, 16]
    config = trials[SYNC].config
    run(replace(config, run=replace(config.run, runs=str(text / "runs"))))
    metric, found = read_scores(text)
    assert metric == "perplexity" and batches_per_epoch(text) == 8
    assert np.allclose(found, scores, rtol=1e-9, atol=0)
    trained = [json.loads(line) for line in next(text.glob("runs/*/metrics.jsonl")).read_text().splitlines()]
    assert np.allclose([record["loss"] for record in trained if record["kind"] == "step"], losses, rtol=1e-9, atol=0)


def test_the_plain_loop_leaves_what_a_run_does(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_study(text)[PLAIN].config
    (text / "trial.toml").write_text(as_toml(replace(config, run=replace(config.run, runs=str(text / "runs")))))
    main(str(text / "trial.toml"))
    assert json.loads(capsys.readouterr().out)["images_per_second"] > 0
    assert batches_per_epoch(text) == 8 and [batch for batch, _ in read_scores(text)[1]] == [5, 10, 15, 16]


def test_the_study_compares_sync_and_lag_with_the_plain_loop(text: Path) -> None:
    trials = small_study(text)
    assert list(trials) == [PLAIN, SYNC, LAG, PREDICTED]
    assert [name for name, trial_run in trials.items() if trial_run.is_plain] == [PLAIN]
    assert [name for name, trial_run in trials.items() if trial_run.configuration.is_baseline] == [PLAIN]
    shapes = [(t.config.plan.mode, t.config.plan.staleness, t.config.optimizer.predict) for t in trials.values()]
    assert shapes[1:] == [("sync", None, False), ("stale", 1, False), ("stale", 1, True)]
    assert {(t.config.optimizer.name, t.config.schedule.kind, t.config.plan.batch) for t in trials.values()} == {
        ("adamw", "cosine", 16)
    }


def test_a_run_is_not_reused_for_a_plain_one(text: Path) -> None:
    trial_run = small_study(text)[PLAIN]
    runs = [TrainedRun("GPT", "x", 0, ((5, 3.0),), 8, settings=trial_run.settings, is_plain=value) for value in (0, 1)]
    for made in runs:
        learnt = {field: getattr(made, field) for field in made.__slots__}
        (text / "learning.json").write_text(json.dumps({"machine": {}, "findings": [{"learnt": [learnt]}]}))
        if made.is_plain:
            assert [run.trial for run in earlier_runs([str(text)], [trial_run]).runs] == [PLAIN]
        else:
            with pytest.raises(UserError, match="none of its 1 runs has the settings"):
                earlier_runs([str(text)], [trial_run])


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"data": {"source": "folder:x"}}, "trains on text, not on folder:x"),
        ({"data": {"val": None}}, "trains on text, not on no --val"),
        ({"run": {"precision": "bf16"}}, "trains in fp64 or fp32, not bf16"),
        ({"schedule": {"kind": "poly"}}, "has schedules constant, cosine, not poly"),
        ({"optimizer": {"clip": 1.0}}, "does not use optimizer.clip, which is 1.0; leave it out"),
        ({"plan": {"staleness": 1}}, "does not use plan.staleness, which is 1; leave it out"),
    ],
)
def test_the_plain_loop_refuses_what_it_does_not_do(tables: dict[str, dict[str, Any]], line: str) -> None:
    data = {"source": "tokens:a", "val": "tokens:b"} | tables.get("data", {})
    with pytest.raises(UserError, match=line):
        require_plain(make_config(FIXED, tables, {"data": data}, given=()))


def test_an_infinite_loss_ends_the_plain_loop_as_it_ends_a_run(text: Path) -> None:
    config = small_study(text)[PLAIN].config
    with pytest.raises(UserError, match=r"the loss of batch \d+ is (nan|inf)"):
        train_plain(replace(config, optimizer=replace(config.optimizer, lr=1e200)), lambda record: None)


def test_a_suite_has_no_plain_trials(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('title = "x"\n[[group]]\nname = "g"\n[[group.trial]]\nname = "t"\nplain = true\n')
    command_options = SuiteOptions(repeats=1, steps=1)
    (entry,) = configurations_of(read_suite(str(tmp_path / "x.toml")), command_options)
    with pytest.raises(UserError, match="trial 't' is plain, which is for studies of accuracy"):
        entry.resolve(None)  # type: ignore[arg-type]


def test_an_unknown_study_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(["learning", "--study", "txet", "--data", "tokens:a", "--val", "tokens:b"])
    assert "unknown study 'txet'" in capsys.readouterr().err


@soak
def test_the_study_leaves_a_page(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [
        f"{section}.{name}={json.dumps(value)}" for section, table in SMALL.items() for name, value in table.items()
    ]
    options = ["--data", f"tokens:{text}/train.bin", "--val", f"tokens:{text}/val.bin", "--seeds", "2"]
    words = [word for assignment in sets for word in ("--set", assignment)]
    command(["learning", "--study", "text", *options, *words, "--runs", str(text / "study"), "--json"])
    study = json.loads(capsys.readouterr().out)
    plain, sync, lag, predicted = study["findings"]
    assert plain["verdict"] == "baseline" and abs(sync["difference"]["value"]) < 1e-8
    assert lag["difference"]["value"] != 0 != predicted["difference"]["value"]
    assert "perplexity against epochs" in (Path(study["folder"]) / "report.md").read_text()
