"""`Engine`: stages, lag and replicas for a script that keeps its own training loop.

    engine = stagewright.Engine(model, loss=loss_fn, optimizer=make_optimizer, plan="auto")
    for epoch in range(epochs):
        for step in engine.epoch(train_set, batch=256):
            if engine.is_main:
                print(step.loss)
        print(engine.evaluate(val_set, metrics={"top1": top1}))
    engine.save("weights.safetensors")

The same file runs alone, by `stagewright run`, by torchrun and by srun (`run.script`). Every rank runs it from its
first line and sees the same steps, losses and evaluations, so that all take the same branches.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from stagewright import objects
from stagewright.api.given import Criterion, Data, Given, Metrics
from stagewright.api.loop import OpenRun
from stagewright.api.options import TrainOptions
from stagewright.api.steps import OneBatch, Step, batches_of, where_called
from stagewright.api.training import known_options, tables_of
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import ANYWHERE
from stagewright.config.sections import AUTO, Config
from stagewright.data.own import Collate
from stagewright.errors import UserError
from stagewright.events import Evaluated
from stagewright.plan.plan import Plan
from stagewright.planning.build import FIRST_DEVICE
from stagewright.planning.planner import Choice
from stagewright.report.live.terminal import open_console, say
from stagewright.run.export import export_states, require_target
from stagewright.run.folder import WEIGHTS_FILE
from stagewright.run.prepare import planned
from stagewright.run.resume import resumed_config
from stagewright.run.script import OPTIONS, Local, OneLineErrors, is_launched, launch_script
from stagewright.runtime.checkpoint.folder import checkpoints_folder
from stagewright.runtime.script.rank import ScriptRank, is_rank
from stagewright.runtime.script.rates import Panel
from stagewright.runtime.stage.own_optimizer import build_own
from stagewright.voice import Voice

_OF_THE_LOOP = {  # options that a script's own loop is instead of
    "steps": "leave the loop",
    "epochs": "loop over engine.epoch(...)",
    "eval_every": "call engine.evaluate(...)",
    "export": "call engine.save(...)",
    "early_stop": "leave the loop",
    "best": "call engine.save(...) at the best evaluation",
    "lr_schedule": "give scheduler=, or use torch's schedulers on engine.optimizer",
}


class Engine:
    """Trains a model over stages, one batch at a time, in a script's own loop.

    model: an nn.Module; where it is not cut, this object itself is trained.
    loss: a name, a function or a criterion: (outputs, target) where samples are pairs, (outputs, sample) of dicts.
    optimizer: a function of parameters that makes a torch optimizer, or a name (`--optimizer`) with lr= and so on.
    scheduler: a function of that optimizer that makes one of torch's schedulers; the engine steps it with each batch.
    plan: "auto" (the fastest that is found for this machine, as `stagewright train` finds it), a plan file, or what
    `stagewright.plan` returned; else the options placement=, mode= and so on, by default one device, and by
    `stagewright run` auto. Devices are GPUs where there are any (device=), and the precision is fp32 (precision=).
    resume: a run folder to continue: the script sees the steps that are trained already again, from the record.
    """

    made: ClassVar[int] = 0  # in this process, for `stagewright run`

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Criterion | None = None,
        optimizer: str | Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        plan: str | os.PathLike[str] | Plan | Choice | None = None,
        **options: Unpack[TrainOptions],
    ) -> None:
        if not is_rank() and not isinstance(sys.excepthook, OneLineErrors):
            sys.excepthook = OneLineErrors(sys.excepthook)
        if not isinstance(model, nn.Module):
            raise UserError(f"Engine trains an nn.Module, not a {type(model).__name__}; give the model itself")
        Engine.made += 1
        self._given = Given()
        weakref.finalize(self, self._given.close).atexit = False  # what the script gave is forgotten with the engine
        self._model = model
        self._made_at = where_called()
        is_auto = isinstance(plan, str) and plan == AUTO
        self._names = {
            "model": self._given.model(model),
            "loss": None if loss is None else self._given.loss(loss),
            "optimizer": None if optimizer is None else self._given.optimizer(optimizer),
            "plan": None if is_auto else self._given.file(plan),
        }
        self._options = {**known_options(options, Engine), **({"placement": AUTO} if is_auto else {})}
        self._batch: int | None = self._options.pop("batch", None)
        _require_no_loop(self._options)
        self._rates = _make_rates(model, optimizer if callable(optimizer) else None, scheduler)
        self._rank = _joined(self._names) if is_rank() else None  # that this process was started for
        self._run: OpenRun | None = None  # from the first use on
        self._loop: weakref.ref[Generator[Step]] | None = None  # the last one over an epoch; leaving it ends it
        self._said: set[str] = set()
        self._is_closed = False
        atexit.register(self.close)  # a reference that keeps it: a function's engine lives until the script ends

    # --- What a script reads ------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this process is the one to print and to write; exactly one is."""
        if self._run is not None or self._rank is not None:
            return self._rank is None or self._rank.is_main
        return not _will_launch(self._config("synthetic", self._batch or 1))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The script's optimizer, to set rates and to make schedulers of; what is set acts from the next batch on."""
        if self._rates is None:
            raise UserError(
                "engine.optimizer needs an optimizer of the script's own; give optimizer=lambda params: "
                "torch.optim.SGD(params, lr=0.1)"
            )
        return self._rates.optimizer

    @property
    def plan(self) -> Plan:
        """The plan, once training has begun."""
        return self._opened().plan

    @property
    def done(self) -> int:
        """Batches trained so far, with those that leaving a loop has trained."""
        return 0 if self._run is None else self._run.session.done

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._opened().folder

    # --- What a script does -------------------------------------------------------------------------------------------

    def epoch(
        self, data: Data | Iterable[Any], batch: int | None = None, *, collate: Collate | None = None
    ) -> Iterator[Step]:
        """Train on every sample once, in batches of `batch`; yields each step once its updates are made.

        data: a map-style Dataset, a name of a source, or any iterable of batches, such as a DataLoader.
        """
        self._leave_loop()
        loop = self._steps(data, batch or self._batch, collate, where_called())
        self._loop = weakref.ref(loop)
        return loop

    def _steps(self, data: Any, batch: int | None, collate: Collate | None, where: str) -> Generator[Step]:
        batches = batches_of(data)
        if batches is not None:
            iterator = iter(batches)
            first = next(iterator, None)
            if first is None:
                raise UserError("engine.epoch got no batch: the iterable is empty")
            yield from self._begin_batches(first).batches(chain([first], iterator), where)
            return
        name = self._given.data(data, collate)
        run = self._begin(name, batch)
        if batch is not None and batch != run.plan.batch:
            raise UserError(
                f"engine.epoch has batch={batch} but the run trains batches of {run.plan.batch}; keep one size"
            )
        yield from run.epoch(name, where)

    def step(self, batch: Any) -> Step | None:
        """Train on a batch that the script brings; returns the newest step that all ranks have finished, if any.

        With lag that is an earlier one. `wait()` finishes all.
        """
        where = where_called()
        if self._run is None or not self._run.is_stepping:
            self._leave_loop()
        return self._begin_batches(batch).step(batch, where)

    def wait(self) -> Step | None:
        """Finish all batches that `step` was given; returns the last step."""
        return None if self._run is None else self._run.wait()

    def evaluate(self, data: Data, metrics: Metrics | None = None, *, collate: Collate | None = None) -> Evaluated:
        """Score every sample once on the newest weights; the same result on every rank.

        In a loop, the batches that are begun are trained first.
        """
        where = where_called()
        self.wait()
        name = self._given.data(data, collate)
        run, text = self._begin(name, self._batch), "auto" if metrics is None else self._given.metrics(metrics)
        return run.evaluate(name, text, where)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the weights to a safetensors file, by the names of the model's state_dict; the main process does it."""
        where, target = where_called(), Path(path)
        require_target(target)
        self.wait()
        run = self._opened()
        run.ranks.call(f"engine.save to {target}", where)
        if not run.is_replaying:
            run.ranks.save(lambda states: export_states(run.job.config, states, target))
        return target

    def update_model(self) -> nn.Module:
        """The script's model with the newest weights, in every process; one that is not cut has them at any time."""
        run = self._opened()
        if run.trains_copy and not run.is_replaying:
            file = self.save(self.folder / WEIGHTS_FILE)
            if not file.is_file():
                raise UserError(f"{file}, which the main process has written, is not here; share the folder of runs=")
            run.load_model(load_file(file))
        return self._model

    def checkpoint(self) -> Path:
        """Save everything that a resume needs; it is written while training continues."""
        where = where_called()
        self.wait()
        run = self._opened()
        run.ranks.call("engine.checkpoint", where)
        if not run.is_replaying:
            run.session.save()
        return checkpoints_folder(run.folder) / str(run.session.done)

    def close(self) -> None:
        """End the run: wait for what is being written, and write its report; the end of the script does it too."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._run is not None and not self._run.is_ended:
            self._leave_loop()
            self._run.ranks.call("the end of the script", "its last line")
            self._run.end()
        self._given.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not is_rank():  # which reports the error itself
            self._is_closed = True
            atexit.unregister(self.close)
            if self._run is not None:
                self._run.ranks.abandon(error)

    # --- How a run begins ---------------------------------------------------------------------------------------------

    def _begin(self, source: str, batch: int | None) -> OpenRun:
        """The run; at first use it is opened, or this process becomes the launcher of the ranks."""
        if self._is_closed or (self._run is not None and self._run.is_ended):
            raise UserError("this Engine is closed; make a new one, with resume=RUN to continue its run")
        if self._run is None:
            voice = Voice(self._say_once, self._say_once)
            ranks = self._rank or self._ranks(source, batch, voice)
            try:
                self._run = OpenRun(ranks, self._model, self._rates, self._made_at, voice)
            except BaseException as error:
                ranks.abandon(error)
                raise
        return self._run

    def _ranks(self, source: str, batch: int | None, voice: Voice) -> Local:
        """All ranks, in this process; or this process becomes the launcher of the ranks, and ends with them."""
        if batch is None:
            raise UserError(
                "the size of a batch is not known yet; give batch= to Engine or to the first epoch, and a list of "
                "batches as iter(batches)"
            )
        config = self._config(source, batch)
        given = config if is_launched(config) else planned(config, voice)
        if _will_launch(given if isinstance(given, Config) else given.config):
            launch_script(given)
        return Local(given)

    def _config(self, source: str, batch: int) -> Config:
        named: dict[str, Any] = {keyword: value for keyword, value in self._names.items() if value is not None}
        given = _given_to_run()
        if "plan" not in named and "file" not in given.get("plan", {}):  # a plan file has its own batch
            named["batch"] = batch
        if "resume" not in self._options and "resume" not in given.get("run", {}):  # a resumed run has its own
            named["precision"] = "fp32"  # as scripts compute, unless they say
            if OPTIONS not in os.environ and "plan" not in named:  # `stagewright run` places ranks as `train` does
                named["placement"] = FIRST_DEVICE
        options = dict(self._options)
        if "file" in given.get("plan", {}) and options.get("placement") == AUTO:
            del options["placement"]  # the plan file of `stagewright run` has one
        return resumed_config(tables_of({**named, **options, "data": source}), given)

    def _begin_batches(self, batch: Any) -> OpenRun:
        """The run of a script that brings its own batches, of which this is one."""
        if self._run is not None:
            return self._run
        samples = OneBatch(batch)
        return self._begin(self._given.data(samples), len(samples))

    def _opened(self) -> OpenRun:
        if self._run is None:
            raise UserError("training has not begun; call engine.epoch, step or evaluate first")
        return self._run

    def _leave_loop(self) -> None:
        """Leave a loop that the script has left, or never finished."""
        self.wait()
        loop = self._loop() if self._loop is not None else None
        self._loop = None
        if loop is not None:
            loop.close()

    def _say_once(self, line: str) -> None:
        """Tell the user something; what a rank writes to standard error is in its log only."""
        if self.is_main and line not in self._said:
            self._said.add(line)
            say(open_console(stderr=not is_rank()), f"stagewright: {line}")


def _require_no_loop(options: Mapping[str, Any]) -> None:
    """An error for an option that the script's own loop is instead of."""
    for keyword, instead in _OF_THE_LOOP.items():
        section, (name, *_) = next(iter(tables_of({keyword: None}).items()))
        if name in _given_to_run().get(section, {}):
            raise UserError(
                f"an Engine takes no --{keyword.replace('_', '-')}, since the script has its own loop; {instead}, "
                "or give an option of the script's own after --"
            )
        if keyword in options:
            raise UserError(f"Engine takes no {keyword}=, since the script has its own loop; {instead}")


