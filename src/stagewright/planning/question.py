"""Questions to the planner: what would train, and where; and what is answered without a device, for a cluster.

`stagewright plan`, `value` and `simulate`, the functions of the API and `--placement auto` ask a `Question`. It becomes
`Asked`, with all that the options leave out filled in: here where a cluster or a profile says where, in `run/plan`
where that is this machine. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stagewright.cluster.catalog import open_cluster, shipped
from stagewright.cluster.specs import Catalog, calibration_note
from stagewright.config.commands import OURS, config_of
from stagewright.config.sections import AUTO, Config, PlanConfig, RunConfig, words_of
from stagewright.errors import UserError
from stagewright.plan.estimate import Setting
from stagewright.plan.make import require_divisible
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.build import resolved_options
from stagewright.planning.known import Traced, known_model
from stagewright.planning.planner import Choice, choose
from stagewright.planning.setting import setting_of
from stagewright.profile.profile import Profile, read_profile
from stagewright.voice import SILENT, Voice

if TYPE_CHECKING:
    from stagewright.model.call import Form  # imports torch

USUAL_SAMPLES = 32  # of a batch, a device
_TRAINED = (  # options that the command which trains a plan may need, in their order there
    *("--image", "--classes", "--freeze", "--optimizer", "--ema", "--device", "--precision", "--plan", "--mode"),
    *("--placement", "--batch", "--microbatches", "--cut", "--depths", "--versions", "--threads"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A run, as far as it is given, and where it would train."""

    config: Config
    cluster: str | None = None  # a name or a file; None: where the profile was made, or this machine
    devices: int | None = None  # only its first
    software: str = OURS
    loads: bool = False  # training data is loaded and decoded, not synthetic
    modes: tuple[Mode, ...] = (Mode.STALE, Mode.SYNC)  # to search, beside dp
    rate: float | None = None  # whose stability is asked for
    output: str | None = None  # the plan file to write
    form: Form | None = None  # what the model takes, where that is neither the zoo's input nor an image

    @staticmethod
    def of(command: str, values: Mapping[str, Any], form: Form | None = None) -> Question:
        """That of the options of `plan`, `simulate` or `value`; of several clusters, the first."""
        config, clusters = config_of(command, values), values["cluster"]
        if config.plan.microbatches is not None and config.plan.batch is not None:
            require_divisible(config.plan.batch, config.plan.microbatches)
        return Question(
            config,
            clusters[0] if isinstance(clusters, list) else clusters,
            values["devices"],
            values["software"],
            values["data"] != "synthetic",
            tuple(map(Mode, values.get("modes") or (Mode.STALE, Mode.SYNC))),
            values.get("lr"),
            values.get("output"),
            form,
        )

    @property
    def model(self) -> str:
        return self.config.model.name

    @property
    def has_place(self) -> bool:
        """Whether a cluster or a profile says where; else it is this machine."""
        return self.cluster is not None or self.config.plan.profile is not None

    @property
    def known(self) -> Traced | None:
        """The model, where it need not be traced."""
        if self.form is not None or self.config.model.freeze is not None:
            return None
        return known_model(self.model, self.config.model.classes, self.config.data.image)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with everything that it leaves open filled in."""

    question: Question
    setting: Setting
    catalog: Catalog
    batch: int
    device: str  # to train on
    is_measured: bool  # by a profile of the machine itself
    profile: str | None  # file
    rate: str  # what speed counts: images/s or samples/s
    note: str = ""  # how what was left out was filled in
    threads: int = 1  # of each rank on a CPU

    @property
    def calibration(self) -> str | None:
        """A line that names the devices whose speed is calibrated by no measurement or one; None with a profile."""
        if self.question.config.plan.profile is not None or self.is_measured:
            return None
        kinds = [self.setting.devices(machine.kind) for machine in self.setting.cluster.machines]
        return calibration_note(kinds, self.setting.precision)

    @property
    def is_for_train(self) -> bool:
        """Whether `train` would choose from its plans: on GPUs of one machine; on CPUs it tries more."""
        is_one = len(self.setting.cluster.machines) == 1
        return Mode.SYNC in self.question.modes and self.device == "cuda" and is_one

    def train_words(self, plan: Plan | str) -> list[str]:
        """The options of `train` that ask for a plan, or for that of a file."""
        config = self.question.config
        own = PlanConfig(file=plan) if isinstance(plan, str) else resolved_options(PlanConfig(), plan)
        words = run_words(replace(config, plan=own), self.device, self.setting.precision, self.threads)
        return ["--model", config.model.name, *words]


def run_words(config: Config, device: str, precision: str, threads: int) -> list[str]:
    """The options of `train` for a configuration on a device, without its model's name."""
    own = threads if device == "cpu" and threads > 1 else None
    run = RunConfig(device="cpu" if device == "cpu" else "cuda", precision=precision, threads=own)
    return words_of(replace(config, run=run), _TRAINED)


