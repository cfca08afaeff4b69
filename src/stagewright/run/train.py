"""Train: prepare a configuration, run its ranks, and write the files of the run.

`run` is what `stagewright train` and `stagewright.train` call. The machine with index 0 is the
host: it collects the events of all ranks and writes metrics, weights and the report; the others only run their ranks.
So it is with the processes that torchrun or srun has started, one per rank; of these only rank 0 prepares the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module

from stagewright.config.sections import Config
from stagewright.config.toml import as_tables
from stagewright.errors import Interrupted, RunFailed, UserError, first_line, printable
from stagewright.events import Best, Evaluated, Step
from stagewright.metrics import IMAGES, ThroughputUnit, format_rate, metric_words
from stagewright.plan.estimate import Estimate
from stagewright.plan.plan import Plan
from stagewright.planning.run_setting import memory_setting
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import RunConsole, voice_of
from stagewright.report.read import evaluated_on
from stagewright.report.run import run_page
from stagewright.run.export import export_checkpoint, export_states, require_target
from stagewright.run.folder import PLAN_FILE, WEIGHTS_FILE, failure_recorded, run_lock
from stagewright.run.observe.monitor import Callback, Callbacks, check_monitor_rate, fan_out, monitored, usage_totals
from stagewright.run.observe.trackers import require_tracker, tracked
from stagewright.run.opening import Launch, Opening
from stagewright.run.prepare import Prepared, headline, memory_advice, predict_job, prepare, write_start
from stagewright.run.report import open_run, write_page
from stagewright.run.resume import resumed_run
from stagewright.runtime.checkpoint.folder import best_folder, list_folders, newest_intact
from stagewright.runtime.faults import traceback_in_log
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.nodes import Site, find_site
from stagewright.runtime.process.children import SpareRanks
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.external import ExternalGroup, find_rank
from stagewright.runtime.process.launch import launch
from stagewright.runtime.process.log import Ledger
from stagewright.runtime.process.object_pipe import given_names
from stagewright.runtime.process.rank import state_file
from stagewright.runtime.process.signals import stop_on_signal
from stagewright.runtime.process.torch_flags import preserved_state
from stagewright.voice import Voice

_DIVERGED = 1e3  # times the first loss, and at least that loss: no run recovers from it
_LAST_LOSSES = 5  # all of which are that large: a single bad batch is none


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run: its folder, and the steps, evaluations and summary that its files hold."""

    folder: Path
    plan: Plan
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluated, ...]
    summary: dict[str, Any]
    exported: Path | None

    @property
    def unit(self) -> ThroughputUnit:
        """What its throughput counts; `images_per_second` of its steps and summary are samples."""
        return ThroughputUnit(self.summary.get("unit", IMAGES.name), self.summary.get("per_sample", 1))

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by the parameter names of the whole model.

        A model that was given by name needs `export`; one that was given as an object leaves them in the run folder.
        """
        if self.exported is None:
            raise UserError("the run exported no weights; train with export='FILE.safetensors'")
        try:
            return load_file(self.exported)
        except (OSError, SafetensorError) as error:
            raise UserError(f"the weights of the run can't be read from {self.exported}: {error}") from error

    def load_into(self, model: Module) -> Module:
        """Load the trained weights into a model, which is returned; it stays on its device and in its types."""
        try:
            model.load_state_dict(self.weights())
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            raise UserError(
                f"the weights of {self.exported} are of another model than this {type(model).__name__}: "
                f"{lines[0] if lines else first_line(error, 200)}"
            ) from error
        return model

    def __repr__(self) -> str:
        return f"Result({', '.join(f'{name} {value}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        """A small table, as notebooks show it."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """What a person wants to know first."""
        if "model" in self.summary:
            yield "model", printable(self.summary["model"].rpartition(":")[2])
        yield "plan", f"{self.plan.mode} {self.plan.shape}"
        if self.steps:
            yield "steps", str(len(self.steps))
            yield "loss", f"{self.steps[-1].loss:.4g}"
        if self.evaluations:
            last = self.evaluations[-1]
            yield "evaluated", " ".join((f"loss {last.loss:.4g}", *metric_words(last.metrics, 2)))
            if best := self.summary.get("best"):
                words = metric_words({best["metric"]: best["value"]}, 2) or [f"{best['metric']} {best['value']:.4g}"]
                yield "best", f"{words[0]} after step {best['batch']}"
        if rate := self.summary.get("images_per_second"):
            yield "speed", f"{format_rate(self.unit.of(rate))} {self.unit.rate}"
        yield "folder", printable(str(self.folder))


@dataclass(frozen=True)
class _Asked:
    """How a run was asked for, beside its configuration."""

    console: Console
    callbacks: Callbacks
    script: Sequence[str] | None
    keeps_weights: bool
    progress: ProgressLine | None
    spare: SpareRanks | None

    @property
    def voice(self) -> Voice:
        return voice_of(self.console, self.progress)


def run(
    given: Config | Opening,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
    script: Sequence[str] | None = None,
    *,
    keeps_weights: bool = False,
    progress: ProgressLine | None = None,
    spare: SpareRanks | None = None,
) -> Result:
    """Train a configuration; the console shows its progress, and its folder holds the rest.

    `progress` is told what is done before the first step.

    `spare`: processes that were started to become its ranks.

    `script`: the command of a script that drives every rank by a loop of its own. `keeps_weights`: without --export the
    folder holds the trained weights as well.

    The host calls the callbacks with every record. Where one returns True the run stops after a checkpoint, and its
    result is that of the steps so far; what one raises is raised after the same.
    """
    config = given.config if isinstance(given, Opening) else given
    asked = _Asked(console or Console(quiet=True), Callbacks(callbacks), script, keeps_weights, progress, spare)
    check_monitor_rate(config)
    require_tracker(config)
    if config.run.export:
        require_target(Path(config.run.export))
    site, place = find_site(config.nodes), find_rank(config)
    if place is None:
        return _run(given, asked, site, None)
    with ExternalGroup(place, config.nodes.join_timeout) as group:
        if place.rank:
            return _run_other_rank(group, script)
        return _run(given, replace(asked, spare=None), None, group)


def _run(given: Config | Opening, asked: _Asked, site: Site | None, group: ExternalGroup | None) -> Result:
    """Prepare and run this machine's part of a configuration, or rank 0's."""
    voice, other = asked.voice, None if site is None or site.is_host else site
    launch = Launch(
        None if group is None else group.place.world, other is None, asked.script is not None, asked.keeps_weights
    )
    with begun((group and group.restarted_job()) or given, voice, launch) as made:
        job = made.job
        for line in headline(job):
            voice.note(line)
        if other is not None:
            return _run_other_machine(job, other, asked)
        if group is not None:
            group.publish(job)
        if made.prediction is not None and made.interval is None:  # else the line about the layout has said it
            unit = job.throughput_unit
            voice.note(f"predicted: {format_rate(unit.of(made.prediction.images_per_second))} {unit.rate}")
        with hosted(made, voice, asked.console, asked.callbacks, asked.progress) as host:
            host.exported = _execute(made, host, site or group, asked)
        assert host.result is not None
        return host.result


@contextmanager
def begun(given: Config | Opening | Job, voice: Voice, launch: Launch) -> Iterator[Prepared]:
    """A run that is prepared, or was before a restart, in a folder that no other process trains in meanwhile.

    The folder has the warnings so far, and at the end what went wrong. One that is resumed is locked before it is read:
    a run in training deletes its checkpoints.
    """
    warnings: list[str] = []

    def warn(warning: str) -> None:
        warnings.append(warning)
        voice.warn(warning)

    text = given.run.resume if isinstance(given, Config) and launch.is_host else None
    resumed = resumed_run(text) if text else None
    with ExitStack() as held:
        if resumed is not None:
            held.enter_context(run_lock(resumed))
        if isinstance(given, Job):
            prepared = Prepared(given, predict_job(given.config, given.plan))
        else:
            prepared = prepare(given, replace(voice, warn=warn), launch)
        del given  # with the model, where it was open
        folder = Path(prepared.job.folder)
        if folder != resumed:
            held.close()
            held.enter_context(run_lock(folder))
        held.enter_context(failure_recorded(folder))
        held.enter_context(traceback_in_log(folder))
        write_start(prepared.job, warnings)
        yield prepared


@dataclass
class Host:
    """A run while its ranks train."""

    ledger: Ledger
    voice: Voice
    exported: Path | None = None  # the weights, once they are written
    result: Result | None = None  # once the run is over


@contextmanager
def hosted(
    made: Prepared,
    voice: Voice,
    console: Console,
    callbacks: Callbacks | None = None,
    progress: ProgressLine | None = None,
) -> Iterator[Host]:
    """Within, the events of a job's ranks are collected; then its trace, summary and report are written."""
    job, callbacks, began = made.job, callbacks or Callbacks(), time.monotonic()
    folder = Path(job.folder)
    steps, unit, every = None if job.is_scripted else job.batches, job.throughput_unit, job.config.run.log_every
    data, world = evaluated_on(as_tables(job.config)), job.plan.world
    try:
        with (
            RunConsole(console, steps, job.plan.batch, every, data, unit, progress, world) as shown,
            tracked(job.config, folder, shown.voice, unit) as track,
            Ledger(job, fan_out(track, shown.show, callbacks), shown.voice, lambda: callbacks.is_stopping) as ledger,
            monitored(job, track, shown.voice) as monitor,
            _advised(job, ledger),
        ):
            host = Host(ledger, shown.voice)
            yield host
        if ledger.stopped_at is not None:
            host.exported = _stopped(job, ledger.stopped_at, callbacks)
        if callbacks.error is not None:
            raise callbacks.error
        if not (folder / PLAN_FILE).exists():
            folder.mkdir(0o700, parents=True, exist_ok=True)
            write_start(job, [f"{folder} was deleted while the run trained; what was in it is lost"])
        took = {"seconds": time.monotonic() - began, "use": usage_totals(monitor)}
        (folder / "trace.json").write_text(json.dumps(ledger.timeline.chrome_trace()))
        summary = _summary(made, ledger, host.exported) | took
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
        own = tuple(ledger.steps.done), tuple(ledger.scores.done)
        host.result = Result(folder, job.plan, *own, summary, host.exported)
    finally:
        _write_report(job, voice)