def _make_rates(
    model: nn.Module,
    factory: Callable[..., torch.optim.Optimizer] | None,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None,
) -> Panel | None:
    """The script's optimizer as an object to set rates on, with its scheduler."""
    if factory is None:
        if scheduler is not None:
            raise UserError("scheduler= needs optimizer= as a function of parameters, whose rates it sets")
        return None
    named = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    if not named:
        raise UserError(f"no parameter of {type(model).__name__} is trained: all have requires_grad=False")
    return Panel(build_own(factory, named), scheduler)


def _joined(names: Mapping[str, str | None]) -> ScriptRank:
    """The rank that this process was started for; its job names this script's objects."""
    rank = ScriptRank()
    sys.excepthook = OneLineErrors(sys.excepthook, rank.fail)
    config = rank.job.config
    for keyword, named in (("model", config.model), ("loss", config.loss), ("optimizer", config.optimizer)):
        own = names[keyword]
        if own is not None and objects.is_given(named.name):
            objects.install({named.name.partition(":")[2]: objects.load_object(own, keyword)})
    return rank


def _will_launch(config: Config) -> bool:
    if config.run.emulate:
        return False
    return is_launched(config) or config.nodes.list is not None or _num_ranks(config) > 1


def _given_to_run() -> dict[str, dict[str, Any]]:
    """The tables of options that `stagewright run` was given."""
    found: dict[str, dict[str, Any]] = json.loads(os.environ.get(OPTIONS, "{}"))
    return found


def _num_ranks(config: Config) -> int:
    text = FIRST_DEVICE if config.plan.placement == AUTO else config.plan.placement
    if config.plan.file is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = json.loads(Path(config.plan.file).read_text())["placement"]
    return len({device for stage in parse_placement(text, ANYWHERE) for device in stage})
