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
from stagewright.hardware.devices import with_devices
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
from stagewright.run.profile import Here, profile_here
from stagewright.run.train import Result, run
from stagewright.runtime.process.link_test import measure_links
from stagewright.voice import SILENT, Voice

_CUTS = {"resnet8": "layer2", "bert-mini": "h.2"}  # where stage 1 begins; neither model draws random numbers
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
class Check:
    """One line of the table: what was found, in words and in figures (bytes, seconds, images)."""

    state: CheckState
    line: str
    figures: Mapping[str, float] = field(default_factory=dict)
    part: str = ""
    name: str = ""


_passed, _failed, _not_checked = (partial(Check, state) for state in CheckState)
_ALONE = _not_checked("1 GPU runs 1 rank; --share-gpu puts two on it")
_ONE_GPU = _not_checked("this machine has 1 GPU")


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


def run_checks(machine: UnderTest, effort: Effort, minutes: float, row: str, voice: Voice = SILENT) -> Iterator[Check]:
    """Every check, as soon as it is done; the row goes to the end of a file."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stagewright-selftest-") as folder:
        for part, name, work in _Selftest(machine, effort, row, Path(folder), voice).checks():
            found = _not_checked(f"{minutes:g} min were over; give --minutes N")
            if time.monotonic() - began <= 60 * minutes:
                voice.progress(f"{part}: {name}")
                try:
                    found = work()
                except (UserError, RuntimeError, OSError) as error:  # of ours, of torch, of the disk
                    found = _failed(first_line(error))
            yield replace(found, part=part, name=name)


def runs_on(code: str, capability: tuple[int, int]) -> bool:
    """Whether machine code (sm_86) runs on a GPU, or code that its driver compiles (compute_90)."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", code)
    number = (int(match[2]), int(match[3])) if match else (99, 0)
    return number <= capability and (number[0] == capability[0] or code.startswith("compute"))


