"""`--resume`: which options it uses, which folder, what it refuses; and `stagewright checkpoint`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stagewright
from stagewright.cli.main import main
from stagewright.errors import Interrupted, RunFailed
from stagewright.events import ShareSaved
from stagewright.model.chain import Chain
from stagewright.model.prove import Differs
from stagewright.run.folder import run_lock
from stagewright.run.prepare import prepare
from stagewright.run.resume import find_checkpoint, resumed_config
from stagewright.run.train import Result
from stagewright.runtime.checkpoint import commit
from stagewright.runtime.checkpoint import save as saver
from stagewright.runtime.checkpoint.commit import Committer
from stagewright.runtime.checkpoint.folder import checkpoints_folder, list_folders
from stagewright.runtime.process.session import Session
from stagewright.runtime.process.signals import stop_on_signal
from stagewright.voice import Voice
from tests.commands import fails, prints
from tests.keeping import same_bits

OPTIONS: dict[str, Any] = {
    "image": 8, "samples": 70, "batch": 16, "placement": "0:0-1.0:2", "cut": "3", "mode": "stale", "emulate": True,
    "lr": 0.05, "lr_schedule": "step", "lr_steps": "5", "checkpoint_every": 3, "keep": 0,
}  # fmt: skip


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 10))
    return torch.nn.Sequential(*layers)


def other() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 10))


def wider() -> torch.nn.Module:
    layers = (torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Flatten(), torch.nn.Linear(180, 10))
    return torch.nn.Sequential(*layers)


def train(folder: Path, **settings: Any) -> Result:
    return stagewright.train(net, runs=str(folder), **(OPTIONS | settings))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Eight steps in one go."""
    folder = tmp_path_factory.mktemp("whole")
    return train(folder, steps=8, export=str(folder / "whole.safetensors"))


@pytest.fixture
def half(whole: Result, tmp_path: Path) -> Path:
    """The same run, as it stood after its checkpoint at 6 of 8 steps."""
    run = Path(shutil.copytree(whole.folder, tmp_path / "half"))
    shutil.rmtree(checkpoints_folder(run) / "8")
    return run


def summary_of(run: Path) -> list[str]:
    """The first two sentences of a run's report."""
    lines = (run / "report.md").read_text().splitlines()
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")][:2]


def steps_of(run: Path) -> list[int]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["batch"] for record in records if record["kind"] == "step"]


# --- Resuming ---------------------------------------------------------------------------------------------------------


def test_resumes_in_the_same_folder_with_the_same_options(whole: Result, half: Path) -> None:
    result = stagewright.train(resume=str(half), export=str(half / "weights.safetensors"))
    assert result.folder == half and result.plan == whole.plan
    assert [step.batch for step in result.steps] == steps_of(half) == list(range(8))
    assert [step.loss for step in result.steps] == [step.loss for step in whole.steps]
    assert same_bits(result.weights(), whole.weights())
    samples = map(json.loads, (half / "monitor.jsonl").read_text().splitlines())
    assert list(dict.fromkeys(look["start"] for look in samples)) == [0, 6]


def test_a_run_by_a_plan_file_keeps_its_plan_without_the_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    described = {"mode": "stale", "placement": "0:0-1.0:2", "cuts": ["3"], "batch": 16, "microbatches": 8}
    file.write_text(json.dumps(described | {"versions": [3, 1], "depths": [4, 2]}))
    planned = {name: value for name, value in OPTIONS.items() if name not in ("batch", "placement", "cut", "mode")}
    result = stagewright.train(net, runs=str(tmp_path), plan=str(file), steps=3, **planned)
    assert [(stage.versions, stage.depth) for stage in result.plan.stages] == [(3, 4), (1, 2)]
    assert 'versions = "3,1"' in (result.folder / "config.toml").read_text()
    file.unlink()
    resumed = stagewright.train(resume=str(result.folder), steps=4)
    assert resumed.folder == result.folder and resumed.plan == result.plan


def test_warns_on_resume_when_the_learning_rate_is_unstable_at_this_lag(half: Path) -> None:
    said: list[str] = []
    prepare(resumed_config({"run": {"resume": str(half)}, "optimizer": {"lr": 0.5}}), Voice(said.append))
    assert len(said) == 1 and "stable up to" in said[0] and "--lr 0.5" in said[0]


