"""Resume a run: from which checkpoint, with which options, under which plan, at which batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from stagewright.config.fits import Facts, check_fits
from stagewright.config.sections import Config
from stagewright.config.toml import Tables, config_within_bounds, keys_of, make_config
from stagewright.errors import UserError
from stagewright.model.chain import Chain, Way
from stagewright.model.prove import Differs
from stagewright.objects import shown
from stagewright.plan.plan import Plan
from stagewright.run.folder import find_in_run
from stagewright.runtime.checkpoint.folder import (
    Checkpoint,
    checkpoints_folder,
    find_best,
    list_folders,
    newest_intact,
    open_checkpoint,
)
from stagewright.runtime.checkpoint.format import EMA, FROZEN, MANIFEST, CheckpointError
from stagewright.runtime.job import Job, criterion_of
from stagewright.voice import SILENT, Voice

# Where one of the first is given on resume, the checkpoint's values of the second no longer apply.
_NEW_PLAN = ("placement", "mode", "file")
_OF_OLD_PLAN = ("cut", "shares", "versions", "staleness", "depths", "microbatches", "policy", "file")
BEST = "best"  # of a run: RUN/best


@dataclass(frozen=True, slots=True)
class Resume:
    """A checkpoint to resume from, and the run it belongs to."""

    checkpoint: Checkpoint
    run: Path
    is_newest: bool  # of its run
    remarks: tuple[str, ...] = ()

    def kept_plan(self, config: Config, chain: Chain) -> Plan | None:
        """The plan that the checkpoint was made with; None where the options now describe another."""
        before, plan = make_config(self.checkpoint.manifest.config, given=()), self.checkpoint.manifest.plan
        if config.plan != before.plan or config.optimizer.clip != before.optimizer.clip:
            return None
        if chain.way is not Way.WHOLE:  # else the model can't be cut at all, which is said where it is
            self.require_cuts(plan, chain.units)
        return plan

    def require_cuts(self, plan: Plan, units: Collection[str]) -> None:
        """A difference where the plan cuts before a unit that the model does not have, cut in this way."""
        unknown = [cut for cut in plan.cuts if cut not in units]
        if unknown:
            raise Differs(
                f"checkpoint {self.checkpoint.folder} cuts its model before '{unknown[0]}', which this model does not "
                f"have; {self._made_with}"
            )

    @property
    def _made_with(self) -> str:
        return f"it was made with model {shown(self.checkpoint.manifest.config['model']['name'])}"

    def apply(self, job: Job, facts: Facts, model: nn.Module, voice: Voice = SILENT) -> Job:
        """The job as it continues from the checkpoint: its plan from the batch where that stands.

        An error where the checkpoint does not fit the job's data, plan or model. Where the plan is a new one that
        computes what the checkpoint's does, it keeps the origins of its versions.
        """
        manifest, made = self.checkpoint.manifest, job.plan
        start = manifest.position.in_batches_of(job.order, manifest.plan.batch).resume(job.order, job.fingerprint)
        best = manifest.best_by(job.criterion)
        check_fits(replace(facts, start=start, since=best.since if best else 0, stall=best.stall() if best else ""))
        plan = made.starting_at(start)
        if len(made.stages) == len(manifest.plan.stages):
            pairs = zip(made.stages, manifest.plan.stages, strict=True)
            same = replace(made, stages=tuple(replace(stage, origin=old.origin) for stage, old in pairs))
            plan = same if same.computes_as(manifest.plan) else plan
        self._require_model(model, job.training.reached)
        for remark in (*self.remarks, *self._remarks(job.config, plan)):
            voice.warn(remark)
        return replace(job, plan=plan, start=start, resume=str(self.checkpoint.folder))

    def _require_model(self, model: nn.Module, reached: Collection[str]) -> None:
        """An error where the checkpoint lacks a parameter that is trained, or has it in another shape."""
        folder, shapes = self.checkpoint.folder, self.checkpoint.shapes()
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in reached:
                names.setdefault(id(parameter), []).append(name)
        for tied in names.values():
            held = next((name for name in tied if name in shapes), None)
            if held is None and self.checkpoint.read(FROZEN, tied):
                raise UserError(
                    f"checkpoint {folder} has parameter '{tied[0]}' frozen, and now it would be trained; resume "
                    "with the --freeze of that run, or start from an export of it by --init"
                )
            if held is None:
                raise UserError(f"checkpoint {folder} has no parameter '{tied[0]}'; {self._made_with}")
            if shapes[held] != (wanted := list(model.get_parameter(held).shape)):
                raise UserError(
                    f"checkpoint {folder} has parameter '{held}' of shape {shapes[held]}, the model {wanted}; "
                    f"{self._made_with}"
                )

    def _remarks(self, config: Config, plan: Plan) -> Iterator[str]:
        """What a user should know about resuming with these options."""
        manifest, criterion = self.checkpoint.manifest, criterion_of(config)
        name, before = config.optimizer.name, make_config(manifest.config, given=()).optimizer.name
        if not plan.computes_as(manifest.plan):
            lag = "" if plan.is_synchronous else ", and lag builds up again"
            yield f"the plan has changed: the run resumes from the newest weights{lag}"
        if before != name:
            yield f"the checkpoint has the state of {before}; {name} starts without any"
        if config.optimizer.ema is not None and not self.checkpoint.has(EMA):
            yield f"the checkpoint has no averaged weights; --ema {config.optimizer.ema:g} starts from its weights"
        if criterion is not None and (manifest.best is None or manifest.best.criterion != criterion):
            yield f"the checkpoint knows no best {criterion.metric}: evaluations are compared from here on"


def named_folder(text: str) -> Path:
    """The folder that a path or a run's name means: a run, one of its checkpoints, or RUN/best, the best of these."""
    folder = find_in_run(text).absolute()
    is_best = folder.name == BEST and not folder.exists() and checkpoints_folder(folder.parent).is_dir()
    return find_best(folder.parent) if is_best else folder