@contextmanager
def _advised(job: Job, ledger: Ledger) -> Iterator[None]:
    """Add to the error of a run what would help, and how to resume it."""
    try:
        yield
    except (Interrupted, RunFailed) as error:
        ledger.drain()  # a checkpoint that is whole by now can be resumed from
        if isinstance(error, Interrupted):
            raise Interrupted(error.when, _how_to_resume(job)) from None
        words = [str(error)]
        if (short := ledger.shortage) is not None:
            words.append(memory_advice(job.config, job.plan, short.rank, short.room, job.training.form))
        raise RunFailed("; ".join(filter(None, (*words, _how_to_resume(job))))) from error


def _stopped(job: Job, batch: int, callbacks: Callbacks) -> Path | None:
    """The exported weights of a run that a callback has stopped, if it left a checkpoint; else it was interrupted."""
    how = _how_to_resume(job, batch)
    if not callbacks.is_stopping:
        raise Interrupted(f"after step {batch}", how)
    if callbacks.error is not None:
        callbacks.error.add_note(f"raised by a callback; the run stopped after step {batch}; {how}")
    newest, _ = newest_intact(Path(job.folder))
    if job.export is None or newest is None or newest.batch != batch:
        return None
    return export_checkpoint(newest, Path(job.export))


def _summary(made: Prepared, ledger: Ledger, exported: Path | None) -> dict[str, Any]:
    """What a run came to, as summary.json has it; speeds are in samples, whatever the unit."""
    job, speed, last = made.job, ledger.steps.speed(), steps[-1] if (steps := ledger.steps.done) else None
    return {
        "folder": job.folder,
        "machine": 0,
        "model": job.config.model.name,
        "plan": job.plan.describe(),
        "batches": len(steps),
        "images_per_second": speed and speed.rate,
        "steady_steps": speed.steps if speed else 0,  # that the speed counts
        "predicted_images_per_second": made.prediction and made.prediction.images_per_second,
        "unit": job.unit,
        "per_sample": job.per_sample,
        "loss": last and last.loss,
        "diverged": _divergence(steps, job.config.optimizer.lr),
        "loss_scale": last and last.loss_scale,
        "skipped_updates": ledger.skipped,  # by stage
        "bad_records": len(ledger.replaced),
        "best": _best(Path(job.folder), ledger.scores.best),
        "stopped_early": ledger.stopped_early,
        "evaluations": [asdict(evaluated) for evaluated in ledger.scores.done],
        "evaluated_on": evaluated_on(as_tables(job.config)) if ledger.scores.done else None,
        "exported": exported and str(exported),
    }


