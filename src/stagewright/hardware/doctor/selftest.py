"""`stagewright selftest`: whether this machine's devices compute and reach each other as they should, and how fast.

Checks, in this order: that torch has code for the GPUs; links (messages and sums between ranks arrive as they were
sent, and how fast); parity (small models, trained by real ranks under each kind of plan, beside one process of plain
PyTorch); rates (one device, data parallel and the plan that is best here, beside what is predicted for them); and a row
of what was measured, to send. Each is passed, failed or not checked, with one line; none begins when the time is over.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stagewright.config.toml import FIXED, make_config
from stagewright.errors import UserError, counted, first_line
from stagewright.hardware.doctor.plain import CLASSES, MOMENTUM, RATE, SEED, Task, Trained, train_plain
from stagewright.hardware.environment import read_environment
from stagewright.hardware.rows import Row, append_rows, hardware_of, software_of
from stagewright.hardware.topology import LinkKind, Topology
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Mode
from stagewright.planning.planner import choose
from stagewright.planning.predict import predict
from stagewright.planning.setting import make_setting
from stagewright.planning.traced import trace_model
from stagewright.run.profile import Here, Subject, profile_here
from stagewright.run.train import Result, run
from stagewright.runtime.process.link_test import measure_links

Progress = Callable[[str], None]
# The largest differences from plain PyTorch that are none. In single precision rounding makes 1e-6, or 2e-3 where it
# takes an activation across the kink of a ReLU; a wrong lag or a missing rank makes more than 0.1.
_BARS = {"cpu": 1e-9, "cuda": 2e-2}
_MODES = (Mode.DP, Mode.SYNC, Mode.STALE)
_RATE_SECONDS = 5.0
_HUNG_SECONDS = 60.0  # at one action, and twice that at a start: no step here takes a second


class CheckState(StrEnum):
    """How a check ended."""

    PASSED = "pass"
    FAILED = "fail"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found, in one line and in figures (bytes, seconds, images)."""

    state: CheckState
    line: str
    figures: Mapping[str, float] = field(default_factory=dict)


_ALONE = CheckResult(CheckState.NOT_CHECKED, "1 GPU runs 1 rank; --share-gpu puts two on it")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    part: str
    name: str
    found: CheckResult


@dataclass(frozen=True, slots=True)
class UnderTest:
    """What is tested: the kind of devices, how many ranks, and whether they share one GPU."""

    device: str
    ranks: int
    shares: bool = False

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" and not self.shares else "gloo"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a run that say where it runs."""
        limits = {"timeout": _HUNG_SECONDS, "start_timeout": 2 * _HUNG_SECONDS}
        return {"device": self.device, "share_gpu": self.shares, "monitor_every": 0.0, **limits}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is trained."""

    model: str  # whose rates are measured
    precision: str
    batches: tuple[int, int] = (40, 400)  # the least and the most of a rate, which takes 5 s between them
    networks: tuple[str, ...] = ("resnet8", "bert-mini")  # that parity trains
    steps: int = 3


def find_machine(*, share_gpu: bool) -> UnderTest:
    """This machine: all of its GPUs, two ranks on its only one, or two CPU ranks."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if share_gpu and gpus != 1:
        raise UserError(f"--share-gpu is for a machine with 1 GPU, this one has {gpus}; leave it out")
    return UnderTest("cuda", 2 if share_gpu else gpus, share_gpu) if gpus else UnderTest("cpu", 2)


def usual_effort(machine: UnderTest) -> Effort:
    if machine.device == "cpu":
        return Effort("vgg-small", "fp32")
    return Effort("resnet50", "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16")


