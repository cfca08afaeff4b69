"""Suite files: the shipped ones are sound, and errors in others are reported in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.calibration.published import published_runs
from stagewright.bench.suite import SuiteOptions, configurations_of, read_suite, shipped_names
from stagewright.cluster.topology import Cluster, Machine
from tests.commands import fails

HEAD = 'title = "t"\n[[group]]\nname = "g"\n'


def test_ships_four_suites() -> None:
    assert set(shipped_names()) == {"quick", "stages", "scaling", "homelab"}
    assert read_suite("stages").repeats == read_suite("scaling").repeats == 7


def test_stages_has_every_published_configuration() -> None:
    """Every published placement, shares and batch of one server or two is a configuration of the suite."""
    ours = set()
    for configuration in configurations_of(read_suite("stages"), SuiteOptions(1, 1, simulate=True)):
        config = configuration.resolve(Cluster((Machine(8),) * 2, "two servers"))
        shares = config.plan.shares if config.plan.mode != "dp" else None
        ours.add(
            (
                config.model.name,
                configuration.group.cluster,
                config.plan.mode,
                config.plan.batch,
                shares,
                configuration.data,
            )
        )
    for run in published_runs():
        if run.cluster in ("titan-v-8", "titan-v-16") and run.software == "oneflow":
            data = "real" if run.data == "imagenet" else "synthetic"
            shares = "3:1" if run.cut else run.shares  # as stated; the cut is what the memory of its cards shows
            assert (run.model, run.cluster, run.mode, run.global_batch, shares, data) in ours, str(run)


def test_stages_has_every_mode_for_every_model() -> None:
    for group in read_suite("stages").group:
        modes = [(t.options["plan"]["mode"], t.options.get("run", {}).get("dynamic", False)) for t in group.trial]
        assert modes == [("dp", False), ("sync", False), ("stale", False), ("stale", True), ("pipedream", False)]


def test_devices_and_batch_a_device_become_placement_and_batch() -> None:
    (fp16, fp32) = configurations_of(read_suite("homelab"), SuiteOptions(1, 1))
    config = fp16.resolve(Cluster((Machine(4),), "box"))
    assert (config.plan.placement, config.plan.batch, config.run.precision) == ("0:0-3", 1800, "fp16")
    assert fp32.resolve(Cluster((Machine(4),), "box")).plan.batch == 1000 and fp32.is_baseline
    scaling = {
        configuration.trial.name: configuration
        for configuration in configurations_of(read_suite("scaling"), SuiteOptions(1, 1))
    }
    across = scaling["16 ranks"].resolve(Cluster((Machine(8),) * 4, "four"))
    assert across.plan.placement == "0:0-7,1:0-7" and across.plan.batch == 4096


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
        (
            HEAD + 'trial = [{ name = "a", options = { plan = { bath = 8 } } }]',
            ["plan.bath", "did you mean 'plan.batch'"],
        ),
        (HEAD + 'trial = [{ name = "a", options = { plan = { batch = "x" } } }]', ["plan.batch", "'x'"]),
        ("repeats = 1001\n" + HEAD + 'trial = [{ name = "a" }]', ["repeats is 1001", "at most 1000"]),
        ("repeats = 0\n" + HEAD + 'trial = [{ name = "a" }]', ["repeats is 0"]),
        (HEAD + 'data = ["fake"]\ntrial = [{ name = "a" }]', ["group.0.data.0", "'fake'"]),
    ],
)
def test_a_bad_suite_is_reported_in_one_line(
    content: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    line = fails(capsys, "bench", str(path), "--runs", str(tmp_path / "runs"))
    assert all(word in line for word in words), line
    assert not (tmp_path / "runs").exists()
