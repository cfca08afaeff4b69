"""Suites measured in turns: what runs, what becomes of the repeats, and what a bench leaves behind; never how fast."""

from __future__ import annotations

import getpass
import json
import re
import socket
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.bench import run as bench_run
from stagewright.bench.predict import Capacity
from stagewright.bench.result import Outcome, Repeat, Row, read_outcome
from stagewright.bench.run import blank_row, nearest_suite, run_repeats, with_repeat, with_speedups
from stagewright.bench.suite import Configuration, SuiteOptions, configurations_of, read_suite
from stagewright.cli.main import main
from stagewright.config.sections import Config
from stagewright.config.toml import make_config
from stagewright.report.html import as_html
from stagewright.report.page import Page
from stagewright.voice import Voice
from tests.commands import fails
from tests.unit.bench.capacities import LAPTOP, ONE_GPU, SERVER, shortages

CONFIGS = {name: make_config() for name in "ABC"}

pytestmark = pytest.mark.xdist_group("suite")  # which is measured once


def repeat(rate: float) -> Repeat:
    return Repeat(rate, 0, True, (1.0,), 2.0, "run")


def row_of(configuration: Configuration, repeats: Iterable[Repeat]) -> Row:
    row = replace(blank_row(configuration, make_config()), kind="measured")
    for one in repeats:
        row = with_repeat(row, one)
    return row


