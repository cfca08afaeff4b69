"""transformers' Trainer over stages trains, evaluates and saves as it does alone; what it can't follow is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stagewright.errors import UserError
from stagewright.model.networks.libraries import import_library, is_installed
from tests.examples import module
from tests.marks import nightly

if not is_installed("transformers") or not is_installed("accelerate"):
    pytest.skip("transformers or accelerate is not installed", allow_module_level=True)

transformers: Any = import_library("transformers")
Trainer: Any = import_library("stagewright.integrations.hf").Trainer
STAGES = {"placement": "0:0.0:1", "mode": "sync", "cut": "bert.encoder.layer.1", "emulate": True}
SAMPLES, BATCH = 32, 8


def reviews(samples: int = SAMPLES, seed: int = 1) -> list[dict[str, Any]]:
    import_library("transformers")
    data = module("text.engine").Reviews(samples, 6, 40, seed)
    return [{**data[number], "text": "of no use to the model"} for number in range(samples)]


def make_model() -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = module("text.engine").make_model(16, 2, 6, 40, 0.0)
    return model


def arguments(folder: Path, **changed: Any) -> Any:
    values = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "train_sampling_strategy": "sequential",
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(**values | changed)


def right(prediction: Any) -> dict[str, float]:
    found = prediction.predictions.argmax(1) == prediction.label_ids
    return {"right": float(found.mean()), "first": float(prediction.predictions[0, 0])}


MADE: list[Any] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def make(folder: Path, args: Any = None, **keywords: Any) -> Any:
    usual = {"train_dataset": reviews(), "eval_dataset": reviews(12, 2), "precision": "fp64", "monitor_every": 0}
    MADE.append(Trainer(make_model(), args or arguments(folder), **usual | keywords))
    return MADE[-1]


def plain(folder: Path, **changed: Any) -> tuple[Any, list[dict[str, float]]]:
    """transformers' own Trainer, in double precision: its model and what it logged."""
    trainer = transformers.Trainer(
        make_model().double(), arguments(folder, **changed), train_dataset=reviews(), eval_dataset=reviews(12, 2),
        compute_metrics=right,
    )  # fmt: skip
    trainer.train()
    return trainer.model, trainer.state.log_history


def numbers(history: list[dict[str, float]]) -> list[tuple[str, float]]:
    names = ("loss", "learning_rate", "eval_loss", "eval_right", "eval_first", "train_loss", "epoch", "step")
    return [(name, entry[name]) for entry in history for name in names if name in entry]


def assert_same(history: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    found, wanted = numbers(history), numbers(expected)
    assert [name for name, _ in found] == [name for name, _ in wanted]
    # transformers adds up losses in fp32.
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-7)


def test_trains_evaluates_and_logs_as_transformers_does(tmp_path: Path) -> None:
    model, expected = plain(tmp_path / "theirs")
    trainer = make(tmp_path / "ours", compute_metrics=right)
    output = trainer.train()
    assert_same(trainer.state.log_history, expected)
    assert output.global_step == 8 and output.training_loss == pytest.approx(expected[-1]["train_loss"])
    print(f"transformers: one process {difference(trainer.model, model):.1e}")
    assert difference(trainer.model, model) < 1e-10


