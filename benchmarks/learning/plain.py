"""The plain PyTorch loop beside which a study puts its trials: one process, torch's own optimizer, no stages.

`python -m benchmarks.learning.plain TRIAL.toml` trains what `stagewright train --config TRIAL.toml` trains, from
the same initial weights and over the same samples, and writes the same metrics.jsonl. It imports nothing of the
runtime: loss, gradient, update, learning rate and evaluation are written out here. It handles texts (`tokens:FILE`) in
fp32 or fp64, and refuses the options that it would ignore.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stagewright.config.sections import DEFAULT_BATCH, Config
from stagewright.config.toml import FIXED, make_config, read_toml
from stagewright.data.formats.tokens import TokenSource
from stagewright.data.order import EvaluationSampler, Order
from stagewright.errors import UserError
from stagewright.events import Evaluated, Step, encode
from stagewright.metrics import steady_rate
from stagewright.model.load import build_model
from stagewright.runtime.stage.optimizer import stock_optimizer

Write = Callable[[Step | Evaluated], None]
_TEXT = "tokens:"
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
_SCHEDULES = ("constant", "cosine")
_USED = {
    "model": {"name", "classes"},
    "data": {"source", "val", "context", "shuffle"},
    "plan": {"placement", "mode", "batch", "microbatches"},  # the batch is trained whole
    "optimizer": {"name", "lr", "momentum", "nesterov", "weight_decay", "beta1", "beta2", "eps"},
    "schedule": {"kind", "warmup", "final"},
    "run": {"epochs", "seed", "precision", "device", "threads", "emulate", "eval_every", "log_every", "runs"},
}


def require_plain(config: Config) -> None:
    """An error for what the loop does not do."""
    for place in (config.data.source, config.data.val or ""):
        if not place.startswith(_TEXT):
            raise UserError(
                f"a plain loop trains on text, not on {place or 'no --val'}; give --data and --val tokens:FILE"
            )
    if config.run.precision not in _DTYPES:
        raise UserError(f"a plain loop trains in {' or '.join(_DTYPES)}, not {config.run.precision}")
    if config.schedule.kind not in _SCHEDULES:
        raise UserError(f"a plain loop has schedules {', '.join(_SCHEDULES)}, not {config.schedule.kind}")
    usual = asdict(Config())
    for section, own in asdict(config).items():
        for name, value in own.items():
            if name not in _USED.get(section, ()) and value != usual[section][name]:
                raise UserError(f"a plain loop does not use {section}.{name}, which is {value}; leave it out")


def train_plain(config: Config, write: Write) -> float | None:
    """Train whole epochs and evaluate as a run does; the samples per second, where they became steady."""
    require_plain(config)
    device = torch.device(config.run.device)
    training, validation = (
        TokenSource(str(place).removeprefix(_TEXT), config.data.context)
        for place in (config.data.source, config.data.val)
    )
    size = config.plan.batch or DEFAULT_BATCH
    order = Order(len(training), size, config.run.seed, config.data.shuffle)
    batches = order.batches * (1 if config.run.epochs is None else config.run.epochs)
    every = order.batches if config.run.eval_every is None else config.run.eval_every or batches
    dtype = _DTYPES[config.run.precision]
    model = build_model(config.model.name, config.run.seed, config.model.classes, dtype).to(device).train()
    optimizer = stock_optimizer(config.optimizer, model.parameters())
    seconds, steps = 0.0, []
    for batch in range(batches):
        start = time.perf_counter()
        rate = _learning_rate(config, batch, batches)
        for group in optimizer.param_groups:
            group["lr"] = rate
        sample = training.batch(order.microbatch(batch, 1))
        optimizer.zero_grad()
        loss = _next_token_loss(model, sample["input_ids"].to(device), sample["targets"].to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not math.isfinite(value := loss.item()):
            raise UserError(f"the loss of batch {batch} is {value}; reduce --lr")
        seconds += time.perf_counter() - start
        steps.append(Step(batch, batch // order.batches, value, rate, seconds, 0.0))
        write(steps[-1])
        if (batch + 1) % every == 0 or batch + 1 == batches:
            write(_evaluate(model, validation, batch + 1, size, device))
    speed = steady_rate(steps, size)
    return None if speed is None else speed.rate


def _learning_rate(config: Config, batch: int, batches: int) -> float:
    """Linear to the peak over the warm-up; then that, or half a cosine down to the final rate."""
    peak, schedule = config.optimizer.lr, config.schedule
    if batch < schedule.warmup:
        return peak * (batch + 1) / schedule.warmup
    if schedule.kind == "constant":
        return peak
    turn = math.pi * (batch - schedule.warmup) / max(1, batches - schedule.warmup)
    return schedule.final + (peak - schedule.final) * 0.5 * (1 + math.cos(turn))


def _next_token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _evaluate(model: nn.Module, source: TokenSource, batch: int, size: int, device: torch.device) -> Evaluated:
    """The mean loss of all tokens, and its exponential."""
    sampler = EvaluationSampler(len(source), size)
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for piece in range(-(-len(source) // size)):
            sample = source.batch(sampler.indices(piece))
            tokens, targets = sample["input_ids"].to(device), sample["targets"].to(device)
            total += float(_next_token_loss(model, tokens, targets)) * targets.numel()
            count += targets.numel()
    model.train()
    return Evaluated(batch, len(source), total / count, {"perplexity": math.exp(total / count)})


def main(path: str) -> None:
    """Train the trial of a file; metrics.jsonl is in its folder of runs, as that of a run."""
    config = make_config(FIXED, read_toml(path), given=())
    torch.set_num_threads(config.run.threads or 1)
    folder = Path(config.run.runs) / "plain"
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:

        def keep(record: Step | Evaluated) -> None:
            file.write(encode(record) + "\n")
            file.flush()

        rate = train_plain(config, keep)
    print(json.dumps({"images_per_second": rate}))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"stagewright: {error}")
