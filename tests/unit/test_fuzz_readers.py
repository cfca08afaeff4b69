"""Every text that a user gives, mutated: options, files, and the files of run and bench folders.

It is read, or refused in one line; nothing takes more than `_MOST_MEMORY` bytes or `_SECONDS` of CPU time. Data sets
are in data/test_fuzz.py, checkpoints in runtime/checkpoint/test_forged.py, bad options in cli/test_bad_options.py.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import stagewright
from benchmarks.__main__ import main as run_benchmark
from benchmarks.learning.runs import earlier_runs
from benchmarks.learning.trials import StudyOptions, TrialRun, open_study, trial_runs_of
from stagewright.bench.compare import compare, describe
from stagewright.bench.suite import SuiteOptions, configurations_of, read_suite
from stagewright.cli import main as cli
from stagewright.cli.command.command import one_line
from stagewright.cluster.catalog import open_cluster
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.config.toml import as_toml, changed_keys, make_config, parse_assignment, read_toml
from stagewright.errors import UserError
from stagewright.events import DecodeError
from stagewright.hardware.cluster_file import ImportOptions, checked_toml, import_texts
from stagewright.model.chain import Chain
from stagewright.plan.make import make_plan, read_plan
from stagewright.planning.build import build_plan, stage_numbers
from stagewright.planning.simulate import balanced_costs
from stagewright.profile.pipedream import read_pipedream
from stagewright.profile.profile import read_profile
from stagewright.report.live.watch import Watch, as_line, as_screen
from stagewright.run.report import make_page, read_rank_map, take_snapshot, write_page
from stagewright.runtime.multinode.nodes import cluster_of, read_nodes, read_token
from tests.limits import cpu_time, more_memory
from tests.made_runs import make_run, usage
from tests.mutations import changed_json, mutated
from tests.smi_texts import TITAN_8, smi_xml
from tests.unit.bench.test_compare import QUIET, outcome, row
from tests.unit.profile.test_pipedream import GRAPH

BENCH = Path(stagewright.__file__).parent / "bench"
CASES = int(os.environ.get("STAGEWRIGHT_READER_FUZZ", "400"))  # per reader; `make soak` runs many more
_SHOWN = max(4, CASES // 100)  # of them also run as a command
_SECONDS = 2.0  # of CPU time per text
_MOST_MEMORY = 2**30


@dataclass(frozen=True)
class Reader:
    """A reader of something that a user wrote."""

    read: Callable[[str, Path], object]
    seeds: Sequence[str]
    command: Callable[[str, Path], list[str]]  # the command that reads the same
    is_json: bool = False
    share: float = 1.0  # of the cases: fewer for a slow reader
    refuses: bool = True  # a reader of a run folder leaves out what it cannot read

    @property
    def cases(self) -> int:
        return int(CASES * self.share)


def _file(text: str, path: Path) -> str:
    try:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return str(path)


def _read_config(text: str, path: Path) -> None:
    tables = read_toml(_file(text, path))
    config = make_config(tables, given=changed_keys(tables))
    plan = build_plan(config.plan, cluster_of(config), costs=balanced_costs)
    assert plan.world <= 65536 * 8


def _read_shares(text: str, path: Path) -> None:
    shares = stage_numbers(text, "shares", ":")
    assert shares is not None
    _chain().by_shares(shares)


@cache
def _chain() -> Chain:
    import torch

    from stagewright.model.load import build_model

    return Chain(build_model("vgg-small", 0, 10), torch.zeros(1, 3, 32, 32))


def _plan_seed(text: str) -> str:
    return json.dumps(make_plan(parse_placement(text), batch=32, cuts=["a"] * text.count(".")).describe(), indent=1)


_UNITS = [
    {
        "name": name,
        "kind": "conv2d",
        "forward": 0.1,
        "backward": 0.2,
        **dict.fromkeys(("parameters", "output", "live", "live_gradient", "saved", "workspace"), 4),
    }
    for name in ("a", "b")
]
_PROFILE = json.dumps(
    {
        "format": "stagewright-profile-1",
        "model": "m",
        "device": "cpu",
        "software": "torch 2",
        "input": [3, 32, 32],
        "together": 2,
        "ceilings": {"matrix": {"fp32": 1e11}, "copy": 1e10, "update": 1e9, "overhead": 1e-5},
        "tables": [{"precision": "fp32", "samples": samples, "units": _UNITS} for samples in (4, 8)],
    },
    indent=1,
)
CLUSTER = """
[link.my-net]
bandwidth = 1e9
latency = 5e-6
[device.mine]
title = "a device with a long title, so that some changes hit what people alone read and are no error"
memory_mib = 16000
bandwidth = 9e11
usd = 1000
[device.mine.peak]
fp32 = 1.5e13
[cluster.home]
network = "my-net"
[[cluster.home.machines]]
device = "mine"
devices = 4
count = 2
cores = 16
levels = [{ link = "pcie3-pix", groups = [[0, 1], [2, 3]] }, { link = "pcie3-sys", lanes = 2 }]
"""


def _run_of(path: Path) -> Path:
    """A run folder beside a path, made once; the file that the last case changed is whole again."""
    run, whole = path.parent / "run", path.parent / "whole"
    if not whole.exists():
        memory = json.dumps({"ranks": [{"weights": 1.0, "gradients": 2.0}] * 3})
        for folder in (whole, run):
            make_run(folder, monitor=usage(gpus=1))
            (folder / "memory.json").write_text(memory)
    for file in whole.iterdir():
        if (run / file.name).read_bytes() != file.read_bytes():
            (run / file.name).write_bytes(file.read_bytes())
    return run


def _of_run(name: str, seed: str, *, is_json: bool = True) -> Reader:
    """A reader of one file of a run folder: by a report, by `watch` and by `compare`."""

    def read(text: str, path: Path) -> None:
        run = _run_of(path)
        _file(text, run / name)
        write_page(make_page([run]), path.with_suffix(".html"))
        snapshot = take_snapshot(Watch(run, read_rank_map(run)), run)
        json.dumps(snapshot.describe())
        Console(file=io.StringIO()).print(as_screen(snapshot, 80), as_line(snapshot))
        json.dumps(describe(compare(run, path.parent / "whole")))

    def command(text: str, path: Path) -> list[str]:
        _file(text, _run_of(path) / name)
        return ["report", str(path.parent / "run"), "-o", str(path.with_suffix(".html"))]

    return Reader(read, [seed], command, is_json=is_json, share=0.02, refuses=name == "plan.json")


def _made_files() -> dict[str, str]:
    with TemporaryDirectory() as folder:
        run = _run_of(Path(folder) / "x")
        return {path.name: path.read_text() for path in sorted(run.iterdir())}


def _smi_reader(option: str, *seeds: str) -> Reader:
    """A reader of what nvidia-smi prints; a matrix needs the kind of its devices beside it."""
    options = ImportOptions("x", None if option == "smi" else "titan-v")

    def read(text: str, path: Path) -> None:
        files = {"topo": None, "smi": None} | {option: _file(text, path)}
        checked_toml(import_texts(files["topo"], files["smi"], options))

    device = [] if option == "smi" else ["--device", "titan-v"]
    return Reader(
        read, seeds, lambda text, path: ["cluster", "import", f"--{option}", _file(text, path), *device], share=0.1
    )


def _read_suite(text: str, path: Path) -> None:
    suite = read_suite(_file(text, path))
    options = SuiteOptions(suite.repeats, suite.steps, None, None, ())
    for configuration in configurations_of(suite, options):
        configuration.resolve(Cluster((Machine(4),)))


def _study_runs(path: str | None) -> list[TrialRun]:
    options = StudyOptions(study=path, data="synthetic", seeds=1)
    return trial_runs_of(options, open_study(options))


def _read_learning(text: str, path: Path) -> None:
    _file(text, path.with_name("learning.json"))
    earlier_runs([str(path.parent)], _trial_runs())


@cache
def _trial_runs() -> list[TrialRun]:
    with NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(_STUDY)
        file.flush()
        return _study_runs(file.name)


def _learning_seed() -> str:
    runs = [
        {
            "group": run.key[0],
            "trial": run.key[1],
            "seed": 0,
            "scores": [[2, 0.5]],
            "per_epoch": 2,
            "settings": run.settings,
        }
        for run in _trial_runs()[:2]
    ]
    return json.dumps({"findings": [{"learnt": runs}], "machine": {"host": "x"}}, indent=1)


def _read_bench(text: str, path: Path) -> None:
    json.dumps(describe(compare(*_benches(text, path))))


def _benches(text: str, path: Path) -> tuple[Path, Path]:
    """Two folders of benches, of which one has this text."""
    for name, content in (("a", text), ("b", _BENCH)):
        (path.parent / name).mkdir(exist_ok=True)
        _file(content, path.parent / name / "bench.json")
    return path.parent / "a", path.parent / "b"


def _read_token(text: str, path: Path) -> None:
    path.touch(0o600)
    read_token(_file(text, path))


_STUDY = """
title = "Lag"
[options]
plan = { batch = 64, microbatches = 2 }
run = { epochs = 2 }
[[group]]
name = "VGG"
baseline = "sync"
options = { model = { name = "vgg-small" } }
[[group.trial]]
name = "sync"
options = { plan = { mode = "sync", placement = "0:0.0:1" } }
[[group.trial]]
name = "lag 1"
options = { plan = { mode = "stale", placement = "0:0.0:1", staleness = 1 } }
"""
_BENCH = json.dumps(asdict(outcome(row("dp", QUIET), row("stale", QUIET))), indent=1)
_FILES = _made_files()
READERS = {
    "config": Reader(
        _read_config,
        [as_toml(make_config({"plan": {"placement": "0:0-1.0:2", "microbatches": 4}, "run": {"steps": 3}}))],
        lambda text, path: ["train", "--config", _file(text, path)],
    ),
    "assignment": Reader(
        lambda text, path: make_config(parse_assignment(text)),
        ["run.seed=3", "optimizer.lr=1e-3", 'model.name="vgg"', "data.shuffle=false", "nodes.list=10.0.0.1,10.0.0.2"],
        lambda text, path: ["train", f"--set={text}"],
    ),
    "placement": Reader(
        lambda text, path: parse_placement(text, Cluster((Machine(), Machine(8)))),
        ["0:0-6.0:7", "0:0-7,1:0-7.0:0-7,1:0-7", "0:0,2,4-6", "0:0-2.0:3-4.1:5"],
        lambda text, path: ["schedule", f"--placement={text}", "--batch", "8"],
    ),
    "shares": Reader(
        _read_shares,
        ["11:7", "1:1:1", "3:14:2:1"],
        lambda text, path: ["train", "--placement", "0:0.0:1", f"--shares={text}", f"--runs={path}"],
    ),
    "plan": Reader(
        lambda text, path: read_plan(text, "plan.json"),
        [_plan_seed("0:0-6.0:7"), _plan_seed("0:0-1"), json.dumps({"plan": json.loads(_plan_seed("0:0.0:1.0:2"))})],
        lambda text, path: ["train", "--plan", _file(text, path)],
        is_json=True,
    ),
    "profile": Reader(
        lambda text, path: read_profile(_file(text, path)).at("fp32", 6),
        [_PROFILE],
        lambda text, path: ["simulate", "vgg-small", "--profile", _file(text, path), "--mode", "dp", "--batch", "8"],
        is_json=True,
    ),
    "cluster": Reader(
        lambda text, path: open_cluster(_file(text, path)),
        [CLUSTER],
        lambda text, path: ["simulate", "vgg-small", "--cluster", _file(text, path), "--mode", "dp", "--batch", "8"],
        share=0.25,
    ),
    "nodes": Reader(
        lambda text, path: read_nodes(text, {}),
        ["10.0.0.1,10.0.0.2:7000", "[fd00::1]:29600,fd00::2", "node-1.lan,node-2"],
        lambda text, path: ["train", f"--nodes={text}"],
    ),
    "pipedream": Reader(
        lambda text, path: read_pipedream(_file(text, path), "m", 16),
        [GRAPH],
        lambda text, path: ["profile", "m", "--samples", "16", "--pipedream", _file(text, path)],
    ),
    "topo": _smi_reader("topo", TITAN_8),
    "smi": _smi_reader("smi", smi_xml("NVIDIA TITAN V", 12288, 1)),
    "suite": Reader(
        _read_suite,
        [(BENCH / "suites/quick.toml").read_text()],
        lambda text, path: ["bench", _file(text, path)],
        share=0.25,
    ),
    "study": Reader(
        lambda text, path: _study_runs(_file(text, path)),
        [_STUDY],
        lambda text, path: ["benchmarks", "learning", "--data", "synthetic", "--study", _file(text, path)],
        share=0.1,
    ),
    "learning": Reader(
        _read_learning,
        [_learning_seed()],
        lambda text, path: [
            *("benchmarks", "learning", "--data", "synthetic", "--study", _file(_STUDY, path)),
            *("--reuse", str(Path(_file(text, path.with_name("learning.json"))).parent)),
        ],
        is_json=True,
        share=0.25,
    ),
    "bench": Reader(
        _read_bench, [_BENCH], lambda text, path: ["compare", *map(str, _benches(text, path))], is_json=True, share=0.1
    ),
    "token": Reader(
        _read_token,
        ["sixteen letters or more\n"],
        lambda text, path: [
            "train",
            "--nodes",
            "127.0.0.1,127.0.0.2",
            "--node-index",
            "0",
            "--token",
            _file(text, path),
        ],
    ),
    **{name: _of_run(name, text, is_json=not name.endswith(".toml")) for name, text in _FILES.items()},
}


def attempt(reader: Reader, text: str, path: Path) -> str | None:
    """Why the reader refuses a text, or None; fails on any other exception, and where reading takes long."""
    try:
        with more_memory(_MOST_MEMORY), cpu_time(_SECONDS):
            reader.read(text, path)
    except (UserError, DecodeError) as error:
        assert one_line(str(error)).isprintable() and str(error).strip(), f"no reason for {text!r}"
        return str(error)
    except BaseException as error:
        error.add_note(f"reading {text[:2000]!r}")
        raise
    return None


def assert_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails with exit code 2 and one line that says why."""
    with pytest.raises(SystemExit) as ended:
        if command[0] == "benchmarks":
            run_benchmark(command[1:])
        else:
            cli.main(command)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.count("\n") == 1 and "Traceback" not in shown, (command, shown)
    assert len(shown) < 1000 and shown[:-1].isprintable(), shown