def ask(question: Question, model: Traced) -> Asked:
    """The setting and the batch to search plans for, of a cluster or of a profile."""
    plan = question.config.plan
    catalog, cluster = open_cluster(question.cluster) if question.cluster is not None else (shipped(), None)
    if cluster is not None and question.devices is not None:
        cluster = cluster.first(question.devices)
    profile = None if plan.profile is None else read_profile(plan.profile)
    if cluster is None and profile is None:
        raise UserError(f"no cluster: give --cluster NAME ({', '.join(sorted(shipped().clusters))}) or --profile FILE")
    own: Traced | None = model
    precision = "fp32"
    if profile is not None:
        precisions = dict.fromkeys(table.precision for table in profile.tables)
        precision = precision if precision in precisions else next(iter(precisions))
        own = None if profile.is_imported else model
        _require_fit(question, profile, [shape.name for shape in model.shapes])
    config = question.config
    if config.run.precision == AUTO:
        config = replace(config, run=replace(config.run, precision=precision))
    setting = setting_of(
        config, own, cluster, profile, catalog=catalog, software=question.software, loads=question.loads
    )
    return Asked(
        question,
        setting,
        catalog,
        plan.batch or _suitable_batch(setting),
        "cpu" if {machine.kind for machine in setting.cluster.machines} == {"cpu"} else "cuda",
        question.cluster is None,
        plan.profile,
        model.rate,
    )


def _suitable_batch(setting: Setting) -> int:
    """Thirty-two samples a device, or as many as a profile covers."""
    most = USUAL_SAMPLES if setting.covered is None else min(USUAL_SAMPLES, setting.covered[1])
    return most * len(setting.cluster.devices)


def _require_fit(question: Question, profile: Profile, units: Sequence[str]) -> None:
    """Raise for a profile of another model, and for options with units where an imported one has names of its own."""
    model, plan = question.model, question.config.plan
    if not profile.is_imported:
        profile.require(model, units)
        return
    if profile.model != model:
        raise UserError(
            f"the profile was imported as {profile.model} but the model is {model}; "
            f"import one with stagewright profile {model} --pipedream FILE"
        )
    given = {"shares": plan.shares, "cut": plan.cut, "plan": plan.file, "output": question.output}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"--{name} {value} needs the units of {model} but the imported profile has PipeDream's nodes; leave "
                "it out"
            )


def search(asked: Asked, voice: Voice = SILENT, modes: Sequence[Mode] | None = None) -> Choice:
    """The best plans in the setting that is asked about; `modes` beside dp, instead of those of the question.

    Of the question's modes the best plan without lag is among them where `train` would choose it.
    """
    plan = asked.question.config.plan
    return choose(
        asked.setting,
        asked.batch,
        modes=asked.question.modes if modes is None else modes,
        microbatches=plan.microbatches,
        staleness=plan.staleness,
        synchronous=modes is None and asked.is_for_train,
        voice=voice,
    )
