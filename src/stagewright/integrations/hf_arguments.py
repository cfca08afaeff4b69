"""What of TrainingArguments is followed over stages, and what is refused.

Any argument that is not named here and has another value than its default is refused, also one that a newer version
adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from stagewright.errors import UserError

_FOLLOWED = {  # arguments of TrainingArguments that do here what they do there
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("optim", "optim_args"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16", "seed", "use_cpu"),
    *("logging_strategy", "logging_steps", "logging_first_step", "report_to", "run_name", "disable_tqdm"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "metric_for_best_model", "greater_is_better"),
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "dataloader_drop_last"),
    *("dataloader_num_workers", "remove_unused_columns", "label_names", "train_sampling_strategy"),
}
_NO_EFFECT = {  # that change neither what is trained nor what is measured
    *("average_tokens_across_devices", "per_device_eval_batch_size", "eval_accumulation_steps", "local_rank"),
    *("eval_do_concat_batches", "eval_use_gather_object", "prediction_loss_only", "save_on_each_node", "use_cache"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_dir", "logging_nan_inf_filter", "project"),
    *("ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers"),
    *("skip_memory_metrics", "do_train", "do_eval", "do_predict", "length_column_name", "overwrite_output_dir"),
}
_INSTEAD = {
    "torch_compile": "give compile=True to Trainer",
    "tf32": 'give precision="tf32" to Trainer',
    "full_determinism": "give deterministic=True to Trainer",
    "resume_from_checkpoint": "give resume=RUN to Trainer",
    "load_best_model_at_end": "load trainer.state.best_model_checkpoint",
    "label_smoothing_factor": 'give loss="cross-entropy" and label_smoothing= to Trainer',
}
_OF_ARGUMENTS = {  # options of the engine that TrainingArguments has
    "batch": "per_device_train_batch_size and gradient_accumulation_steps",
    "seed": "seed",
    "clip": "max_grad_norm",
    "workers": "dataloader_num_workers",
    "shuffle": "train_sampling_strategy",
    "lr": "learning_rate",
    "inputs": "label_names",
}
_NO_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")  # inside a step, which has many ranks


def require_followed(args: Any, options: Mapping[str, Any]) -> None:
    """An error about an argument that has no effect here, or about an option of the engine that names the same."""
    if args.world_size > 1:
        raise UserError(
            "TrainingArguments has joined a process group; import stagewright.integrations.hf before it is made"
        )
    for field in fields(args):
        if field.name not in _FOLLOWED | _NO_EFFECT and not _is_usual(field, value := getattr(args, field.name)):
            instead = _INSTEAD.get(field.name, "leave it out")
            raise UserError(f"TrainingArguments has {field.name}={str(value)[:60]}, not followed here; {instead}")
    for option, theirs in _OF_ARGUMENTS.items():
        if option in options:
            raise UserError(f"Trainer takes no {option}=; set {theirs} of TrainingArguments")
    if (args.bf16 or args.fp16) and "precision" in options:
        raise UserError("precision= and bf16 or fp16 of TrainingArguments both name a precision; give one")
    if args.gradient_accumulation_steps > 1 and "microbatches" in options:
        raise UserError("microbatches= and gradient_accumulation_steps both name the microbatches; give one")
    sampling = getattr(args, "train_sampling_strategy", "random")
    if sampling not in ("random", "sequential"):
        raise UserError(f"train_sampling_strategy={sampling} is not followed here; give random or sequential")
    scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if scheduler in ("reduce_lr_on_plateau", "greedy"):
        raise UserError(f"lr_scheduler_type={scheduler} waits for evaluations; give one that follows from the step")


def _is_usual(field: Any, value: Any) -> bool:
    usual = field.default_factory() if field.default_factory is not MISSING else field.default
    if field.name == "accelerator_config" and value is not None:
        usual = type(value)()
    return bool(value == usual) or not (value or usual)


def require_events(callbacks: Iterable[Any]) -> None:
    """An error about a callback of an event that never happens."""
    for callback in callbacks:
        bases = [base for base in type(callback).__mro__ if not base.__module__.startswith("transformers.")]
        own = {name for base in bases for name in vars(base)}
        for event in _NO_EVENTS:
            if event in own:
                name = type(callback).__name__
                raise UserError(f"{name} has {event}, which never happens: a step is of many ranks; use on_step_end")
