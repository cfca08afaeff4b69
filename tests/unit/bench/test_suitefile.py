"""Suite files: the shipped ones are sound, a user's own are checked, and what does not fit says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stagewright.bench.predict import Capacity
from stagewright.bench.run import nearest_suite
from stagewright.bench.suite import SuiteOptions, configurations_of, read_suite, shipped_names
from stagewright.cli.main import main
from stagewright.cluster.topology import Cluster, Machine
from stagewright.planning.calibrate import Calibration, published_runs

GIB = 1 << 30
LAPTOP = Capacity(gpus=0, gpu_memory=0, memory=16 * GIB)
ONE_GPU = Capacity(gpus=1, gpu_memory=140 * GIB, memory=128 * GIB)
SERVER = Capacity(gpus=8, gpu_memory=80 * GIB, memory=512 * GIB)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and "Traceback" not in error
    return error


def configs(name: str, capacity: Capacity) -> dict[str, str | None]:
    """Every case of a suite, and what a machine lacks for it."""
    suite = read_suite(name)
    found = {}
    for case in configurations_of(suite, SuiteOptions(1, 1, real="folder:/data")):
        found[str(case)] = capacity.shortage(case.resolve(capacity.cluster))
    return found


def test_the_shipped_suites_are_there() -> None:
    assert set(shipped_names()) == {"quick", "stages", "scaling", "homelab"}
    assert read_suite("stages").repeats == read_suite("scaling").repeats == 7


def test_the_stages_are_the_published_ones() -> None:
    """Every published placement, shares and batch of one server or two is a configuration of the suite."""
    ours = set()
    for case in configurations_of(read_suite("stages"), SuiteOptions(1, 1, simulate=True)):
        config = case.resolve(Cluster((Machine(8),) * 2, "two servers"))
        shares = config.plan.shares if config.plan.mode != "dp" else None
        ours.add((config.model.name, case.group.cluster, config.plan.mode, config.plan.batch, shares, case.data))
    for run in published_runs():
        if run.cluster in ("titan-v-8", "titan-v-16") and run.software == "oneflow":
            data = "real" if run.data == "imagenet" else "synthetic"
            assert (run.model, run.cluster, run.mode, run.global_batch, run.shares, data) in ours, str(run)


def test_modes_static_and_dynamic_for_every_model() -> None:
    for group in read_suite("stages").group:
        modes = [(t.options["plan"]["mode"], t.options.get("run", {}).get("dynamic", False)) for t in group.trial]
        assert modes == [("dp", False), ("sync", False), ("stale", False), ("stale", True), ("pipedream", False)]


def test_what_fits_a_machine() -> None:
    assert set(configs("quick", LAPTOP).values()) == {None}
    assert configs("stages", LAPTOP)["VGG-16, dp, synthetic"] == "needs 8 GPUs, this machine has 0"
    assert configs("stages", SERVER)["VGG-16, stale 7+1, real"] is None
    assert configs("stages", SERVER)["ResNet-50, dp, real"] == "needs 2 machines with GPUs, this is 1"
    scaling = configs("scaling", ONE_GPU)
    assert scaling["ResNet-50, 1 rank, synthetic"] is None
    assert scaling["ResNet-50, 2 ranks, synthetic"] == "needs 2 GPUs, this machine has 1"


def test_a_gpu_with_too_little_memory_is_told() -> None:
    small = Capacity(gpus=8, gpu_memory=3 * GIB, memory=64 * GIB)
    lacks = configs("stages", small)["VGG-16, dp, synthetic"]
    assert lacks is not None and re.fullmatch(r"needs about [\d,]+ MiB on a GPU, this machine has 3,072", lacks)


def test_what_the_memory_model_is_not_sure_of_is_tried() -> None:
    """The published home-lab box ran these batches on cards of 22 GiB; the model asks for 1.3 % more in fp32."""
    assert set(configs("homelab", Capacity(gpus=4, gpu_memory=22 * GIB, memory=64 * GIB)).values()) == {None}


def test_shared_gpus_hold_the_memory_of_all_their_ranks() -> None:
    case = configurations_of(read_suite("stages"), SuiteOptions(1, 1, overrides=[{"run": {"share_gpu": True}}]))[0]
    config = case.resolve(ONE_GPU.cluster)
    assert ONE_GPU.shortage(config) is None
    lacks = Capacity(gpus=1, gpu_memory=24 * GIB, memory=64 * GIB).shortage(config)
    assert lacks is not None and "24,576" in lacks


@pytest.mark.parametrize(("capacity", "nearest"), [(LAPTOP, "quick"), (ONE_GPU, "quick"), (SERVER, "homelab")])
def test_the_nearest_suite_is_one_that_runs(capacity: Capacity, nearest: str) -> None:
    found = nearest_suite(capacity)
    assert found is not None and all(lacks is None for lacks in configs(found, capacity).values())
    assert found == nearest or capacity is ONE_GPU


def test_all_devices_and_a_batch_for_each() -> None:
    (fp16, fp32) = configurations_of(read_suite("homelab"), SuiteOptions(1, 1))
    config = fp16.resolve(Cluster((Machine(4),), "box"))
    assert (config.plan.placement, config.plan.batch, config.run.precision) == ("0:0-3", 1800, "fp16")
    assert fp32.resolve(Cluster((Machine(4),), "box")).plan.batch == 1000 and fp32.is_baseline
    scaling = {case.trial.name: case for case in configurations_of(read_suite("scaling"), SuiteOptions(1, 1))}
    across = scaling["16 ranks"].resolve(Cluster((Machine(8),) * 4, "four"))
    assert across.plan.placement == "0:0-7,1:0-7" and across.plan.batch == 4096


HEAD = 'title = "t"\n[[group]]\nname = "g"\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", ["not TOML"]),
        ('title = "t"', ["group", "field required"]),
        ('title = "t"\ngroup = []', ["0 groups"]),
        (HEAD + "trial = []", ["0 trials"]),
        (HEAD + 'trial = [{ name = "a" }, { name = "a" }]', ["2 trials but 1 names"]),
        (HEAD + 'trial = [{ name = "a" }]\nbaseline = "b"', ["baseline 'b'", "only trials a"]),
        (HEAD + 'trial = [{ name = "a", repeats = 3 }]', ["group.0.trial.0.repeats", "unknown key"]),
        (HEAD + 'trial = [{ name = "a", devices = 0 }]', ["devices is 0", "at least 1"]),
        (HEAD + 'trial = [{ name = "a", options = { plan = { bath = 8 } } }]', ["plan.bath", "did you mean 'batch'"]),
        (HEAD + 'trial = [{ name = "a", options = { plan = { batch = "x" } } }]', ["plan.batch", "'x'"]),
        ("repeats = 0\n" + HEAD + 'trial = [{ name = "a" }]', ["repeats is 0"]),
        (HEAD + 'data = ["fake"]\ntrial = [{ name = "a" }]', ["group.0.data.0", "'fake'"]),
    ],
)
def test_a_bad_suite_is_one_line(
    content: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    line = fails(capsys, str(path), "--runs", str(tmp_path / "runs"))
    assert all(word in line for word in words), line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stagse"], ["unknown suite 'stagse'", "did you mean 'stages'?"]),
        (["/no/such.toml"], ["/no/such.toml", "No such file"]),
        (["quick", "--only", "nothing"], ["matches none of 2", "small VGG, dp, synthetic"]),
        (["overhead", "--only", "nothing"], ["matches none of 1 cases"]),
        (["quick", "--cluster", "titan-v-8"], ["--simulate as well"]),
        (["quick", "--simulate", "--cluster", "titan"], ["unknown cluster 'titan'", "titan-v-8"]),
        (["quick", "--set", "plan.bath=3"], ["plan.bath"]),
        (["published", "--only", "vgg16"], ["does not use --only", "takes none"]),
        (["data", "--steps", "3"], ["does not use --steps", "takes --repeats"]),
        (["overhead", "--set", "plan.batch=3"], ["does not use --set", "--repeats, --steps, --only"]),
        (["monitor", "--cluster", "titan-v-8"], ["does not use --cluster", "takes none"]),
        (["quick", "--seeds", "2"], ["does not use --seeds"]),
        (["learning", "--repeats", "2", "--data", "synthetic"], ["does not use --repeats"]),
    ],
    ids=" ".join,
)
def test_bad_options_of_a_suite_are_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(capsys, *arguments, "--runs", str(tmp_path / "runs"))
    assert all(word in line for word in words), line
    assert not list(tmp_path.glob("runs/*")), "a bench that never began leaves no folder"


def test_a_suite_that_does_not_fit_names_one_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.bench.run.local_capacity", lambda: LAPTOP)
    line = fails(capsys, "stages", "--runs", str(tmp_path))
    assert "needs 8 GPUs, this machine has 0" in line and "bench quick runs here" in line and "--simulate" in line
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def simulated(calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`stagewright bench stages --simulate --cluster titan-v-8`, with the calibration that other tests have made."""
    runs = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stagewright.bench.predict.calibrate", lambda tell: calibration)
        main(["bench", "stages", "--simulate", "--cluster", "titan-v-8", "--runs", str(runs)])
    (folder,) = runs.iterdir()
    return folder