@pytest.mark.timeout(1800 + CASES // 5)
@pytest.mark.parametrize("name", READERS)
def test_mutated_texts_are_read_or_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_TOKEN", "sixteen letters or more")
    reader, path = READERS[name], tmp_path / f"{name}.toml"
    for seed in reader.seeds:
        assert attempt(reader, seed, path) is None
    generator = random.Random(name)
    refused: list[str] = []
    for number in range(reader.cases):
        seed = reader.seeds[number % len(reader.seeds)]
        text = changed_json(seed, generator) if reader.is_json and number % 2 else mutated(seed, generator)
        if attempt(reader, text, path) is not None:
            refused.append(text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    with capsys.disabled():
        print(f"{name}: {reader.cases} texts, {len(refused)} refused; peak memory of the process {peak} MiB")
    if not reader.refuses:
        return
    assert refused and (reader.cases < 40 or 0.1 < len(refused) / reader.cases < 1)
    shown = [text for text in refused if "\0" not in text]  # a command line can't hold that
    for text in shown[:: max(1, len(shown) // _SHOWN)]:
        assert_one_line(reader.command(text, path), capsys)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.share == 1])
def test_texts_of_any_kind_are_read_or_refused(name: str, tmp_path: Path) -> None:
    reader = READERS[name]

    @settings(max_examples=reader.cases // 4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.text(max_size=60) | st.from_regex(r"[0-9:.,\[\]{}=\"a-]{1,40}", fullmatch=True))
    def check(text: str) -> None:
        attempt(reader, text, tmp_path / "any.toml")

    check()
