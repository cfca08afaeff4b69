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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from stagewright import objects
from stagewright.api.given import Criterion, Data, Given, Metrics
from stagewright.api.options import TrainOptions
from stagewright.api.steps import OneBatch, Step, batches_of, chained, where_called
from stagewright.api.training import known_options, tables_of
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import ANYWHERE
from stagewright.config.sections import AUTO, MOST_STEPS, Config
from stagewright.data.order import Order
from stagewright.data.own import Collate
from stagewright.data.sources import Source
from stagewright.errors import RunFailed, UserError
from stagewright.events import Evaluated
from stagewright.plan.plan import Plan
from stagewright.planning.build import FIRST_DEVICE
from stagewright.planning.planner import Choice
from stagewright.report.live.terminal import open_console, say
from stagewright.run.dry_run import evaluation_of
from stagewright.run.export import export_states, require_target
from stagewright.run.folder import WEIGHTS_FILE
from stagewright.run.prepare import planned
from stagewright.run.resume import resumed_config
from stagewright.run.script import (
    OPTIONS,
    EpochSampler,
    Local,
    OneLineErrors,
    Ranks,
    batch_loader,
    epoch_loader,
    evaluation_loader,
    is_launched,
    launch_script,
    loads_samples,
)
from stagewright.runtime.checkpoint.folder import checkpoints_folder
from stagewright.runtime.job import Evaluation
from stagewright.runtime.process.assemble import ScriptParts, open_data
from stagewright.runtime.process.session import Session, last_begun
from stagewright.runtime.script.feed import Batches
from stagewright.runtime.script.rank import ScriptRank, is_rank
from stagewright.runtime.script.rates import Panel, ScriptRates
from stagewright.runtime.stage.equality import hash_of
from stagewright.runtime.stage.own_optimizer import build_own
from stagewright.runtime.stage.scores import make_scorer
from stagewright.torch_internals import version_of
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
            "optimizer": self._optimizer_name(optimizer),
            "plan": None if is_auto else self._given.file(plan),
        }
        self._options = dict(known_options(options, Engine))
        if is_auto:
            self._options["placement"] = AUTO
        self._batch: int | None = self._options.pop("batch", None)
        for keyword, instead in _OF_THE_LOOP.items():
            section, (name, *_) = next(iter(tables_of({keyword: None}).items()))
            if name in _given_to_run().get(section, {}):
                raise UserError(
                    f"an Engine takes no --{keyword.replace('_', '-')}, since the script has its own loop; {instead}, "
                    "or give an option of the script's own after --"
                )
            if keyword in self._options:
                raise UserError(f"Engine takes no {keyword}=, since the script has its own loop; {instead}")
        self._factory = optimizer if callable(optimizer) else None
        self._rates = self._make_rates(scheduler)
        self._ranks: Ranks | None = None
        self._session: Session | None = None
        self._loop: weakref.ref[Iterator[Step]] | None = None  # the last loop over an epoch; leaving it ends it
        self._feed: Batches | None = None  # of `step`
        self._stepping: Iterator[Any] | None = None
        self._seen: dict[int, Step] = {}
        self._position = 0  # the next batch that the script will see
        self._epochs = 0
        self._evaluations = 0
        self._probes: dict[Any, Evaluation] = {}
        self._taken: dict[str, tuple[Any, ...]] = {}  # what the model was when the engine took it
        self._said: set[str] = set()
        self._is_closed = False
        if is_rank():
            self._join()
        atexit.register(self.close)  # a reference that keeps it: a function's engine lives until the script ends

    # --- What a script reads ------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this process is the one to print and to write; exactly one is."""
        if self._ranks is not None:
            return self._ranks.is_main
        return not self._will_launch(self._config("synthetic", self._batch or 1))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The script's optimizer, to set rates and to make schedulers of; what is set acts from the next batch on."""
        if self._rates is None:
            raise UserError(
                "engine.optimizer needs an optimizer of the script's own; give optimizer=lambda params: "
                "torch.optim.SGD(params, lr=0.1)"
            )
        return self._rates.panel.optimizer

    @property
    def plan(self) -> Plan:
        """The plan, once training has begun."""
        return self._opened().plan

    @property
    def done(self) -> int:
        """Batches trained so far, with those that leaving a loop has trained."""
        return self._session.done if self._session is not None else 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        self._opened()
        assert self._ranks is not None
        return Path(self._ranks.job.folder)

    # --- What a script does -------------------------------------------------------------------------------------------

    def epoch(
        self, data: Data | Iterable[Any], batch: int | None = None, *, collate: Collate | None = None
    ) -> Iterator[Step]:
        """Train on every sample once, in batches of `batch`; yields each step once its updates are made.

        data: a map-style Dataset, a name of a source, or any iterable of batches, such as a DataLoader.
        """
        self._finish_loop()
        where = where_called()
        batches = batches_of(data)
        over = self._over(data, batch, collate, where) if batches is None else self._over_iterable(batches, where)
        self._loop = weakref.ref(over)
        return over

    def step(self, batch: Any) -> Step | None:
        """Train on a batch that the script brings; returns the newest step that all ranks have finished, if any.

        With lag that is an earlier one. `wait()` finishes all.
        """
        where = where_called()
        if self._stepping is None:
            self._finish_loop()
            session = self._begin_batches(batch)
            self._require_same_model()
            self._open_feed(session, where)
        number, self._position = self._position, self._position + 1
        assert self._ranks is not None and self._session is not None and self._feed is not None
        if number < self._ranks.job.start:
            return self._replayed_newest(number)
        self._advance_rates(number)
        self._feed.give(batch)
        self._run_feed()
        return self._newest(number)

    def wait(self) -> Step | None:
        """Finish all batches that `step` was given; returns the last step."""
        if self._stepping is None or self._feed is None:
            return None
        self._feed.end()
        self._run_feed()
        self._stepping = self._feed = None
        last = self._seen.get(self._position - 1)
        self._seen.clear()
        return last

    def evaluate(self, data: Data, metrics: Metrics | None = None, *, collate: Collate | None = None) -> Evaluated:
        """Score every sample once on the newest weights; the same result on every rank.

        In a loop, the batches that are begun are trained first.
        """
        where = where_called()
        self.wait()
        source_name = self._source_name(data, collate)
        session = self._begin(source_name, self._batch)
        self._require_same_model()
        assert self._ranks is not None
        job, source = self._ranks.job, self._open_source(source_name)
        text = "auto" if metrics is None else self._given.metrics(metrics)
        self._ranks.call(f"engine.evaluate of {len(source)} samples", where, source.fingerprint)
        number, self._evaluations = self._evaluations, self._evaluations + 1
        if number < len(self._ranks.history.evaluations):
            return self._ranks.history.evaluations[number]
        key = (source.fingerprint, len(source), text)
        if key not in self._probes:
            self._probes[key] = evaluation_of(job, source, make_scorer(text, job.loss).probe)
        loader = evaluation_loader(session, source)
        evaluated = session.evaluate(self._probes[key], partial(make_scorer, text, job.loss), loader)
        assert evaluated is not None
        return evaluated

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the weights to a safetensors file, by the names of the model's state_dict; the main process does it."""
        where, target = where_called(), Path(path)
        require_target(target)
        self.wait()
        self._opened()
        assert self._ranks is not None
        job = self._ranks.job
        self._ranks.call(f"engine.save to {target}", where)
        if self._position >= job.start:
            self._ranks.save(lambda states: export_states(job.config, states, target))
        return target

    def update_model(self) -> nn.Module:
        """The script's model with the newest weights, in every process; one that is not cut has them at any time."""
        session = self._opened()
        assert self._ranks is not None
        if self._trains_copy(session) and self._position >= self._ranks.job.start:
            file = self.save(self.folder / WEIGHTS_FILE)
            if not file.is_file():
                raise UserError(f"{file}, which the main process has written, is not here; share the folder of runs=")
            self._model.load_state_dict(load_file(file))
            self._taken = self._facts()
        return self._model

    def checkpoint(self) -> Path:
        """Save everything that a resume needs; it is written while training continues."""
        where = where_called()
        self.wait()
        session = self._opened()
        assert self._ranks is not None
        self._ranks.call("engine.checkpoint", where)
        if self._position >= self._ranks.job.start:
            session.save()
        return checkpoints_folder(Path(self._ranks.job.folder)) / str(session.done)

    def close(self) -> None:
        """End the run: wait for what is being written, and write its report; the end of the script does it too."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._ranks is not None and self._session is not None:
            self._finish_loop()
            self._ranks.call("the end of the script", "its last line")
            self._ranks.close()
        elif isinstance(self._ranks, Local):
            self._ranks.abandon(RunFailed("training never began"))
        self._given.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif isinstance(self._ranks, Local):
            self._is_closed = True
            atexit.unregister(self.close)
            self._ranks.abandon(error)

    # --- Loops --------------------------------------------------------------------------------------------------------

    def _over(self, data: Any, batch: int | None, collate: Collate | None, where: str) -> Iterator[Step]:
        """The steps of an epoch of a source."""
        name = self._source_name(data, collate)
        session = self._begin(name, batch or self._batch)
        self._require_same_model()
        assert self._ranks is not None
        job, plan = self._ranks.job, session.plan
        if (wanted := batch or self._batch) is not None and wanted != plan.batch:
            raise UserError(
                f"engine.epoch has batch={wanted} but the run trains batches of {plan.batch}; keep one size"
            )
        source = self._open_source(name)
        order = Order(len(source), plan.batch, job.config.run.seed, job.config.data.shuffle)
        steps = order.batches // plan.pause_step * plan.pause_step
        self._ranks.call(f"engine.epoch of {len(source)} samples", where, source.fingerprint)
        first, epoch = self._position, self._epochs
        self._epochs += 1
        last = first + steps
        yield from self._replay(first, last, epoch)
        if self._position >= last:
            return
        sampler = EpochSampler(order, epoch, first, plan.microbatches)
        session.load_from(epoch_loader(session, source, sampler, last))
        yield from self._train(session, last, None, epoch)

    def _over_iterable(self, data: Iterable[Any], where: str) -> Iterator[Step]:
        """The steps of any iterable of batches."""
        iterator = iter(data)
        first_batch = next(iterator, None)
        if first_batch is None:
            raise UserError("engine.epoch got no batch: the iterable is empty")
        session = self._begin_batches(first_batch)
        self._require_same_model()
        assert self._ranks is not None
        job = self._ranks.job
        if session.plan.pause_step > 1:
            raise UserError(
                f"mode {session.plan.mode} ends its rounds together only every {session.plan.pause_step} batches, and "
                "an iterable may end anywhere; give a map-style dataset"
            )
        if job.config.run.dynamic:
            raise UserError("dynamic=True can't train batches of an iterable; give a map-style dataset")
        self._ranks.call("engine.epoch of an iterable", where)
        self._say_once(
            "batches of an iterable are in its own order: a repeat and a resume are as exact as the script makes that"
        )
        epoch, self._epochs = self._epochs, self._epochs + 1
        batches = chained(first_batch, iterator)
        while self._position < job.start:
            batch = next(batches, None)
            if batch is None or len(OneBatch(batch)) < session.plan.batch:
                return
            yield from self._replay(self._position, self._position + 1, epoch)
        feed = self._new_feed(session, batches, where)
        session.load_from(batch_loader(session, feed))
        yield from self._train(session, MOST_STEPS, feed, epoch)
        if feed.left_out:
            self._say_once(
                f"the last {feed.left_out} samples are no whole batch of {session.plan.batch} and are left out, as in "
                "every epoch"
            )

    def _train(self, session: Session, last: int, feed: Batches | None, epoch: int) -> Iterator[Step]:
        self._advance_rates(session.done)
        training = session.train(last, feed)
        try:
            for done in training:
                if done is None:
                    continue
                step = Step(done.batch, epoch, self._rate(done.batch), done.loss, is_replayed=False)
                self._position = done.batch + 1
                yield step
                self._advance_rates(done.batch + 1)
            self._stop_if_asked(session)
        finally:
            training.close()  # type: ignore[attr-defined]
            self._position = session.done

    def _replay(self, first: int, last: int, epoch: int) -> Iterator[Step]:
        """The steps that were trained before the run was resumed, from the record."""
        assert self._ranks is not None and self._session is not None
        losses, start = self._ranks.history.losses, self._ranks.job.start
        try:
            for batch in range(first, min(last, start)):
                self._advance_rates(batch)
                self._position = batch + 1
                yield Step(batch, epoch, self._rate(batch), partial(losses.__getitem__, batch), is_replayed=True)
                self._advance_rates(batch + 1)
        except GeneratorExit:
            self._position = min(last, last_begun(self._session.plan, self._position - 1))
            raise

    def _open_feed(self, session: Session, where: str) -> None:
        self._feed = self._new_feed(session, None, where)
        session.load_from(batch_loader(session, self._feed))
        self._stepping = session.train(MOST_STEPS, self._feed)

    def _new_feed(self, session: Session, source: Iterable[Any] | None, where: str) -> Batches:
        assert self._ranks is not None
        ranks = self._ranks

        def tell(number: int, fingerprint: str) -> None:
            ranks.call(f"the engine with batch {number}", where, fingerprint)

        return Batches(ranks.job, session.done, source, loads=loads_samples(session), tell=tell)

    def _run_feed(self) -> None:
        assert self._stepping is not None and self._session is not None
        for done in self._stepping:
            if done is None:
                return
            step = Step(done.batch, self._epochs, self._rate(done.batch), done.loss, is_replayed=False)
            self._seen[done.batch] = step
        self._stop_if_asked(self._session)

    def _newest(self, given: int) -> Step | None:
        """The newest step that every rank has finished once batch `given` is begun."""
        assert self._session is not None
        newest = max(
            (batch for batch in self._seen if last_begun(self._session.plan, batch) <= given + 1), default=None
        )
        if newest is None:
            return None
        self._seen = {batch: step for batch, step in self._seen.items() if batch >= newest}
        return self._seen[newest]

    def _replayed_newest(self, given: int) -> Step | None:
        assert self._ranks is not None and self._session is not None
        plan, losses = self._session.plan, self._ranks.history.losses
        newest = next((batch for batch in range(given, -1, -1) if last_begun(plan, batch) <= given + 1), None)
        self._advance_rates(given + 1)
        if newest is None:
            return None
        return Step(newest, self._epochs, self._rate(newest), partial(losses.__getitem__, newest), is_replayed=True)

    def _say_once(self, line: str) -> None:
        """Tell the user something; what a rank writes to standard error is in its log only."""
        if self.is_main and line not in self._said:
            self._said.add(line)
            say(open_console(stderr=not is_rank()), f"stagewright: {line}")

    def _finish_loop(self) -> None:
        """Leave a loop that the script has left, or never finished."""
        self.wait()
        loop = self._loop() if self._loop is not None else None
        self._loop = None
        if loop is not None:
            loop.close()  # type: ignore[attr-defined]

    def _stop_if_asked(self, session: Session) -> None:
        """Where the run was asked to stop, and its checkpoint is saved, the script ends."""
        if session.is_stopped:
            assert self._ranks is not None
            self._is_closed = True
            self._ranks.close()
            raise SystemExit(0)

    # --- Rates --------------------------------------------------------------------------------------------------------

    def _make_rates(self, scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None) -> ScriptRates | None:
        """The script's optimizer as an object to set rates on, with its scheduler."""
        if self._factory is None:
            if scheduler is not None:
                raise UserError("scheduler= needs optimizer= as a function of parameters, whose rates it sets")
            return None
        named = [(name, tensor) for name, tensor in self._model.named_parameters() if tensor.requires_grad]
        if not named:
            raise UserError(f"no parameter of {type(self._model).__name__} is trained: all have requires_grad=False")
        return ScriptRates(Panel(build_own(self._factory, named)), scheduler)

    def _advance_rates(self, batch: int) -> None:
        """What the script has set by now acts from this batch on."""
        if self._rates is not None:
            self._rates.advance(batch, None if self._session is None else self._session.plan)

    def _rate(self, batch: int) -> float:
        if self._rates is not None:
            return self._rates.panel.rate(batch)
        assert self._ranks is not None
        return self._ranks.job.config.optimizer.lr

    # --- How a run begins ---------------------------------------------------------------------------------------------

    def _begin(self, source: str, batch: int | None) -> Session:
        """The session; at first use it is opened, or this process becomes the launcher of the ranks."""
        if self._session is not None:
            return self._session
        if self._is_closed:
            raise UserError("this Engine is closed; make a new one, with resume=RUN to continue its run")
        if self._ranks is None:
            if batch is None:
                raise UserError(
                    "the size of a batch is not known yet; give batch= to Engine or to the first epoch, and a list of "
                    "batches as iter(batches)"
                )
            config = self._config(source, batch)
            given = config if is_launched(config) else planned(config, Voice(self._say_once, self._say_once))
            if self._will_launch(given if isinstance(given, Config) else given.config):
                launch_script(given)
            self._ranks = Local(given)
        if self._rates is not None:
            plan = self._ranks.job.plan
            self._rates.panel.begin(plan.microbatches, last_begun(plan, 0) + 1)
        self._compare_model()
        hyperparameters = None if self._rates is None else self._rates.panel.of
        self._session = self._ranks.open(ScriptParts(hyperparameters, keeps_model=True))
        self._session.begin()
        self._taken = self._facts()
        return self._session

    def _begin_batches(self, batch: Any) -> Session:
        """The session of a script that brings its own batches, of which this is one."""
        if self._session is not None:
            return self._session
        samples = OneBatch(batch)
        return self._begin(self._source_name(samples, None), len(samples))

    def _join(self) -> None:
        """Be the rank that this process was started for; its job names this script's objects."""
        self._ranks = rank = ScriptRank()
        sys.excepthook = OneLineErrors(sys.excepthook, rank.fail)
        config = rank.job.config
        for keyword, name in (
            ("model", config.model.name),
            ("loss", config.loss.name),
            ("optimizer", config.optimizer.name),
        ):
            own = self._names[keyword]
            if own is not None and objects.is_given(name):
                objects.install({name.partition(":")[2]: objects.load_object(own, keyword)})

    def _will_launch(self, config: Config) -> bool:
        if is_rank() or config.run.emulate:
            return False
        return is_launched(config) or config.nodes.list is not None or _num_ranks(config) > 1

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

    def _opened(self) -> Session:
        if self._session is None:
            raise UserError("training has not begun; call engine.epoch, step or evaluate first")
        return self._session

    # --- What the script gives ----------------------------------------------------------------------------------------

    def _optimizer_name(self, optimizer: Any) -> str | None:
        if optimizer is None or isinstance(optimizer, str):
            return optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer is a {type(optimizer).__name__} object, which holds the parameters of the whole model; "
                f"give a function: optimizer=lambda params: torch.optim.{type(optimizer).__name__}(params, ...)"
            )
        return self._given.function(optimizer, "optimizer")

    def _source_name(self, data: Any, collate: Collate | None) -> str:
        return self._given.data(data, collate)

    def _open_source(self, name: str) -> Source:
        assert self._ranks is not None
        return open_data(self._ranks.job.config, name)

    def _facts(self) -> dict[str, tuple[Any, ...]]:
        """What must stay as it is: parameters and their shapes; where a copy is trained, their values too."""
        is_copy = self._session is not None and self._trains_copy(self._session)
        return {
            name: (tuple(p.shape), p.requires_grad, version_of(p) if is_copy else None)
            for name, p in self._model.named_parameters()
        }

    def _compare_model(self) -> None:
        """Tell the supervisor what this process's model holds: stages of models that differ would train together.

        Replicas of a whole model take the first one's weights, and a checkpoint's or a file's replace them all.
        """
        assert self._ranks is not None
        job = self._ranks.job
        if is_rank() and len(job.plan.stages) > 1 and job.resume is None and job.config.model.init is None:
            held = [value for value in self._model.state_dict().values() if isinstance(value, torch.Tensor)]
            self._ranks.call("Engine", self._made_at, str(hash_of(held).tolist()))

    def _trains_copy(self, session: Session) -> bool:
        """Whether what is trained is not the script's model itself."""
        return bool(session.plan.cuts) or len(session.workers) > 1

    def _require_same_model(self) -> None:
        now = self._facts()
        if now == self._taken:
            return
        changed = next(name for name in {**now, **self._taken} if now.get(name) != self._taken.get(name))
        raise UserError(
            f"parameter '{changed}' of the model was changed after the engine took it; change the model before "
            "Engine(...), or make a new one"
        )


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
