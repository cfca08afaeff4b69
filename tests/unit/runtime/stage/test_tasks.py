"""Any sample and any loss: ten tasks train as the reference does, under plans of every kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.events import BatchLosses, Event
from stagewright.run.train import prepare
from stagewright.runtime.comm.boundary import Boundary, FormatOptions
from tests import reference
from tests.keeping import emulate_job
from tests.marks import IS_NIGHTLY
from tests.parity import EmulatedRun, assert_near
from tests.tasks import TASKS, Task, masked_words

_BATCH, _MICROBATCHES, _STEPS, _SEED = 12, 4, 5, 3
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Shape:
    """A plan: its placement, mode and lag, and at which of a task's cuts it is cut."""

    placement: str
    mode: str
    versions: tuple[int, ...]
    cuts: tuple[int, ...] = (0, 1, 2)
    is_dynamic: bool = False
    optimizer: str = "sgd"
    clip: float | None = None

    @property
    def replicas(self) -> tuple[int, ...]:
        return {"0:0.0:1.0:2.0:3": (1, 1, 1, 1), "0:0-1.0:2": (2, 1), "0:0-2": (3,)}[self.placement]

    def __str__(self) -> str:
        flags = ("/dynamic" if self.is_dynamic else "") + (f"/clip{self.clip}" if self.clip else "")
        return f"{self.mode}/{'-'.join(map(str, self.replicas))}/k{'.'.join(map(str, self.versions))}{flags}"


_SYNC = Shape("0:0.0:1.0:2.0:3", "sync", (1, 1, 1, 1))
_STALE = Shape("0:0-1.0:2", "stale", (2, 1), (1,))
_PLANS = (
    _SYNC,
    _STALE,
    Shape("0:0-2", "dp", (1,), ()),
    Shape("0:0-1.0:2", "stale", (2, 1), (0,), is_dynamic=True),
    Shape("0:0.0:1.0:2.0:3", "stale", (4, 3, 2, 1), optimizer="adamw"),
    Shape("0:0.0:1.0:2.0:3", "sync", (1, 1, 1, 1), clip=0.05),
)
_DAILY = {("language", 2), ("segmentation", 3), ("auxiliary", 4), ("language", 5)}


def _cases() -> list[Any]:
    return [
        pytest.param(task, plan, id=f"{task}-{plan}")
        for task in TASKS
        for number, plan in enumerate(_PLANS)
        if IS_NIGHTLY or number < 2 or (task.name, number) in _DAILY
    ]


def _tables(task: Task, plan: Shape, folder: Path) -> dict[str, dict[str, Any]]:
    data = folder / "data.safetensors"
    save_file(task.data(), data)
    return {
        "model": {"name": f"tests.tasks:{task.name}", "inputs": task.asked},
        "data": {"source": f"tensors:{data}", "shuffle": False},
        "loss": {"name": task.option, **(task.options or {})},
        "plan": {
            "placement": plan.placement,
            "mode": plan.mode,
            "versions": ",".join(map(str, _versions(task, plan))) if plan.mode == "stale" else None,
            "cut": ",".join(task.cut[index] for index in plan.cuts) or None,
            "batch": _BATCH,
            "microbatches": _MICROBATCHES,
        },
        "optimizer": {"name": plan.optimizer, "lr": 0.05, "clip": plan.clip},
        "run": {
            "steps": _STEPS,
            "seed": _SEED,
            "precision": "fp64",
            "dynamic": plan.is_dynamic,
            "runs": str(folder / "runs"),
        },
    }


def _emulated(tables: dict[str, dict[str, Any]]) -> EmulatedRun:
    return emulate_job(prepare(make_config(tables, given=())).job)