def test_the_published_tables_stand_beside_the_published_figures(simulated: Path) -> None:
    text = (simulated / "report.md").read_text()
    for model in ("vgg16", "alexnet", "resnet50"):
        assert f"## {model}: predicted and published" in text
    runs = [run for run in published_runs() if run.cluster in ("titan-v-8", "titan-v-16") and run.precision == "fp32"]
    rows = [line for line in text.splitlines() if line.startswith(("| OneFlow", "| PipeDream"))]
    assert len(rows) == len(runs) == 17
    for run in runs:
        for epoch in run.epoch_seconds:
            assert any(run.system in row and f"{epoch:,.1f}" in row for row in rows), str(run)
        for memory in run.memory_mib:
            assert any(run.system in row and f"{memory:,.0f}" in row for row in rows), str(run)


def test_predicted_rows_are_marked_and_say_where(simulated: Path) -> None:
    outcome = json.loads((simulated / "bench.json").read_text())
    assert {row["kind"] for row in outcome["rows"]} == {"predicted"} and len(outcome["rows"]) == 30
    where = {row["group"]: row["cluster"] for row in outcome["rows"]}
    assert where == {"VGG-16": "titan-v-8", "AlexNet": "titan-v-8", "ResNet-50": "titan-v-16"}
    stale = next(row for row in outcome["rows"] if row["name"] == "stale 7+1" and row["group"] == "VGG-16")
    assert stale["speedup"]["value"] > 1.3 and stale["cuts"] == ["features.24"] and len(stale["memory"]) == 2
    reasons = {row["reason"] for row in outcome["rows"] if row["group"] == "ResNet-50"}
    assert reasons == {"has more devices than titan-v-8"}