def run_checks(machine: UnderTest, effort: Effort, minutes: float, row: str, progress: Progress) -> Iterator[Check]:
    """Every check, as soon as it is done; the row goes to the end of a file."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stagewright-selftest-") as folder:
        for part, name, work in _checks(machine, effort, row, Path(folder), progress):
            if time.monotonic() - began > 60 * minutes:
                yield Check(
                    part, name, CheckResult(CheckState.NOT_CHECKED, f"{minutes:g} min were over; give --minutes N")
                )
                continue
            progress(f"{part}: {name}")
            try:
                yield Check(part, name, work())
            except (UserError, RuntimeError, OSError) as error:  # of ours, of torch, of the disk
                yield Check(part, name, CheckResult(CheckState.FAILED, first_line(error)))


def _checks(
    machine: UnderTest, effort: Effort, row: str, folder: Path, progress: Progress
) -> Iterator[tuple[str, str, Callable[[], CheckResult]]]:
    """The part, the name and the work of each check."""
    if machine.device == "cuda":
        yield "torch", "code for the GPUs", _code
    yield "links", f"messages and sums, {machine.backend}", partial(_links, machine)
    if machine.backend != "nccl":
        gpus = torch.cuda.device_count() if machine.device == "cuda" else 0
        why = f"NCCL needs a GPU for each rank, this machine has {counted(gpus, 'GPU')}"
        yield "links", "messages and sums, nccl", lambda: CheckResult(CheckState.NOT_CHECKED, why)
    for network in effort.networks:
        for mode in _MODES:
            ranks = machine.ranks if mode is Mode.DP else "1-1"
            yield "parity", f"{network}, {mode} {ranks}", partial(_parity, machine, effort, network, mode, folder)
    rates = RateChecks(machine, effort, folder, progress)
    yield "rates", f"{effort.model}, one device", partial(rates.data_parallel, 1)
    yield "rates", f"{effort.model}, data parallel on all", rates.data_parallel
    yield "rates", f"{effort.model}, the plan chosen here", rates.best_plan
    yield "row", "to send", partial(_write_row, rates, row)


# --- Links ------------------------------------------------------------------------------------------------------------


def _code() -> CheckResult:
    """Whether this build of torch has code for every GPU."""
    built = torch.cuda.get_arch_list()
    has = f"torch {torch.__version__} has {' '.join(built)}"
    for gpu in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(gpu)
        if not any(runs_on(code, capability) for code in built):
            card = (
                f"GPU {gpu} is {torch.cuda.get_device_name(gpu)} of compute capability {capability[0]}.{capability[1]}"
            )
            return CheckResult(CheckState.FAILED, f"{card}, but {has}; install another build (docs/install.md)")
    return CheckResult(CheckState.PASSED, has)


def runs_on(code: str, capability: tuple[int, int]) -> bool:
    """Whether machine code (sm_86) runs on a GPU, or code that its driver compiles (compute_90)."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", code)
    number = (int(match[2]), int(match[3])) if match else (99, 0)
    return number <= capability and (number[0] == capability[0] or code.startswith("compute"))


def _links(machine: UnderTest) -> CheckResult:
    if machine.ranks == 1:
        return _ALONE
    found = measure_links(machine.ranks, device=machine.device, backend=machine.backend)
    slowest = min(found["transfers"], key=lambda transfer: transfer["bandwidth"])
    figures = {"send": slowest["bandwidth"], "latency": slowest["latency"], "reduce": found["reduce"]}
    if found["wrong"]:
        wrong = f"{counted(len(found['wrong']), 'transfer')} arrived wrong, first the {found['wrong'][0]}"
        return CheckResult(CheckState.FAILED, f"{wrong}; check the cards, their slots and IOMMU settings", figures)
    speeds = f"messages {slowest['bandwidth'] / 1e9:.2f} GB/s, {slowest['latency'] * 1e6:.0f} us"
    where = f", slowest pair {slowest['source']}-{slowest['target']}" if len(found["transfers"]) > 1 else ""
    return CheckResult(CheckState.PASSED, f"all right; {speeds}{where}; sums {found['reduce'] / 1e9:.2f} GB/s", figures)


# --- Parity -----------------------------------------------------------------------------------------------------------

_CUTS = {"resnet8": "layer2", "bert-mini": "h.2"}  # where stage 1 begins; neither model draws random numbers


def _parity(machine: UnderTest, effort: Effort, network: str, mode: Mode, folder: Path) -> CheckResult:
    """Train by real ranks and by plain PyTorch in this process, on the same kind of device."""
    if machine.ranks == 1:
        return _ALONE
    is_whole = mode is Mode.DP
    task = Task(
        network,
        max(4, machine.ranks),
        effort.steps,
        machine.ranks if is_whole else 1,
        _CUTS[network] if mode is Mode.STALE else None,
        machine.device,
    )
    result = run(make_config(FIXED, _parity_options(machine, task, mode, folder), given=()))
    with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
        plain = train_plain(task)
    largest, where = plain.difference(Trained([step.loss for step in result.steps], result.weights()))
    bar = _BARS[machine.device]
    line = f"largest difference from plain PyTorch {largest:.1e} ({where}), bar {bar:.0e}"
    return CheckResult(
        CheckState.PASSED if largest <= bar else CheckState.FAILED, line, {"difference": largest, "bar": bar}
    )


def _parity_options(machine: UnderTest, task: Task, mode: Mode, folder: Path) -> dict[str, dict[str, Any]]:
    """The options that train a task; its samples are written into the folder."""
    data = folder / "data.safetensors"
    save_file(task.data(), data)
    plan = {"mode": str(mode), "batch": task.samples, "microbatches": task.microbatches}
    if mode is Mode.DP:
        plan["placement"] = f"0:0-{machine.ranks - 1}"
    else:
        plan |= {"placement": "0:0.0:1", "cut": _CUTS[task.network]}
    return {
        "model": {"name": task.network, "classes": CLASSES},
        "data": {"source": f"tensors:{data}", "shuffle": False},
        "plan": plan | ({"staleness": 1} if mode is Mode.STALE else {}),
        "optimizer": {"lr": RATE, "momentum": MOMENTUM, "weight_decay": 0.0},
        "run": machine.options
        | {
            "steps": task.steps,
            "seed": SEED,
            # fp64 is for CPUs, and tf32 rounds to three digits
            "precision": "fp64" if machine.device == "cpu" else "ieee",
            "runs": str(folder / "runs"),
            "export": str(folder / "weights.safetensors"),
        },
    }