def _losses(events: Sequence[Event]) -> list[float]:
    reported = [row for event in events if isinstance(event, BatchLosses) for row in event.losses]
    totals: dict[int, list[float]] = {}
    for microbatch, total, count in reported:
        so_far = totals.setdefault(microbatch // _MICROBATCHES, [0.0, 0.0])
        so_far[0] += total
        so_far[1] += count
    return [total / count if count else 0.0 for _, (total, count) in sorted(totals.items())]


def _stage_of(task: Task, plan: Shape) -> Any:
    """Which stage holds a parameter: the modules of a task are registered in the order in which they run."""
    names = [name for name, _ in task.model().named_modules()]
    firsts = [names.index(task.cut[index]) for index in plan.cuts]

    def stage_of(name: str) -> int:
        return sum(names.index(name.rpartition(".")[0]) >= first for first in firsts)

    return stage_of


def _versions(task: Task, plan: Shape) -> tuple[int, ...]:
    """K of each stage: the homes of a tied parameter take the largest of theirs."""
    first, *middle, last = plan.versions if len(plan.versions) > 1 else (*plan.versions, 1)
    return plan.versions if not task.tie or len(plan.versions) == 1 else (max(first, last), *middle, max(first, last))


def _refer(task: Task, plan: Shape) -> reference.Result:
    last = len(plan.replicas) - 1
    ties = ((task.tie, (0, last)),) if task.tie and last else ()
    setup = reference.Setup(
        plan.replicas,
        _versions(task, plan),
        _BATCH,
        _MICROBATCHES,
        _STEPS,
        _SEED,
        optimizer=plan.optimizer,
        clip=plan.clip,
        ties=ties,
        inputs=task.inputs,
        names=task.names,
        loss=task.loss,
        lr=lambda batch: 0.05,
    )
    starts = [None] * len(plan.replicas) if task.name != "language" else _starts(task, plan)
    return reference.train(task.model, task.data(), None, _stage_of(task, plan), starts, setup)


def _starts(task: Task, plan: Shape) -> list[str | None]:
    return [next(name for name, _ in task.model().named_children()), *(task.cut[index] for index in plan.cuts)]


@pytest.mark.parametrize(("task", "plan"), _cases())
def test_a_task_trains_as_the_reference_does(task: Task, plan: Shape, tmp_path: Path) -> None:
    run, expected = _emulated(_tables(task, plan, tmp_path)), _refer(task, plan)
    actual = torch.tensor(_losses(run.events), dtype=torch.float64)
    assert_near({"losses": actual}, {"losses": torch.tensor(expected.losses, dtype=torch.float64)}, _TOLERANCE)
    assert_near(run.weights, expected.weights | expected.buffers, _TOLERANCE)


# Draws and running statistics differ between plans; all else does not.
_SAME_IN_ALL_PLANS = [task for task in TASKS if task.name not in ("language", "segmentation")]


@pytest.mark.parametrize("task", [t for t in _SAME_IN_ALL_PLANS if IS_NIGHTLY or t.name == "tied"], ids=str)
def test_a_task_resumes_under_another_plan(task: Task, tmp_path: Path) -> None:
    """Synchronous plans compute one thing, so a run that changes from one to another ends where the first would."""
    tables = _tables(task, _SYNC, tmp_path)
    whole = _emulated(tables)
    tables["run"]["steps"], tables["checkpoint"] = 2, {"every": 2}
    first = _emulated(tables)
    other = _tables(task, replace(_SYNC, placement="0:0-1.0:2", versions=(1, 1), cuts=(1,)), tmp_path)
    other["run"]["resume"] = first.job.folder
    assert_near(_emulated(other).weights, whole.weights, _TOLERANCE)


def test_an_input_that_the_loss_reads_is_sent_once_where_a_stage_needs_it(tmp_path: Path) -> None:
    language = next(task for task in TASKS if task.name == "language")
    task = replace(language, option="tests.tasks:masked_words", loss=masked_words)
    run, expected = _emulated(_tables(task, _SYNC, tmp_path)), _refer(task, _SYNC)
    assert_near(run.weights, expected.weights | expected.buffers, _TOLERANCE)
    training = run.job.training
    carried = [Boundary.of(values, training.fields, FormatOptions()).fields for values in training.cuts]
    assert carried == [("targets",), ("targets",), ("attention_mask", "targets")], (
        "the last stage's loss alone reads it"
    )


class ChangesItsInput(torch.nn.Module):
    """Changes its samples in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(numbers.mul_(2))
        return made


def reads_its_input(outputs: torch.Tensor, sample: Any) -> torch.Tensor:
    return outputs.square().mean() * sample["numbers"].abs().mean()


def test_a_loss_that_reads_what_the_model_changes_in_place_is_refused(tmp_path: Path) -> None:
    task = next(task for task in TASKS if task.name == "lora")
    tables = _tables(task, replace(_SYNC, placement="0:0-2", versions=(1,), cuts=()), tmp_path)
    tables["model"]["name"], tables["plan"]["cut"] = f"{__name__}:ChangesItsInput", None
    tables["loss"] = {"name": f"{__name__}:reads_its_input"}
    with pytest.raises(UserError, match="changes its input 'numbers' in place, and the loss"):
        prepare(make_config(tables, given=()))


def test_a_field_travels_only_as_far_as_it_is_read(tmp_path: Path) -> None:
    """Evaluation sends what the loss and the metrics read, and training what the loss reads; a live input once."""
    language, segmentation = (next(t for t in TASKS if t.name == name) for name in ("language", "segmentation"))
    for task, read in ((language, "targets"), (segmentation, "label")):
        tables = _tables(task, _SYNC, tmp_path)
        tables["run"]["eval_every"] = _STEPS
        job = prepare(make_config(tables, given=())).job
        assert job.evaluation is not None
        for probe in (job.training, job.evaluation.whole):
            assert [value.name for value in probe.fields] == [read]
            images = [value for values in probe.cuts for value in values if value.field == "image"]
            assert not images, "no stage behind the first reads the image"
    masks = [[value.field for value in values] for values in prepare(make_config(_tables(language, _SYNC, tmp_path),
             given=())).job.training.cuts]  # fmt: skip
    assert ["attention_mask" in fields for fields in masks] == [True, True, False], "the head does not read it"
    assert not any("input_ids" in fields for fields in masks)