def test_writes_warnings_to_the_log(whole: Result, tmp_path: Path) -> None:
    warning, proof = (train(tmp_path, steps=1, clip=1.0).folder / "log.txt").read_text().splitlines()
    assert warning == "warning: stages lag, so each stage clips by its own gradient norm, not by the whole model's"
    assert proof.startswith("proven: ") and "2 stages" in proof
    assert [line.partition(":")[0] for line in (whole.folder / "log.txt").read_text().splitlines()] == ["proven"]


def test_resumes_a_finished_run_for_more_steps(whole: Result, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole.folder, tmp_path / "whole"))
    result = stagewright.train(resume=str(run), steps=11, export=str(tmp_path / "weights.safetensors"))
    longer = train(tmp_path, steps=11, export=str(tmp_path / "longer.safetensors"))
    assert same_bits(result.weights(), longer.weights()) and steps_of(run) == list(range(11))


def test_resumes_an_older_checkpoint_in_a_new_folder(whole: Result, tmp_path: Path) -> None:
    old = checkpoints_folder(whole.folder) / "3"
    result = stagewright.train(resume=str(old), runs=str(tmp_path), export=str(tmp_path / "weights.safetensors"))
    assert result.folder.parent == tmp_path and steps_of(result.folder) == list(range(3, 8))
    assert same_bits(result.weights(), whole.weights())
    assert steps_of(whole.folder) == list(range(8)) and len(list_folders(whole.folder)) == 3


def test_skips_and_sets_aside_a_damaged_checkpoint(half: Path) -> None:
    (checkpoints_folder(half) / "6" / "stage-0.master.safetensors").write_bytes(b"no")
    result = stagewright.train(resume=str(half))
    assert [step.batch for step in result.steps] == steps_of(half) == list(range(8))
    names = {path.name for path in checkpoints_folder(half).iterdir()}
    assert names == {"3", "6", "8", "damaged-6"}


def test_resumes_with_smaller_batches_at_the_same_sample(half: Path, tmp_path: Path) -> None:
    other = {"runs": str(tmp_path / "other"), "export": str(tmp_path / "other.safetensors")}
    result = stagewright.train(resume=str(half), batch=8, microbatches=4, steps=14, **other)
    # Six batches of 16: an epoch of four, then 32 samples; with batches of 8 an epoch has eight, so that is batch 12.
    assert steps_of(result.folder) == [12, 13] and result.folder != half and steps_of(half) == list(range(8))


def test_the_report_names_the_checkpoint_that_a_run_resumed_from(half: Path, tmp_path: Path) -> None:
    result = stagewright.train(resume=str(half), placement="0:0-1", mode="dp", export=str(half / "w.safetensors"))
    first, origin = summary_of(half)
    assert ", dp 2: steps 7-8 of 16 images" in first
    assert origin.startswith("Resumed from half at step 6; ") and "stale 2-1" in origin
    speed = result.summary["images_per_second"]
    before, last = result.steps[-2:]
    assert speed == pytest.approx(16 / (last.seconds - before.seconds)), (
        "the speed counts only steps after the resume, without the first"
    )
    other = stagewright.train(resume=str(half), batch=8, microbatches=4, steps=18, runs=str(tmp_path / "other"))
    first, origin = summary_of(other.folder)
    assert ", dp 2: steps 17-18 of 8 images" in first and origin.startswith("Resumed from half at step 8.")