def _best(folder: Path, best: Best | None) -> dict[str, Any] | None:
    """The best evaluation as the summary has it, and the checkpoint of its weights if there is one."""
    if best is None or best.value is None:
        return None
    kept = best_folder(list_folders(folder))
    is_kept = kept is not None and int(kept.name) == best.batch
    found = {"metric": best.criterion.metric, "value": best.value, "batch": best.batch}
    return found | {"checkpoint": str(kept) if is_kept else None}


def _divergence(steps: Sequence[Step], lr: float) -> str | None:
    """One line about a run whose last losses are finite but far above its first one; None for any other."""
    last = min((step.loss for step in steps[1:][-_LAST_LOSSES:]), default=0.0)
    if last <= _DIVERGED * max(1.0, steps[0].loss if steps else 0.0):
        return None
    grew = f"the loss grew from {steps[0].loss:.4g} to {steps[-1].loss:.4g}"
    return f"{grew}, so the run diverged; try a lower --lr than {lr:g}, a --warmup or --clip 1"


def _how_to_resume(job: Job, done: int = 0) -> str:
    """The last part of an error about a run that stopped: which steps are lost, and how to resume."""
    kept = max((int(path.name) for path in list_folders(Path(job.folder))), default=0)
    lost = f"steps after {kept} could not be saved; " if kept < done else ""
    if not kept:
        return lost.rstrip("; ")
    if given_names(job.config):  # which the script alone has
        return f"{lost}resume with resume='{job.folder}' in the same script"
    return f"{lost}resume with stagewright train --resume {job.folder}"