def turns(options: SuiteOptions, folder: Path, fails_at: int = -1) -> tuple[list[str], dict[str, Row]]:
    """What is said while three configurations take turns, and their rows; one run may fail."""
    said: list[str] = []
    rows = {name: Row("g", name, kind="left out") for name in CONFIGS}

    def run_once(row: Row, config: Config, folder: Path) -> Row:
        if len(said) == fails_at:
            return replace(row, kind="failed")
        return replace(row, kind="measured", repeats=(*row.repeats, repeat(1.0)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_run, "run_once", run_once)
        for name, row in run_repeats(rows, CONFIGS, options, folder, Voice(progress=said.append)):
            rows[name] = row
    return said, rows


def test_configurations_take_turns(tmp_path: Path) -> None:
    said, rows = turns(SuiteOptions(2, 1), tmp_path)
    assert said == [f"repeat {number} of 2: {name}" for number in (1, 2) for name in "ABC"]
    assert [len(row.repeats) for row in rows.values()] == [2, 2, 2]


def test_a_failed_configuration_is_left_out_of_later_repeats(tmp_path: Path) -> None:
    said, rows = turns(SuiteOptions(3, 1), tmp_path, fails_at=2)
    assert [text[-1] for text in said] == ["A", "B", "C", "A", "C", "A", "C"] and rows["B"].kind == "failed"


def test_no_repeat_begins_that_would_exceed_the_time_limit() -> None:
    assert SuiteOptions(3, 1).allows(2, 1e9) and not SuiteOptions(3, 1).allows(3, 0.0)
    limited = SuiteOptions(5, 1, limit=90.0)
    assert limited.allows(0, 500.0), "the first repeat always runs"
    assert limited.allows(2, 60.0) and not limited.allows(2, 60.1), "the third would exceed the limit"


def test_outliers_are_marked_and_still_count() -> None:
    configuration = configurations_of(read_suite("quick"), SuiteOptions(5, 1))[0]
    rates = [100.0, 101.0, 99.0, 100.0, 10.0, 11.0, 12.0]
    row = row_of(configuration, [repeat(rate) for rate in rates])
    assert row.rate is not None and row.rate.value == 99.0, "the median of all seven"
    assert [entry.rate for entry in row.repeats] == rates
    steady = row_of(configuration, [repeat(rate) for rate in (100, 101, 99, 100, 102, 98, 10)])
    assert steady.outliers == (6,) and len(steady.repeats) == 7


def test_speedups_are_ratios_to_the_baseline_repeat_by_repeat() -> None:
    dp, stale = configurations_of(read_suite("quick"), SuiteOptions(5, 1))
    disturbance = (1.0, 0.5, 2.0, 0.9, 1.2)
    rows = with_speedups(
        [
            row_of(dp, [repeat(100 * d) for d in disturbance]),
            row_of(stale, [repeat(130 * d) for d in disturbance]),
        ]
    )
    assert rows[0].is_baseline and rows[0].speedup is not None and rows[0].speedup.value == 1.0
    assert rows[1].speedup is not None and rows[1].speedup.low == pytest.approx(1.3)
    assert not rows[1].speedup.holds(1.0) and rows[1].speedup.high == pytest.approx(1.3)


def test_memory_is_the_maximum_over_all_repeats() -> None:
    configuration = configurations_of(read_suite("quick"), SuiteOptions(2, 1))[0]
    repeats = [Repeat(1.0, 0, True, (), None, "r", memory=memory) for memory in ((5, 9), (7, 3))]
    assert row_of(configuration, repeats).memory == (7, 9)


def test_a_bench_leaves_four_files(folder: Path) -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-bench-tiny", folder.name)
    assert {path.name for path in folder.iterdir()} == {"bench.json", "report.md", "report.html", "logs.zip"}


def test_the_outcome_has_every_repeat_of_every_configuration(outcome: Outcome) -> None:
    assert [row.name for row in outcome.rows] == ["dp", "stale"] and outcome.is_whole
    for row in outcome.rows:
        assert row.kind == "measured" and len(row.repeats) == 3 and row.rate is not None
        assert row.rate.low <= row.rate.value <= row.rate.high
        assert all(len(repeat.times) == 6 and repeat.rate > 0 for repeat in row.repeats)
        assert len({repeat.loss for repeat in row.repeats}) == 1, "the same work has the same loss"
    base, stale = outcome.rows
    assert base.speedup is not None and base.speedup.value == 1.0 and stale.speedup is not None
    assert (
        stale.cuts == ("layer3.0.conv1",)
        and stale.versions == (2, 1)
        and stale.step_lines[0].startswith("epoch 1  step 1/6")
    )


def test_the_zip_holds_the_logs_of_every_run(folder: Path) -> None:
    with zipfile.ZipFile(folder / "logs.zip") as file:
        names = {name.partition("/")[2] for name in file.namelist()}
        assert file.testzip() is None and not names & {".lock", "report.html", "ranks/0.at"}
    assert {"config.toml", "metrics.jsonl", "summary.json", "log.txt", "output.txt", "env.json"} <= names


def test_the_report_has_tables_repeats_environment_and_commands(folder: Path, outcome: Outcome) -> None:
    text = (folder / "report.md").read_text()
    for heading in ("## ResNet-8: configuration", "## Every repeat", "## Environment", "## Commands"):
        assert heading in text
    assert "memory by stage, MiB" in text and "ImageNet epoch, s" in text
    assert "stagewright train --model resnet8 --samples 64 --placement 0:0.0:1 --cut layer3 --mode stale" in text
    for row in outcome.rows:
        assert all(f"{repeat.rate:,.1f}" in text for repeat in row.repeats)
    page = (folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>") and "stale" in page


def secrets() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "home": str(Path.home()),
        "folder": str(Path.cwd()),
        "source": str(Path(__file__).parents[3]),
    }


def test_an_anonymised_bench_names_no_machine_user_or_path(folder: Path, outcome: Outcome) -> None:
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".zip"}
    for asset in re.findall(r"<(style|script)>(.*?)</\1>", as_html(Page("", ())), re.DOTALL):
        texts["report.html"] = texts["report.html"].replace(asset[1], "")  # the same in every page
    with zipfile.ZipFile(folder / "logs.zip") as file:
        texts |= {f"logs.zip/{name}": name + "\n" + file.read(name).decode() for name in file.namelist()}
    for name, text in texts.items():
        for what, secret in secrets().items():
            assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", text), f"{what} in {name}"
        assert str(folder.parent) not in text, f"a path in {name}"
        assert not re.search(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", text), f"a UUID in {name}"
    assert outcome.is_anonymised and "--anonymise" in outcome.command


def test_logs_keep_paths_without_anonymise(suite: Path, tmp_path: Path) -> None:
    main(["bench", str(suite), *["--repeats", "1", "--steps", "1", "--only", "dp", "--json", "--runs"], str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    with zipfile.ZipFile(folder / "logs.zip") as file:
        (summary,) = [name for name in file.namelist() if name.endswith("summary.json")]
        assert json.loads(file.read(summary))["folder"].startswith(str(tmp_path))


def test_other_configurations_run_although_one_fails(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text(suite.read_text().replace('cut = "layer3"', 'cut = "nowhere"'))
    with pytest.raises(SystemExit) as caught:
        main(["bench", str(broken), "--repeats", "1", "--steps", "2", "--runs", str(tmp_path / "runs")])
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert caught.value.code == 2 and "1 of 2 configurations failed" in last and "nowhere" in last
    (folder,) = (tmp_path / "runs").iterdir()
    rows = read_outcome(folder).rows
    assert [row.kind for row in rows] == ["measured", "failed"] and "dp" in printed.out


def test_an_interrupted_bench_keeps_what_it_measured(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    run_once, taken = bench_run.run_once, []

    def interrupted(row: Row, config: Config, folder: Path) -> Row:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(row)
        return run_once(row, config, folder)

    monkeypatch.setattr(bench_run, "run_once", interrupted)
    with pytest.raises(SystemExit):
        main(["bench", str(suite), "--steps", "2", "--runs", str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"stagewright: interrupted after 2 runs; nothing is left running; what was measured is in {folder}"
    outcome = read_outcome(folder)
    assert not outcome.is_whole and [len(row.repeats) for row in outcome.rows] == [1, 1]
    assert "interrupted" in (folder / "report.md").read_text() and (folder / "logs.zip").is_file()
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("capacity", "nearest"), [(LAPTOP, "quick"), (ONE_GPU, "quick"), (SERVER, "homelab")])
def test_the_nearest_suite_fits_the_machine(capacity: Capacity, nearest: str) -> None:
    found = nearest_suite(capacity)
    assert found is not None and all(lack is None for lack in shortages(found, capacity).values())
    assert found == nearest or capacity is ONE_GPU


def test_a_suite_that_does_not_fit_names_one_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.bench.run.local_capacity", lambda: LAPTOP)
    line = fails(capsys, "bench", "stages", "--runs", str(tmp_path))
    assert "needs 8 GPUs, this machine has 0" in line and "bench quick runs here" in line and "--simulate" in line
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`stagewright bench stages --simulate --cluster titan-v-8`."""
    runs = tmp_path_factory.mktemp("runs")
    main(["bench", "stages", "--simulate", "--cluster", "titan-v-8", "--runs", str(runs)])
    (folder,) = runs.iterdir()
    return folder


def test_predicted_rows_name_their_cluster(simulated: Path) -> None:
    outcome = json.loads((simulated / "bench.json").read_text())
    assert {row["kind"] for row in outcome["rows"]} == {"predicted"} and len(outcome["rows"]) == 30
    where = {row["group"]: row["cluster"] for row in outcome["rows"]}
    assert where == {"VGG-16": "titan-v-8", "AlexNet": "titan-v-8", "ResNet-50": "titan-v-16"}
    stale = next(row for row in outcome["rows"] if row["name"] == "stale 7+1" and row["group"] == "VGG-16")
    assert stale["speedup"]["value"] > 1.3 and stale["cuts"] == ["features.24"] and len(stale["memory"]) == 2
    reasons = {row["reason"] for row in outcome["rows"] if row["group"] == "ResNet-50"}
    assert reasons == {"has more devices than titan-v-8"}