def test_a_resumed_run_is_unfinished_until_it_ends_again(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (half / "summary.json").exists()
    monkeypatch.setattr("stagewright.run.train.Emulation", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        stagewright.train(resume=str(half), export=str(half / "w.safetensors"))
    assert not (half / "summary.json").exists() and "not finished" in summary_of(half)[0]


def test_a_run_that_clips_from_now_on_has_another_plan(half: Path) -> None:
    """Whether stages exchange norms is part of the plan."""
    same, clipped = (
        resumed_config({"run": {"resume": str(half)}, "optimizer": options}) for options in ({}, {"clip": 1.0})
    )
    resume = find_checkpoint(str(half))
    chain = Chain(net(), torch.zeros(1, 3, 8, 8))
    assert resume.kept_plan(same, chain) and not resume.kept_plan(clipped, chain)


def test_a_new_placement_drops_the_old_cut(half: Path) -> None:
    config = resumed_config({"run": {"resume": str(half)}, "plan": {"placement": "0:0", "mode": "dp"}})
    assert config.plan.cut is None and config.plan.batch == 16 and config.optimizer.lr == 0.05
    config = resumed_config({"run": {"resume": str(half), "epochs": 3}})
    assert config.run.steps is None and config.plan.cut == "3"
    config = resumed_config({"run": {"resume": str(half)}, "plan": {"shares": "1:1"}})
    assert config.plan.cut is None and config.plan.placement == "0:0-1.0:2"


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "71"], ["the data set changed", "synthetic/71", "synthetic/70"]),
        (["--batch", "24", "--microbatches", "4"], ["32 samples into its epoch", "--batch 24", "use --batch 16"]),
        (["--steps", "6"], ["at batch 6", "ends at 6", "--steps"]),
        (["--mode", "pipedream", "--placement", "0:0-3.0:4", "--cut", "3", "--microbatches", "1"],
         ["at batch 6", "every 4 batches"]),
        (["--model", "tests.unit.run.test_resume:other", "--placement", "0:0", "--mode", "dp"],
         ["no parameter '2.weight'", "made with model", "net"]),
        (["--model", "tests.unit.run.test_resume:other"], ["before '3'", "does not have", "made with model", "net"]),
        (["--model", "tests.unit.run.test_resume:wider"], ["'0.weight' of shape [4, 3, 3, 3]", "[5, 3, 3, 3]"]),
        (["--keep", "-1"], ["--keep is -1"]),
        (["--checkpoint-every", "-1"], ["--checkpoint-every is -1"]),
    ],
)  # fmt: skip
def test_refuses_options_that_do_not_fit_the_checkpoint(
    capsys: pytest.CaptureFixture[str], half: Path, arguments: list[str], words: list[str]
) -> None:
    before = sorted(path.name for path in half.iterdir())
    line = fails(capsys, "train", "--resume", str(half), *arguments)
    assert all(word in line for word in words), line
    assert sorted(path.name for path in half.iterdir()) == before  # nothing was touched


def test_another_way_of_cutting_may_know_the_cuts_of_a_checkpoint(half: Path) -> None:
    """So it is a difference, after which the next way is tried, and no error that ends the search."""
    resume = find_checkpoint(str(half))
    plan = resume.checkpoint.manifest.plan
    resume.require_cuts(plan, ["0", "3"])
    with pytest.raises(Differs, match="before '3'"):
        resume.require_cuts(plan, ["blocks.0", "blocks.1"])


def test_refuses_a_run_without_an_intact_checkpoint(capsys: pytest.CaptureFixture[str], half: Path) -> None:
    assert "no such folder" in fails(capsys, "train", "--resume", str(half / "nowhere"))
    for folder in list_folders(half):
        (folder / "manifest.json").write_text("{}")
    line = fails(capsys, "train", "--resume", str(half))
    assert "no intact checkpoint" in line and "damaged" in line


def test_refuses_a_run_that_is_locked(capsys: pytest.CaptureFixture[str], half: Path) -> None:
    with run_lock(half):
        assert "another process" in fails(capsys, "train", "--resume", str(half))


# --- Stopping ---------------------------------------------------------------------------------------------------------


def test_an_interrupt_saves_a_checkpoint_and_prints_how_to_resume(whole: Result, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not any(path.stat().st_size for path in tmp_path.glob("*/metrics.jsonl")):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted, match=r"after step \d+; nothing is left running; resume with .*--resume (.*)"):
        train(tmp_path, steps=1_000_000, checkpoint_every=0)
    (run,) = tmp_path.iterdir()
    (folder,) = list_folders(run)
    assert steps_of(run) == list(range(int(folder.name)))
    goal = int(folder.name) + 2
    resumed = stagewright.train(resume=str(run), steps=goal, export=str(tmp_path / "a.safetensors"))
    straight = train(tmp_path, steps=goal, checkpoint_every=0, export=str(tmp_path / "b.safetensors"))
    assert same_bits(resumed.weights(), straight.weights())


