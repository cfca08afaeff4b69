"""`stagewright data` and training on real images: what people type, and the mistakes they make."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from stagewright.cli.main import main
from stagewright.config.toml import make_config
from stagewright.data.formats.records import PartRecords
from stagewright.data.order import Order
from stagewright.run.train import prepare, run
from stagewright.runtime.process.emulate import Emulation
from tests.commands import fails
from tests.marks import nightly
from tests.pictures import bytes_feature, jpeg, make_ofrecord, message, write_parts
from tests.shared import shared_file


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_inspect_index_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_ofrecord(tmp_path / "of", 12)
    sheet = tmp_path / "sheet.png"
    text = printed(capsys, "data", "inspect", f"ofrecord:{root}", "--sheet", sheet)
    assert "12 records, 4 classes; all were decoded" in text and "bad records: 0" in text and sheet.exists()
    found = json.loads(printed(capsys, "data", "inspect", root, "--sheet", sheet, "--json"))  # a path without its kind
    assert found["per_class"] == [3, 3, 3, 3] and found["heights"] == {"low": 40, "median": 40, "high": 40}
    assert "12 records, 4 classes" in printed(capsys, "data", "index", root)
    done = json.loads(printed(capsys, "data", "convert", root, f"tar:{tmp_path}/tar", "--limit", 8, "--json"))
    assert done.pop("bytes_read") == done.pop("bytes_written") > 0
    assert done == {"records": 8, "classes": 4, "left_out": []}
    assert json.loads(printed(capsys, "data", "index", tmp_path / "tar", "--json"))["records"] == 8
    assert "8 records" in printed(capsys, "data", "convert", tmp_path / "tar", f"folder:{tmp_path}/folder")
    assert "8 records" in printed(capsys, "data", "index", f"folder:{tmp_path}/folder")


@pytest.mark.timeout(120)
def test_a_sheet_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_ofrecord(tmp_path / "of", 4)
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/proc/self/mem", str(tmp_path)):
        assert path in fails(capsys, "data", "inspect", f"ofrecord:{root}", "--sheet", path)


def test_inspect_names_no_sheet_where_no_record_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data/cat").mkdir(parents=True)
    (tmp_path / "data/cat/a.jpg").write_bytes(b"not a picture")
    sheet = tmp_path / "sheet.png"
    text = printed(capsys, "data", "inspect", f"folder:{tmp_path}/data", "--sheet", sheet)
    assert "0 of 1 records are good" in text and str(sheet) not in text and not sheet.exists()
    found = json.loads(printed(capsys, "data", "inspect", f"folder:{tmp_path}/data", "--sheet", sheet, "--json"))
    assert found["sheet"] is None and len(found["bad"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data", "inspect", "/no/such/place"], ["/no/such/place", "folder:DIR"]),
        (["data", "inspect", "ofrecord:/no/such/place"], ["no such folder"]),
        (["data", "index", "tar:/no/such-*.tar"], ["no tar shards"]),
        (["data", "inspect", "{data}", "--most", "-1"], ["--most is -1"]),
        (["data", "inspect", "{data}", "--image", "-1"], ["--image is -1"]),
        (["data", "inspect", "{data}", "--image", "100000"], ["--image is 100000", "2048"]),
        (["data", "convert", "{data}", "here"], ["'here'", "tar:DIR"]),
        (["data", "convert", "{data}", "tar:{data}"], ["not empty"]),
        (["data", "convert", "text:{data}", "tokens:{data}", "--side", "256"], ["--side", "leave it out"]),
        (["data", "convert", "{data}", "tar:{data}/new", "--limit", "99"], ["--limit is 99", "8 records"]),
        (["data", "bench", "--repeats", "0"], ["--repeats is 0"]),
        (["data", "bench", "--images", "3"], ["--images is 3", "16"]),
        (["train", "--data", "ofrecord:{data}", "--limit", "9"], ["--limit is 9", "8 records"]),
        (["train", "--data", "ofrecord:{data}", "--batch", "16"], ["8 samples", "--batch 8"]),
        (["train", "--data", "ofrecord:{data}", "--classes", "3"], ["labels up to 3", "--classes 4"]),
        (["train", "--data", "ofrecord:{data}", "--normalize", "imagnet"], ["imagnet", "published"]),
        (["train", "--data", "ofrecord:{data}", "--normalize", "nan,1,1/1,1,1"], ["nan,1,1/1,1,1", "means"]),
        (["train", "--data", "ofrecord:{data}", "--normalize", "1,1,1/1,1,inf"], ["1,1,1/1,1,inf", "deviations"]),
        (["train", "--data", "ofrecord:{data}", "--jitter", "1.5"], ["--jitter is 1.5"]),
        (["train", "--data", "ofrecord:{data}", "--image", "32", "--cutout", "33"], ["--cutout is 33", "0 to 32"]),
        (["train", "--data", "ofrecord:{data}", "--loader-threads", "0"], ["--loader-threads is 0"]),
        (["train", "--data", "ofrecord:{data}", "--decode", "gpu"], ["--decode gpu", "--device cuda"]),
        (["train", "--data", "ofrecord:{data}", "--val", "folder:{data}"], ["one subfolder of images"]),
        (["train", "--data", "synthetic", "--limit", "0"], ["--limit is 0", "4096"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_reported_in_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_ofrecord(tmp_path / "data", 8)
    filled = [argument.replace("{data}", str(root)) for argument in arguments]
    if filled[0] == "train":
        filled += ["--steps", "1", "--batch", "8"] if "--batch" not in filled else ["--steps", "1"]
        filled += ["--emulate", "--runs", str(tmp_path / "runs")]
    message = fails(capsys, *filled)
    assert all(word in message for word in words), message


def train(root: Path, runs: Path, **options: object) -> object:
    tables = {
        "model": {"name": "resnet8"},
        "data": {"source": f"ofrecord:{root}", "image": 16},
        "plan": {"placement": "0:0-1.0:2", "mode": "stale", "batch": 8, "microbatches": 4},
        "run": {"steps": 6, "emulate": True, "runs": str(runs)},
    }
    for key, value in options.items():
        section, _, name = key.partition("__")
        tables[section][name] = value
    return run(make_config(tables))


def losses(result: object) -> list[float]:
    return [step.loss for step in result.steps]  # type: ignore[attr-defined]


def test_a_run_is_bit_identical_for_every_format_and_number_of_threads_and_processes(tmp_path: Path) -> None:
    root = make_ofrecord(tmp_path / "of", 20)
    main(["data", "convert", str(root), f"tar:{tmp_path}/tar"])
    one = train(root, tmp_path / "runs", data__loader_threads=1, data__ahead=0)
    five = train(root, tmp_path / "runs", data__loader_threads=5, data__ahead=6)
    shards = train(root, tmp_path / "runs", data__source=f"tar:{tmp_path}/tar")
    processes = train(root, tmp_path / "runs", data__workers=2)
    assert losses(one) == losses(five) == losses(shards) == losses(processes)
    assert losses(one) != losses(train(root, tmp_path / "runs", data__jitter=0.5))
    assert losses(one) != losses(train(root, tmp_path / "runs", data__normalize="published"))


def test_only_the_first_stage_loads_data_and_each_replica_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_ofrecord(tmp_path / "of", 20)
    config = make_config(
        {
            "model": {"name": "resnet8"},
            "data": {"source": f"ofrecord:{root}"},
            "plan": {"placement": "0:0-1.0:2", "batch": 8},
            "run": {"steps": 4, "runs": str(tmp_path)},
        }
    )
    job = prepare(config).job
    emulation = Emulation(job, lambda event: None)
    workers = emulation.workers
    assert [worker.loader is not None for worker in workers] == [True, True, False]
    assert [worker.evaluation_loader is not None for worker in workers] == [True, True, False]
    reads: list[int] = []
    get = PartRecords.get
    monkeypatch.setattr(PartRecords, "get", lambda self, index: reads.append(index) or get(self, index))
    emulation.run()
    order = Order(20, 8)
    assert sorted(reads) == sorted(int(index) for batch in range(4) for index in order.microbatch(batch, 1))


def test_bad_records_are_reported_and_too_many_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [message(jpeg(i, 16, 16), i % 4) for i in range(18)]
    bad = [message(jpeg(1)[:150], 0), bytes_feature("encoded", jpeg(1))]
    root = write_parts(tmp_path / "of", [good[:9] + bad + good[9:]])
    result = train(root, tmp_path / "runs", run__eval_every=0)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]  # type: ignore[attr-defined]
    replaced = sorted(line["index"] for line in lines if line["kind"] == "replaced")
    assert replaced == [9, 10] and result.summary["bad_records"] == 2  # type: ignore[attr-defined]
    assert len(result.evaluations) == 1 and result.evaluations[0].samples == 20  # type: ignore[attr-defined]
    arguments = ["--model", "resnet8", "--image", "16", "--batch", "4", "--steps", "9", "--emulate", "--max-bad", "1"]
    text = fails(capsys, "train", "--data", f"ofrecord:{root}", *arguments, "--runs", str(tmp_path))
    assert "2 bad records" in text and "--max-bad is 1" in text


def test_limit_and_learnable_change_the_data(tmp_path: Path) -> None:
    root = make_ofrecord(tmp_path / "of", 20)
    result = train(root, tmp_path / "runs", data__limit=8, data__val=f"ofrecord:{root}/", run__steps=2)
    assert [step.epoch for step in result.steps] == [0, 1]  # type: ignore[attr-defined]
    assert result.evaluations[-1].samples == 20  # type: ignore[attr-defined]
    synthetic = {"data__source": "synthetic", "run__steps": 2}
    shown = train(root, tmp_path / "runs", **synthetic)
    assert losses(shown) != losses(train(root, tmp_path / "runs", **synthetic, data__learnable=False))


@nightly
def test_learns_some_cifar10_in_a_few_steps(tmp_path: Path) -> None:
    root = shared_file("data/cifar10")
    result = train(
        root / "train", tmp_path, data__image=32, data__limit=1000, plan__batch=64, run__steps=45, run__eval_every=0
    )
    first, last = (torch.tensor(part).mean() for part in (losses(result)[:5], losses(result)[-5:]))
    assert last < first - 0.2 and result.evaluations[-1].metrics["top1"] > 0.2  # type: ignore[attr-defined]