def _run_other_machine(job: Job, site: Site, asked: _Asked) -> Result:
    """Run the ranks of a machine that is not the host; the host collects their events."""
    with monitored(job, lambda use: None, asked.voice, site.index) as monitor:
        is_stopping = launch(job, None, site, asked.voice, asked.script, asked.spare)
    if is_stopping:
        raise Interrupted("with the other machines")
    return _silent_result(job, machine=site.index, use=usage_totals(monitor))


def _run_other_rank(group: ExternalGroup, script: Sequence[str] | None) -> Result:
    """Run a rank that torchrun or srun has started; rank 0 collects its events and reports what goes wrong."""
    job = group.receive()
    try:
        if job is None or launch(job, None, group, script=script):
            sys.exit(1)  # rank 0 failed, or all ranks were asked to stop
    except (RunFailed, Interrupted):
        sys.exit(1)
    return _silent_result(job, rank=group.place.rank)


def _silent_result(job: Job, **where: Any) -> Result:
    """The result of a process that is not the host: it has seen no events."""
    summary = {"folder": job.folder, "plan": job.plan.describe(), **where}
    return Result(Path(job.folder), job.plan, (), (), summary, None)


def _execute(made: Prepared, host: Host, site: Site | ExternalGroup | None, asked: _Asked) -> Path | None:
    """Run the ranks of this machine; return the file of exported weights, if the options ask for one."""
    job, ledger = made.job, host.ledger
    if job.config.run.emulate:
        with preserved_state([0] if job.config.run.device == "cuda" else []):
            torch.set_num_threads(job.config.run.threads or 1)
            emulation = Emulation(job, ledger.handle, ledger.settled, ledger.wants_stop, chain=made.take_chain())
            with stop_on_signal(emulation.pauses.stop):
                emulation.run()
            return None if emulation.is_stopped else _export(job, list(emulation.states().values()))
    launch(job, ledger, site, host.voice, asked.script, asked.spare)
    if not job.export or ledger.stopped_at is not None:
        return None
    files = [state_file(Path(job.folder), stage.index) for stage in job.plan.stages]
    exported = _export(job, [load_file(file) for file in files])
    for file in files:
        file.unlink()
    return exported


def _export(job: Job, states: Sequence[dict[str, Tensor]]) -> Path | None:
    """Write the weights to the job's file; where that fails after all, to the run folder, and say so."""
    if job.export is None:
        return None
    path = Path(job.export)
    try:
        return export_states(job.config, states, path)
    except UserError as error:
        kept = export_states(job.config, states, Path(job.folder) / WEIGHTS_FILE)
        raise UserError(f"{error} (they are in {kept})") from error


def _write_report(job: Job, voice: Voice) -> None:
    """Write the report of a run, however it ended; what goes wrong here is a warning, never the failure of the run."""
    folder = Path(job.folder)
    try:
        _write_memory(job)
        run = open_run(folder)
        if run.summary is not None or run.steps:
            write_page(run_page(run), folder / "report.html")
    except Exception as error:
        voice.warn(f"no report: {first_line(error, 200)}; make it later with stagewright report {folder}")


def _write_memory(job: Job) -> None:
    """Write the memory that the planner's model predicts per rank; a model outside the zoo would have to be built."""
    if ":" in job.config.model.name:
        return
    with suppress(UserError):  # its shapes can't be traced
        estimate = Estimate(job.plan, memory_setting(job.config, job.plan, job.training.form))
        parts = {"ranks": list(map(asdict, estimate.memories))}
        (Path(job.folder) / "memory.json").write_text(json.dumps(parts))
