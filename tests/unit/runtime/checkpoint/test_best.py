"""The best checkpoint stays beside the newest, however a run ends; ranks stop early together, and go on counting."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stagewright.events import Best, Evaluated, Record, Saved, Score
from stagewright.metrics import Criterion
from stagewright.runtime.checkpoint import commit, folder
from stagewright.runtime.checkpoint.folder import best_folder, list_folders, open_checkpoint
from stagewright.runtime.job import Job
from tests.keeping import emulate_job, keeping, resumed, saved_at
from tests.parity import Case, EmulatedRun, make_job

CASE = Case("plain", "0:0.0:1-2", "third", mode="stale", staleness=1, microbatches=3, steps=7, eval_every=1)
TOP1 = {1: 0.1, 2: 0.5, 3: 0.3, 4: 0.6, 5: 0.6, 6: 0.2, 7: 0.4}  # by batch
BY_TOP1 = Criterion("top1", is_lower_better=False)


@pytest.fixture(autouse=True)
def scripted() -> Iterator[None]:
    """Evaluations find what `TOP1` says, on every rank and in the log."""

    def evaluated(batch: int, scores: Any) -> Evaluated:
        assert sum(scores, Score()).samples == 17
        return Evaluated(batch, 17, 1.0 - TOP1[batch], {"top1": TOP1[batch]})

    with mock.patch.object(Evaluated, "of", staticmethod(evaluated)):
        yield


def job_of(tmp_path: Path, case: Case = CASE, early_stop: int | None = None, **checkpoint: Any) -> Job:
    return keeping(make_job(case, tmp_path, early_stop=early_stop), **checkpoint)


def batches(run: EmulatedRun) -> list[int]:
    return [int(path.name) for path in list_folders(Path(run.job.folder))]


def stops(run: EmulatedRun) -> int:
    """The batch after which all ranks have ended, as finished."""
    assert not run.emulation.is_stopped
    return run.emulation.done


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"best": "top1", "keep": 0}, [1, 2, 4]),
        ({"best": "top1", "keep": 2, "every": 3}, [4, 6, 7]),
        ({"best": "min:top1", "keep": 1, "every": 2}, [1, 7]),
        ({"keep": 1, "every": 2}, [7]),
    ],
    ids=str,
)
def test_the_best_checkpoint_is_kept_beside_the_newest(
    options: dict[str, Any], kept: list[int], tmp_path: Path
) -> None:
    records: list[Record] = []
    run = emulate_job(job_of(tmp_path, **options), records)
    assert batches(run) == kept and stops(run) == 7
    best = best_folder(list_folders(Path(run.job.folder)))
    expected = {"top1": 4, "min:top1": 1}.get(str(options.get("best")))
    assert (None if best is None else int(best.name)) == expected
    told = [saved.best.batch for saved in records if isinstance(saved, Saved) and saved.best is not None]
    assert told == {"top1": [1, 2, 4], "min:top1": [1]}.get(str(options.get("best")), [])


def test_all_ranks_stop_early_after_the_same_evaluation(tmp_path: Path) -> None:
    run = emulate_job(job_of(tmp_path, early_stop=2, best="top1", keep=1))
    assert stops(run) == 6 and batches(run) == [4]
    assert {worker.best for worker in run.emulation.workers} == {Best(BY_TOP1, 4, 0.6, 2)}
    sooner = emulate_job(job_of(tmp_path, early_stop=1, every=5, keep=1))
    assert stops(sooner) == 3 and batches(sooner) == [3]  # by the loss; a run that ends leaves a checkpoint


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    whole = emulate_job(job_of(tmp_path, early_stop=2, best="top1", every=1, keep=0))
    assert stops(whole) == 6
    for batch in (5, 2):
        again = emulate_job(resumed(whole.job, saved_at(whole.job, batch)))
        assert stops(again) == 6 and batches(again) == [*range(1, 7)]
        assert {worker.best for worker in again.emulation.workers} == {Best(BY_TOP1, 4, 0.6, 2)}
    ended = emulate_job(resumed(whole.job, saved_at(whole.job, 6)))  # as after a fault at its very end
    assert stops(ended) == 6 and not ended.scores


def test_another_criterion_starts_to_compare_anew(tmp_path: Path) -> None:
    whole = emulate_job(job_of(tmp_path, best="top1", every=5, keep=0))
    job = keeping(resumed(whole.job, saved_at(whole.job, 5)), best="min:top1", keep=0)
    again = emulate_job(job)
    assert {worker.best for worker in again.emulation.workers} == {Best(Criterion("top1", True), 6, 0.2, 1)}
    assert folder.find_best(Path(job.folder)).name == "6"


def test_an_older_checkpoint_has_no_best_evaluation(tmp_path: Path) -> None:
    run = emulate_job(job_of(tmp_path, replace(CASE, eval_every=None, steps=2), every=2))
    manifest = saved_at(run.job, 2).manifest
    assert manifest.best is None and not manifest.is_best and manifest.best_by(BY_TOP1) == Best(BY_TOP1)
    assert "best" in manifest.as_json() and manifest.best_by(None) is None


class Crash(Exception):
    """The supervisor is gone."""


def crashing(most: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Operations on the disk of which only the first `most` happen."""
    done = 0

    def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > most:
                raise Crash
            return operation(*arguments, **options)

        return run

    return wrap


def test_a_crash_at_any_moment_leaves_a_whole_best_checkpoint(tmp_path: Path) -> None:
    """Renames, deletes and syncs of the supervisor happen up to a moment, and none after it."""
    job = job_of(tmp_path, Case("plain", "0:0", microbatches=1, steps=4, eval_every=1), best="top1", keep=1)
    seen = set()
    for most in range(2, 30):
        folder_of_run = tmp_path / f"crash-{most}"
        folder_of_run.mkdir()
        wrap = crashing(most)
        with (
            mock.patch.object(Path, "rename", wrap(Path.rename)),
            mock.patch.object(shutil, "rmtree", wrap(shutil.rmtree)),
            mock.patch.object(commit, "sync_folder", wrap(commit.sync_folder)),
        ):
            try:
                emulate_job(replace(job, folder=str(folder_of_run)))
            except Crash:
                pass
            else:
                break
        found = best_folder(list_folders(folder_of_run))
        assert found is not None, f"no best checkpoint after {most} operations"
        open_checkpoint(found).verify()
        seen.add(int(found.name))
    else:
        pytest.fail("every run crashed")
    assert seen == {1, 2, 4} and most > 8


def test_the_old_best_stays_where_a_new_one_cant_be_written(tmp_path: Path) -> None:
    job = job_of(tmp_path, best="top1", keep=1, every=5)

    def settle(self: commit.Committer, batch: int, shares: Any) -> None:
        if batch == 4:
            shares = {rank: replace(share, error="no space") for rank, share in shares.items()}
        right(self, batch, shares)

    right = commit.Committer._settle
    with mock.patch.object(commit.Committer, "_settle", settle):
        run = emulate_job(job)
    assert batches(run) == [2, 7] and folder.find_best(Path(job.folder)).name == "2"