# --- Rates ------------------------------------------------------------------------------------------------------------


class RateChecks:
    """The rates of one model under three plans, each beside its prediction by a profile of this machine."""

    def __init__(self, machine: UnderTest, effort: Effort, folder: Path, progress: Progress) -> None:
        self.machine = machine
        self.effort = effort
        self.measured: list[Result] = []  # of data parallel; the last one has the most devices
        self._folder = folder
        self._progress = progress

    @cached_property
    def _here(self) -> Here:
        return profile_here(self.effort.model, Subject(self.effort.precision), self._progress)

    @cached_property
    def _setting(self) -> Setting:
        tied = trace_model(self.effort.model, None, None).tied
        here = self._here
        return make_setting(here.profile, here.cluster, self.effort.precision, catalog=here.catalog, tied=tied)

    @property
    def _each(self) -> int:
        """Samples of a batch, a device: as many as the profile covers."""
        return self._here.profile.covered(self.effort.precision)[1]

    def data_parallel(self, devices: int | None = None) -> CheckResult:
        """The rate on some devices, or on all."""
        if devices is None and (self.machine.ranks == 1 or self.machine.shares):
            return CheckResult(CheckState.NOT_CHECKED, "this machine has 1 GPU")
        devices = devices or len(self._setting.cluster.devices)
        placement = "0:0" if devices == 1 else f"0:0-{devices - 1}"
        batch = devices * self._each
        return self._measure({"mode": "dp", "placement": placement, "batch": batch}, batch)

    def best_plan(self) -> CheckResult:
        if self.machine.ranks == 1 or self.machine.shares:
            return CheckResult(CheckState.NOT_CHECKED, "this machine has 1 GPU")
        devices = len(self._setting.cluster.devices)
        plan = choose(self._setting, devices * self._each).best.plan
        if plan.mode is Mode.DP:
            return CheckResult(
                CheckState.PASSED, f"data parallel on {plan.world}: no plan of stages is predicted to be faster"
            )
        file = self._folder / "plan.json"
        file.write_text(json.dumps(plan.describe()))
        found = self._measure({"file": str(file)}, plan.batch)
        return replace(found, line=f"{plan.mode} {plan.shape}: {found.line}")

    def _measure(self, plan: dict[str, Any], batch: int) -> CheckResult:
        effort, runs = self.effort, str(self._folder / "runs")
        least, most = effort.batches
        seconds = self._here.profile.at(effort.precision, self._each).seconds
        steps = min(most, max(least, round(_RATE_SECONDS / seconds)))
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": effort.model},
            "data": {"samples": max(256, batch)},
            "plan": plan,
            "run": self.machine.options | {"precision": effort.precision, "steps": steps, "runs": runs},
        }
        result = run(make_config(FIXED, tables, given=()))
        rate = result.summary["images_per_second"]
        if rate is None:
            return CheckResult(
                CheckState.NOT_CHECKED, f"no steady speed in {len(result.steps)} steps; stop other programs"
            )
        if result.plan.mode is Mode.DP:
            self.measured.append(result)
        predicted = predict(result.plan, self._setting).images_per_second
        line = f"{rate:,.0f} images/s, predicted {predicted:,.0f} ({predicted / rate - 1:+.0%})"
        return CheckResult(CheckState.PASSED, line, {"images_per_second": rate, "predicted": predicted})


def _write_row(rates: RateChecks, path: str) -> CheckResult:
    """Append the rate of data parallel on the most devices to a file of rows."""
    if not rates.measured:
        return CheckResult(CheckState.NOT_CHECKED, "no rate was measured")
    result, here = rates.measured[-1], read_environment()
    devices = len(result.plan.devices)
    row = Row(
        hardware=hardware_of(dict(here.rows()), rates.machine.device),
        gpus=devices,
        software=software_of(dict(here.rows())),
        model=rates.effort.model,
        precision=rates.effort.precision,
        batch_per_gpu=result.plan.batch // devices,
        images_per_second=round(result.summary["images_per_second"], 2),
        source=f"stagewright selftest, {time.strftime('%Y-%m-%d')}",
        link="none" if devices == 1 else _link(here.topology),
        note=f"synthetic data, {len(result.steps)} steps",
    )
    append_rows([row], path)
    wish = "" if rates.machine.device == "cpu" else "; please send it in an issue, so that predictions become better"
    return CheckResult(CheckState.PASSED, f"appended to {path}{wish}")


def _link(topology: Topology | None) -> str:
    """How the GPUs of a machine reach each other, in the words of a row."""
    cells = [] if topology is None else [cell for row in topology.rows for cell in row]
    kinds = {None if cell is None else cell.kind for cell in cells} - {LinkKind.SELF}
    if kinds == {LinkKind.NVLINK}:
        return "NVLink"
    return "PCIe" if kinds and not kinds & {None, LinkKind.NVLINK} else "not stated"
