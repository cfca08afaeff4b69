"""Hugging Face's Trainer over stages: its arguments, datasets and callbacks, with the engine's training step.

    from stagewright.integrations.hf import Trainer      # first: before TrainingArguments is made

    trainer = Trainer(model, args, train_dataset=..., eval_dataset=..., placement="0:0.0:1", mode="stale")
    trainer.train()

The script runs alone, by `stagewright run`, torchrun and srun, as any script with an Engine. A batch is
per_device_train_batch_size x gradient_accumulation_steps samples, whatever the plan; where these accumulate, they are
the plan's microbatches. An argument that the engine can't follow is refused (`hf_arguments`), never ignored.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stagewright.api.engine import Engine
from stagewright.api.given import Criterion, Metrics
from stagewright.api.steps import Step
from stagewright.errors import UserError, did_you_mean
from stagewright.integrations.hf_arguments import require_events, require_followed
from stagewright.integrations.hf_predictions import PREFIX, Predictions
from stagewright.model.networks.libraries import import_library
from stagewright.run.script import OneLineErrors
from stagewright.runtime.script.rank import is_rank

if not is_rank() and not isinstance(sys.excepthook, OneLineErrors):
    sys.excepthook = OneLineErrors(sys.excepthook)  # also of what is missing here
import_library("accelerate")  # which transformers' Trainer needs
_transformers = import_library("transformers")
_Trainer: Any = _transformers.Trainer
_utils = import_library("transformers.trainer_utils")

# accelerate would join a process group of its own by these; our ranks and launchers need them only in `_open`.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_place = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}


_REPLACED = (  # methods that nothing calls here: what overrides one would be ignored
    *("training_step", "compute_loss", "create_optimizer", "prediction_step", "evaluation_loop"),
    *("get_train_dataloader", "get_eval_dataloader", "get_batch_samples"),
)


class Trainer(_Trainer):  # type: ignore[misc]
    """transformers' Trainer, whose training step is the engine's.

    `plan` and all other options of `stagewright.Engine` are keywords. loss: "model", the loss that the model returns,
    or what an Engine takes. metrics: what `Engine.evaluate` takes; compute_metrics needs every prediction in one
    process, so a last stage without replicas.
    """

    control: Any
    state: Any

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *positional: Any,
        loss: Criterion = "model",
        metrics: Metrics | None = None,
        **keywords: Any,
    ) -> None:
        theirs = inspect.signature(_Trainer.__init__).parameters
        self._options = {name: value for name, value in keywords.items() if name not in theirs}
        self._loss = loss
        self._metrics = metrics
        self._engine: Engine | None = None
        self._collectors: dict[tuple[Any, ...], Predictions] = {}
        with _unmoved(args):  # ranks take their stages of it; one device may be too small for all
            super().__init__(model, args, *positional, **{name: keywords[name] for name in theirs if name in keywords})
        require_followed(self.args, self._options)
        self._require_given()

    # --- Training -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Train over stages; afterwards the model has the trained weights in every process."""
        if resume_from_checkpoint or trial is not None:
            raise UserError("train() takes neither resume_from_checkpoint nor trial; give resume=RUN to Trainer")
        if self.state.global_step:
            raise UserError(f"this Trainer has trained {self.state.global_step} steps already; make a new one")
        require_events(self.callback_handler.callbacks)
        args, handler, engine = self.args, self.callback_handler, self._open()
        per_epoch, steps = self._steps()
        self.state = _transformers.TrainerState(
            max_steps=steps,
            num_train_epochs=math.ceil(steps / per_epoch),
            train_batch_size=args.per_device_train_batch_size,
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
        )
        self.state.compute_steps(args, steps)
        handler.optimizer, handler.lr_scheduler, handler.model = engine.optimizer, self.lr_scheduler, self.model
        began = time.time()
        self.is_in_train = True
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self.evaluate(ignore_keys=ignore_keys_for_eval)
        unlogged: list[Step] = []
        total = 0.0
        while self.state.global_step < steps and not self.control.should_training_stop:
            self.control = handler.on_epoch_begin(args, self.state, self.control)
            step: Step | None = None
            over = engine.epoch(self.train_dataset, self._batch, collate=self._collated)
            for _ in range(per_epoch):
                self.control = handler.on_step_begin(args, self.state, self.control)
                step = next(over, None)
                if step is None:
                    break
                unlogged.append(step)
                self.state.global_step += 1
                self.state.epoch = self.state.global_step / per_epoch
                self.control = handler.on_step_end(args, self.state, self.control)
                total += self._follow(unlogged, ignore_keys_for_eval, is_replayed=step.is_replayed)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            over.close()  # type: ignore[attr-defined]
            self.control = handler.on_epoch_end(args, self.state, self.control)
            total += self._follow(unlogged, ignore_keys_for_eval, is_replayed=step is not None and step.is_replayed)
        total += sum(step.loss for step in unlogged)
        more = engine.done - self.state.global_step
        if more > 0 and engine.is_main:
            last = self.state.global_step
            warnings.warn(f"{more} batches after step {last} were begun, with lag, and are trained too", stacklevel=2)
        engine.update_model()
        measured = _utils.speed_metrics("train", began, self.state.global_step * self._batch, self.state.global_step)
        measured["train_loss"] = total / self.state.global_step
        self.is_in_train = False
        self.log(measured)
        self.control = handler.on_train_end(args, self.state, self.control)
        return _utils.TrainOutput(self.state.global_step, measured["train_loss"], measured)

    def _follow(self, unlogged: list[Step], ignore_keys: Any, *, is_replayed: bool) -> float:
        """Log, evaluate and save where the callbacks ask for it; returns the sum of the losses that were logged.

        A step of before a resume is logged and evaluated by the record, and what it saved is there already.
        """
        logged = 0.0
        if self.control.should_log and unlogged:
            logged = sum(step.loss for step in unlogged)
            self.log({"loss": logged / len(unlogged), "learning_rate": unlogged[-1].lr})
            unlogged.clear()
        if self.control.should_evaluate:
            is_best = self._is_best(self.evaluate(ignore_keys=ignore_keys))
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save and not is_replayed:
            self._save_step()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return logged

    def _is_best(self, measured: Mapping[str, float]) -> bool:
        name = self.args.metric_for_best_model
        if name is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in measured:
            raise UserError(
                f"metric_for_best_model is '{name}', which no evaluation has; {did_you_mean(name, list(measured))}"
            )
        best, value = self.state.best_metric, measured[name]
        if best is not None and not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return True

    def _save_step(self) -> None:
        """Write checkpoint-N, which from_pretrained reads, and what the engine needs to resume."""
        folder = Path(self.args.output_dir) / f"{_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.save_model(str(folder))
        if not self.args.save_only_model:
            self._open().checkpoint()
        if not self.is_world_process_zero():
            return
        self.state.save_to_json(str(folder / "trainer_state.json"))
        found = sorted(folder.parent.glob(f"{_utils.PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: path.stat().st_mtime)
        kept = [path for path in found if str(path) != self.state.best_model_checkpoint]
        limit = self.args.save_total_limit
        for path in kept[: max(0, len(found) - limit)] if limit else ():
            shutil.rmtree(path)

    # --- Evaluation and weights ---------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Score a dataset on the newest weights: its loss, compute_metrics and metrics; the same on every rank."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data
        if data is None:
            raise UserError("evaluate() has no dataset; give eval_dataset= to Trainer")
        if isinstance(data, dict):
            parts = [self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in data.items()]
            return {name: value for part in parts for name, value in part.items()}
        engine, began = self._open(), time.time()
        if self.compute_metrics is None:
            found = engine.evaluate(data, "none" if self._metrics is None else self._metrics, collate=self._collated)
        else:
            key = (id(data), *(ignore_keys or ()))
            collector = self._collectors.setdefault(key, Predictions(data, self, self._collated, ignore_keys))
            found = engine.evaluate(collector, {"compute_metrics": collector}, collate=collector.collated)
            if (replicas := len(engine.plan.stages[-1].ranks)) > 1:
                raise UserError(
                    f"compute_metrics needs all predictions in one process, and the last stage has {replicas} replicas;"
                    " give metrics= to Trainer, functions whose totals add up, or a last stage on one device"
                )
        measured = {f"{metric_key_prefix}_loss": found.loss}
        measured |= {f"{metric_key_prefix}_{name.removeprefix(PREFIX)}": value for name, value in found.metrics.items()}
        measured |= _utils.speed_metrics(metric_key_prefix, began, found.samples)
        self.log(measured)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, measured)
        return measured

    def predict(self, *args: Any, **keywords: Any) -> Any:
        """Refused: predictions are on the last stage; the model has the trained weights, to predict with."""
        raise UserError("predict() is not over stages; call trainer.model, which has the weights after train()")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the newest weights, for from_pretrained; the main process does it."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        newest = None if self._engine is None else self._engine.save(folder / "newest.safetensors")
        if not self.is_world_process_zero():
            return
        state = dict(self.model.state_dict()) if newest is None else load_file(newest)
        if newest is not None:
            newest.unlink()
        if isinstance(self.model, _transformers.PreTrainedModel):
            self.model.save_pretrained(folder, state_dict=state)
        else:
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def is_world_process_zero(self) -> bool:
        """Whether this process prints and writes."""
        return _place.get("RANK", "0") == "0" if self._engine is None else self._engine.is_main

    def is_local_process_zero(self) -> bool:
        return self.is_world_process_zero()

    def close(self) -> None:
        """End the run and write its report; the end of the script does it too."""
        if self._engine is not None:
            self._engine.close()

    # --- The engine ---------------------------------------------------------------------------------------------------

    @property
    def _batch(self) -> int:
        return int(self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps)

    def _steps(self) -> tuple[int, int]:
        """Steps of an epoch and of the whole training."""
        try:
            samples = len(self.train_dataset)
        except TypeError:
            raise UserError(
                f"train_dataset is a {type(self.train_dataset).__name__} without a length; give a map-style dataset"
            ) from None
        per_epoch, left_out = divmod(samples, self._batch)
        if not per_epoch:
            raise UserError(f"train_dataset has {samples} samples, no batch of {self._batch}; reduce the batch")
        if left_out and not self.args.dataloader_drop_last and self.is_world_process_zero():
            warnings.warn(
                f"{left_out} samples of each epoch are no whole batch of {self._batch} and are left out, as with "
                "dataloader_drop_last=True",
                stacklevel=3,
            )
        if self.args.max_steps > 0:
            return per_epoch, int(self.args.max_steps)
        return per_epoch, math.ceil(self.args.num_train_epochs * per_epoch)

    def _open(self) -> Engine:
        if self._engine is None:
            steps = self._steps()[1] if self.train_dataset is not None else 1
            with _launched():
                self._engine = Engine(
                    self.model,
                    loss=self._loss,
                    optimizer=self._make_optimizer,
                    scheduler=lambda optimizer: self.create_scheduler(steps, optimizer),
                    **self._engine_options(),
                )
        return self._engine

    def _engine_options(self) -> dict[str, Any]:
        args, count = self.args, self.args.gradient_accumulation_steps
        is_sequential = getattr(args, "train_sampling_strategy", "random") == "sequential"
        asked = {
            "batch": self._batch,
            "seed": args.seed,
            "workers": args.dataloader_num_workers,
            "inputs": ",".join(f"{name}={name}" for name in self._inputs()),
            "clip": args.max_grad_norm or None,
            "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
            "device": "cpu" if args.use_cpu else None,
            "microbatches": count if count > 1 else None,
            "shuffle": False if is_sequential else None,
        }
        known = {name: value for name, value in asked.items() if value is not None}
        return {"runs": Path(args.output_dir) / "runs", **self._options, **known}

    def _make_optimizer(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of some parameters, with weight decay where transformers has it."""
        kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or {*settings} & {"params", "model"}:
            raise UserError(f"optim={self.args.optim!s} is made of the whole model, not of each stage's parameters")
        decayed = set(self.get_decay_parameter_names(self.model))
        groups = [
            {"params": [p for name, p in named_parameters if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in named_parameters if name not in decayed], "weight_decay": 0.0},
        ]
        return kind(groups, **settings)

    # --- Samples ------------------------------------------------------------------------------------------------------

    def _collated(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Samples with the fields that the model has a parameter for, or that are labels."""
        if self.args.remove_unused_columns:
            inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            columns = {*inspect.signature(inner.forward).parameters, "label", "label_ids", *self.label_names}
            samples = [{name: value for name, value in sample.items() if name in columns} for sample in samples]
        return dict(self.data_collator(list(samples)))

    def _inputs(self) -> list[str]:
        """The fields that the model takes; its labels only where it computes its own loss."""
        data = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        data = next(iter(data.values())) if isinstance(data, dict) else data
        names = self._collated([data[0]])
        return [name for name in names if self._loss == "model" or name not in self.label_names]

    # --- What is refused ----------------------------------------------------------------------------------------------

    def _require_given(self) -> None:
        """Refuse what holds or makes the whole model, and methods that nothing would call."""
        for name, is_given, instead in (
            ("optimizers", self.optimizer is not None or self.lr_scheduler is not None, "optimizer_cls_and_kwargs="),
            ("model_init", self.model_init is not None, "the model"),
            ("compute_loss_func", self.compute_loss_func is not None, "loss="),
        ):
            if is_given:
                raise UserError(f"Trainer can't follow {name}=, which is not of one stage; give {instead}")
        if self.compute_metrics is not None and self._metrics is not None:
            raise UserError("compute_metrics= and metrics= both say what an evaluation measures; give one")
        for name in _REPLACED:
            if getattr(type(self), name) is not getattr(_Trainer, name):
                raise UserError(f"{type(self).__name__} overrides {name}, which the engine's step replaces; give loss=")


@contextmanager
def _unmoved(args: Any) -> Iterator[None]:
    """Within, transformers' Trainer leaves a model where it is, as it does for an evaluation in bf16."""
    before, args.bf16_full_eval = args.bf16_full_eval, True
    try:
        yield
    finally:
        args.bf16_full_eval = before


@contextmanager
def _launched() -> Iterator[None]:
    """Within, and from then on in a launcher, the variables of torchrun or of our supervisor are there."""
    os.environ.update(_place)
    yield
    if is_rank():
        for name in _place:
            os.environ.pop(name, None)