class _Selftest:
    """The checks of one machine; the rates share a profile, which is taken when it is needed first."""

    def __init__(self, machine: UnderTest, effort: Effort, row: str, folder: Path, voice: Voice) -> None:
        self._machine, self._effort, self._row, self._folder, self._voice = machine, effort, row, folder, voice
        self._measured: list[Result] = []  # of data parallel; the last one has the most devices

    def checks(self) -> Iterator[tuple[str, str, Callable[[], Check]]]:
        """The part, the name and the work of each check."""
        machine, model = self._machine, self._effort.model
        if machine.device == "cuda":
            yield "torch", "code for the GPUs", self._code
        yield "links", f"messages and sums, {machine.backend}", self._links
        if machine.backend != "nccl":
            gpus = torch.cuda.device_count() if machine.device == "cuda" else 0
            why = f"NCCL needs a GPU for each rank, this machine has {counted(gpus, 'GPU')}"
            yield "links", "messages and sums, nccl", partial(_not_checked, why)
        for network in self._effort.networks:
            for mode in _MODES:
                ranks = machine.ranks if mode is Mode.DP else "1-1"
                yield "parity", f"{network}, {mode} {ranks}", partial(self._parity, network, mode)
        yield "rates", f"{model}, one device", partial(self._data_parallel, 1)
        yield "rates", f"{model}, data parallel on all", self._data_parallel
        yield "rates", f"{model}, the plan chosen here", self._best_plan
        yield "row", "to send", self._write_row

    def _code(self) -> Check:
        """Whether this build of torch has code for every GPU."""
        built = torch.cuda.get_arch_list()
        has = f"torch {torch.__version__} has {' '.join(built)}"
        for gpu in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(gpu)
            if not any(runs_on(code, (major, minor)) for code in built):
                card = f"GPU {gpu} is {torch.cuda.get_device_name(gpu)} of compute capability {major}.{minor}"
                return _failed(f"{card}, but {has}; install another build (docs/install.md)")
        return _passed(has)

    def _links(self) -> Check:
        if self._machine.ranks == 1:
            return _ALONE
        found = measure_links(self._machine.ranks, device=self._machine.device, backend=self._machine.backend)
        slowest = min(found["transfers"], key=lambda transfer: transfer["bandwidth"])
        figures = {"send": slowest["bandwidth"], "latency": slowest["latency"], "reduce": found["reduce"]}
        if found["wrong"]:
            wrong = f"{counted(len(found['wrong']), 'transfer')} arrived wrong, first the {found['wrong'][0]}"
            return _failed(f"{wrong}; check the cards, their slots and IOMMU settings", figures)
        speeds = f"messages {slowest['bandwidth'] / 1e9:.2f} GB/s, {slowest['latency'] * 1e6:.0f} us"
        where = f", slowest pair {slowest['source']}-{slowest['target']}" if len(found["transfers"]) > 1 else ""
        return _passed(f"all right; {speeds}{where}; sums {found['reduce'] / 1e9:.2f} GB/s", figures)

    def _parity(self, network: str, mode: Mode) -> Check:
        """Train by real ranks and by plain PyTorch in this process, on the same kind of device."""
        ranks, device = self._machine.ranks, self._machine.device
        if ranks == 1:
            return _ALONE
        replicas, lagging = (ranks if mode is Mode.DP else 1), (_CUTS[network] if mode is Mode.STALE else None)
        task = Task(network, max(4, ranks), self._effort.steps, replicas, lagging, device)
        result = run(make_config(FIXED, self._parity_options(task, mode), given=()))
        with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
            plain = train_plain(task)
        largest, where = plain.difference(Trained([step.loss for step in result.steps], result.weights()))
        line = f"largest difference from plain PyTorch {largest:.1e} ({where}), bar {_BARS[device]:.0e}"
        made = _passed if largest <= _BARS[device] else _failed
        return made(line, {"difference": largest, "bar": _BARS[device]})

    def _parity_options(self, task: Task, mode: Mode) -> dict[str, dict[str, Any]]:
        """The options that train a task; its samples are written into the folder."""
        data = self._folder / "data.safetensors"
        save_file(task.data(), data)
        plan = {"mode": str(mode), "batch": task.samples, "microbatches": task.microbatches}
        if mode is Mode.DP:
            plan["placement"] = f"0:0-{self._machine.ranks - 1}"
        else:
            plan |= {"placement": "0:0.0:1", "cut": _CUTS[task.network]}
        own = {
            "steps": task.steps,
            "seed": SEED,
            "precision": "fp64" if task.device == "cpu" else "ieee",  # tf32 would round to three digits
            "runs": str(self._folder / "runs"),
            "export": str(self._folder / "weights.safetensors"),
        }
        return {
            "model": {"name": task.network, "classes": CLASSES},
            "data": {"source": f"tensors:{data}", "shuffle": False},
            "plan": plan | ({"staleness": 1} if mode is Mode.STALE else {}),
            "optimizer": {"lr": RATE, "momentum": MOMENTUM, "weight_decay": 0.0},
            "run": self._machine.options | own,
        }

    @cached_property
    def _here(self) -> Here:
        tables = {"model": {"name": self._effort.model}, "run": {"precision": self._effort.precision}}
        return profile_here(with_devices(make_config(tables)), replace(self._voice, note=self._voice.progress))

    @cached_property
    def _setting(self) -> Setting:
        tied, here = trace_model(self._effort.model, None, None).tied, self._here
        return make_setting(here.profile, here.cluster, self._effort.precision, catalog=here.catalog, tied=tied)

    @property
    def _each(self) -> int:
        """Samples of a batch, a device: as many as the profile covers."""
        return self._here.profile.covered(self._effort.precision)[1]

    def _data_parallel(self, devices: int | None = None) -> Check:
        """The rate on some devices, or on all."""
        if devices is None and (self._machine.ranks == 1 or self._machine.shares):
            return _ONE_GPU
        devices = devices or len(self._setting.cluster.devices)
        batch = devices * self._each
        return self._rate(
            {"mode": "dp", "placement": "0:0" if devices == 1 else f"0:0-{devices - 1}", "batch": batch}, batch
        )

    def _best_plan(self) -> Check:
        if self._machine.ranks == 1 or self._machine.shares:
            return _ONE_GPU
        plan = choose(self._setting, len(self._setting.cluster.devices) * self._each).best.plan
        if plan.mode is Mode.DP:
            return _passed(f"data parallel on {plan.world}: no plan of stages is predicted to be faster")
        file = self._folder / "plan.json"
        file.write_text(json.dumps(plan.describe()))
        found = self._rate({"file": str(file)}, plan.batch)
        return replace(found, line=f"{plan.mode} {plan.shape}: {found.line}")

    def _rate(self, plan: dict[str, Any], batch: int) -> Check:
        effort = self._effort
        seconds = self._here.profile.at(effort.precision, self._each).seconds
        least, most = effort.batches
        steps = min(most, max(least, round(_RATE_SECONDS / seconds)))
        own = {"precision": effort.precision, "steps": steps, "runs": str(self._folder / "runs")}
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": effort.model},
            "data": {"samples": max(256, batch)},
            "plan": plan,
            "run": self._machine.options | own,
        }
        result = run(make_config(FIXED, tables, given=()))
        rate = result.summary["images_per_second"]
        if rate is None:
            return _not_checked(f"no steady speed in {len(result.steps)} steps; stop other programs")
        if result.plan.mode is Mode.DP:
            self._measured.append(result)
        predicted = predict(result.plan, self._setting).images_per_second
        line = f"{rate:,.0f} images/s, predicted {predicted:,.0f} ({predicted / rate - 1:+.0%})"
        return _passed(line, {"images_per_second": rate, "predicted": predicted})

    def _write_row(self) -> Check:
        """Append the rate of data parallel on the most devices to a file of rows."""
        if not self._measured:
            return _not_checked("no rate was measured")
        result, here = self._measured[-1], read_environment()
        devices = len(result.plan.devices)
        row = Row(
            hardware=hardware_of(dict(here.rows()), self._machine.device),
            gpus=devices,
            software=software_of(dict(here.rows())),
            model=self._effort.model,
            precision=self._effort.precision,
            batch_per_gpu=result.plan.batch // devices,
            images_per_second=round(result.summary["images_per_second"], 2),
            source=f"stagewright selftest, {time.strftime('%Y-%m-%d')}",
            link="none" if devices == 1 else _link(here.topology),
            note=f"synthetic data, {len(result.steps)} steps",
        )
        append_rows([row], self._row)
        wish = "" if self._machine.device == "cpu" else "; please send it in an issue: predictions become better by it"
        return _passed(f"appended to {self._row}{wish}")


def _link(topology: Topology | None) -> str:
    """How the GPUs of a machine reach each other, in the words of a row."""
    cells = [] if topology is None else [cell for row in topology.rows for cell in row]
    kinds = {None if cell is None else cell.kind for cell in cells} - {LinkKind.SELF}
    if kinds == {LinkKind.NVLINK}:
        return "NVLink"
    return "PCIe" if kinds and not kinds & {None, LinkKind.NVLINK} else "not stated"