def test_an_interrupt_on_a_full_disk_names_the_lost_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = saver.write_file

    def fail(folder: Path, *shard: Any) -> object:
        if folder.name != "3.partial":
            raise OSError(28, "No space left on device")
        return written(folder, *shard)

    def stop_at(self: Committer, event: ShareSaved) -> None:
        add(self, event)
        os.kill(os.getpid(), signal.SIGTERM) if (event.batch, event.rank) == (6, 0) else None

    add = Committer.add
    monkeypatch.setattr(saver, "write_file", fail)
    monkeypatch.setattr(Committer, "add", stop_at)
    with pytest.raises(Interrupted, match="steps after 3 could not be saved; resume with"):
        train(tmp_path, steps=1_000_000)


def test_a_fault_names_the_checkpoint_that_is_being_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Session) -> None:
        save(self)
        for worker in self.workers:
            worker.saver.close()
        raise RuntimeError("after a checkpoint")

    save = Session.save
    monkeypatch.setattr(commit, "sync_folder", lambda folder: time.sleep(0.3))
    monkeypatch.setattr(Session, "save", fail)
    with pytest.raises(RunFailed, match=r"after a checkpoint.*resume with"):
        train(tmp_path, steps=8)


def test_the_second_signal_interrupts_at_once() -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="by SIGINT"), stop_on_signal(lambda: asked.append("stop")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["stop"]
        os.kill(os.getpid(), signal.SIGINT)
    assert asked == ["stop"] and signal.getsignal(signal.SIGINT) is before


# --- stagewright checkpoint -------------------------------------------------------------------------------------------


def test_list_and_show_describe_checkpoints(capsys: pytest.CaptureFixture[str], whole: Result, half: Path) -> None:
    rows = json.loads(prints(capsys, "checkpoint", "list", str(whole.folder), "--json"))["checkpoints"]
    assert [(row["batch"], row["plan"], row["epoch"]) for row in rows] == [
        (3, "stale 2-1", 0), (6, "stale 2-1", 1), (8, "stale 2-1", 2)
    ]  # fmt: skip
    text = prints(capsys, "checkpoint", "list", str(whole.folder))
    assert "step        3  epoch 1" in text
    shown = json.loads(prints(capsys, "checkpoint", "show", str(half), "--json"))
    assert shown["batch"] == 6 and shown["position"]["batch"] == 2 and shown["layout"]["versions"] == [2, 1]
    assert "after step 6: batch 2 of epoch 2" in prints(capsys, "checkpoint", "show", str(half))
    assert "no checkpoints" in prints(capsys, "checkpoint", "list", str(half / "checkpoints"))


def test_verify_reads_every_file(capsys: pytest.CaptureFixture[str], half: Path) -> None:
    assert prints(capsys, "checkpoint", "verify", str(half)) == "2 intact: 3, 6\n"
    target = checkpoints_folder(half) / "3" / "stage-1.master.safetensors"
    content = bytearray(target.read_bytes())
    content[-1] ^= 4
    target.write_bytes(content)
    line = fails(capsys, "checkpoint", "verify", str(half))
    assert "1 of 2" in line and "stage-1.master.safetensors does not match its hash" in line
    assert "no such folder" in fails(capsys, "checkpoint", "verify", str(half / "nowhere"))


def test_export_writes_weights_for_the_plain_model(
    capsys: pytest.CaptureFixture[str], whole: Result, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "weights.safetensors"
    shown = json.loads(prints(capsys, "checkpoint", "export", str(whole.folder), str(target), "--json"))
    assert shown["batch"] == 8 and shown["file"] == str(target)
    net().load_state_dict(load_file(target))
    assert same_bits(load_file(target), whole.weights())
    assert "could not be written to" in fails(
        capsys, "checkpoint", "export", str(whole.folder), "/proc/no/such.safetensors"
    )


def test_tied_weights_are_saved_once_and_exported_under_every_name(tmp_path: Path) -> None:
    result = stagewright.train(
        "tests.models:tied", image=8, classes=7, samples=48, batch=12, steps=2, placement="0:0-1", mode="dp",
        emulate=True, checkpoint_every=2, runs=str(tmp_path), export=str(tmp_path / "run.safetensors"),
    )  # fmt: skip
    checkpoint = find_checkpoint(str(result.folder)).checkpoint
    assert "third.weight" not in checkpoint.read("master") and "second.weight" in checkpoint.read("master")
    main(["checkpoint", "export", str(result.folder), str(tmp_path / "out.safetensors")])
    assert same_bits(load_file(tmp_path / "out.safetensors"), result.weights())