def resumed_run(text: str) -> Path:
    """The run folder of what `--resume` names: a run, or one of its checkpoints."""
    folder = named_folder(text)
    return folder.parent.parent if (folder / MANIFEST).is_file() else folder


def find_checkpoint(text: str) -> Resume:
    """The checkpoint that `--resume` names, or the newest intact one of the run that it names."""
    folder = named_folder(text)
    if (folder / MANIFEST).is_file():
        checkpoint = open_checkpoint(folder)
        checkpoint.verify()
        run = folder.parent.parent
        return Resume(checkpoint, run, folder in list_folders(run)[-1:])
    if not folder.is_dir():
        raise UserError(f"{text}: no such folder; name a run folder, or one of its checkpoints")
    newest, reasons = newest_intact(folder)
    if newest is None:
        why = f" ({reasons[0]})" if reasons else ""
        raise UserError(f"{text}: the run has no intact checkpoint{why}; train it from the start")
    return Resume(newest, folder, True, tuple(f"{reason}; not used" for reason in reasons))


def resumed_config(*layers: Tables, given: Collection[str] | None = None) -> Config:
    """The configuration of the layers; where they name a run to resume, on top of that run's options."""
    new = keys_of(*layers)
    named = config_within_bounds(*layers).run.resume  # reports wrong options before it reads any checkpoint
    if not named:
        return make_config(*layers, given=new if given is None else given)
    run = str(find_in_run(named))  # once: another run may be the last a moment later
    before = _without_replaced(_options_of(run), new)
    return make_config(before, *layers, {"run": {"resume": run}}, given=new if given is None else given)


def _options_of(text: str) -> Tables:
    """The options that a run last had, by the newest manifest that can be read; `prepare` verifies the files, once."""
    folder = named_folder(text)
    for checkpoint in [folder] if (folder / MANIFEST).is_file() else reversed(list_folders(folder)):
        with suppress(CheckpointError):
            return open_checkpoint(checkpoint).manifest.config
    return find_checkpoint(text).checkpoint.manifest.config  # raises what is wrong


def _without_replaced(before: Tables, new: Collection[str]) -> Tables:
    """The options of the resumed run, without those that a new plan replaces; its machines never apply."""
    tables = {section: dict(values) for section, values in before.items() if section != "nodes"}
    if any(f"plan.{name}" in new for name in _NEW_PLAN):
        for name in _OF_OLD_PLAN:
            tables.get("plan", {}).pop(name, None)
    if "plan.file" in new:
        tables["plan"] = {}
    return tables