@nightly
def test_stages_train_accumulated_batches_as_microbatches_of_one(tmp_path: Path) -> None:
    """As one batch of them all trains: transformers itself counts the loss of this model once for each of them."""
    model, expected = plain(tmp_path / "theirs")
    args = arguments(tmp_path, per_device_train_batch_size=BATCH // 4, gradient_accumulation_steps=4)
    trainer = make(tmp_path, args, compute_metrics=right, **STAGES)
    trainer.train()
    assert_same(trainer.state.log_history, expected)
    print(f"transformers: sync 1-1 {difference(trainer.model, model):.1e}")
    assert difference(trainer.model, model) < 1e-6  # the script's model is in fp32
    assert trainer.evaluate()["eval_right"] == expected[-2]["eval_right"]
    (plan,) = tmp_path.glob("runs/*/plan.json")
    assert json.loads(plan.read_text())["microbatches"] == 4


def difference(model: nn.Module, other: nn.Module) -> float:
    state = model.state_dict()
    return max(float((state[name] - tensor).abs().max()) for name, tensor in other.state_dict().items())


class Counted(transformers.TrainerCallback):  # type: ignore[misc]
    """Counts events, and stops at a step."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.events: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"begin {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == self.last

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.events.append("log" if "loss" in logs else "evaluation" if "eval_loss" in logs else "end")

    def on_save(self, *_: Any, **__: Any) -> None:
        self.events.append("save")


def test_callbacks_follow_and_stop_training_and_checkpoints_are_pretrained_models(tmp_path: Path) -> None:
    counted = Counted(5)
    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_total_limit=1,
        metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    trainer = make(tmp_path, args, callbacks=[counted], metrics="accuracy", **STAGES | {"precision": "fp32"})
    trainer.train()
    begun = [event for event in counted.events if event.startswith("begin")]
    assert begun == [f"begin {step}" for step in range(5)]
    assert [event for event in counted.events if event not in begun] == [
        *("step 1", "step 2", "evaluation", "save", "step 3", "log", "step 4", "evaluation", "save", "step 5", "end"),
    ]
    with pytest.raises(UserError, match="5 steps already"):
        trainer.train()
    (kept,) = {str(path) for path in tmp_path.glob("checkpoint-*")}
    assert kept == trainer.state.best_model_checkpoint or trainer.state.best_global_step == 2
    loaded = transformers.BertForSequenceClassification.from_pretrained(kept)
    assert (Path(kept) / "trainer_state.json").exists() and loaded.config.num_labels == 2
    named = trainer.evaluate({"few": reviews(4, 5)})
    assert {"eval_few_loss", "eval_few_accuracy"} <= named.keys()
    trainer.save_model(str(tmp_path / "last"))
    saved, state = load_file(tmp_path / "last" / "model.safetensors"), trainer.model.state_dict()
    assert all(torch.equal(saved[name], state[name]) for name in saved) and len(saved) == len(state)


class Changed(Trainer):  # type: ignore[misc, valid-type]
    def compute_loss(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


class Clipping(transformers.TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("args", "keywords", "said"),
    [
        ({"gradient_checkpointing": True}, {}, "gradient_checkpointing=True"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}, {}, "reduce_lr_on_plateau"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_strategy": "epoch"}, {}, "best_model"),
        ({"bf16": True}, {"precision": "fp32"}, "bf16"),
        ({}, {"batch": 4}, "per_device_train_batch_size"),
        ({}, {"placment": "0:0"}, "placement"),
        ({}, {"compute_loss_func": print}, "compute_loss_func"),
        ({}, {"compute_metrics": right, "metrics": "accuracy"}, "compute_metrics"),
        ({}, {"callbacks": [Clipping()]}, "Clipping has on_pre_optimizer_step"),
        ({"per_device_train_batch_size": 64}, {}, "32 samples, no batch of 64"),
    ],
)
def test_what_is_not_followed_is_refused_in_one_line(
    args: dict[str, Any], keywords: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said) as refused:
        make(tmp_path, arguments(tmp_path, **args), **keywords).train()
    assert "\n" not in str(refused.value)


def test_a_subclass_with_its_own_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Changed overrides compute_loss"):
        Changed(make_model(), arguments(tmp_path, eval_strategy="no"), train_dataset=reviews())


@nightly
def test_predictions_of_several_processes_are_refused(tmp_path: Path) -> None:
    replicas = STAGES | {"placement": "0:0.0:1-2"}
    with pytest.raises(UserError, match="last stage has 2 replicas"):
        make(tmp_path, compute_metrics=right, **replicas).evaluate()


@nightly
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    """Callbacks see the steps of the record again, evaluations among them."""
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = make(tmp_path / "whole", arguments(tmp_path / "whole", **saved), **STAGES)
    whole.train()
    make(tmp_path / "first", arguments(tmp_path / "first", **saved), callbacks=[Counted(7)], **STAGES).train()
    MADE[-1].close()
    (run,) = (tmp_path / "first" / "runs").iterdir()
    resumed = make(tmp_path / "then", arguments(tmp_path / "then", **saved), resume=run / "checkpoints" / "6", **STAGES)
    resumed.train()
    assert resumed.state.global_step == 8 and numbers(resumed.state.log_history) == numbers(whole.state.log_history)
    assert difference(resumed.model, whole.model) == 0.0
