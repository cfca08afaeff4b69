"""What `--placement auto` comes to: which profiles it makes, which plan it chooses, and what it never does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from stagewright.cluster.catalog import open_cluster
from stagewright.config.commands import completed
from stagewright.config.sections import Config
from stagewright.config.toml import make_config, read_toml
from stagewright.errors import UserError
from stagewright.hardware.devices import default_precision, with_devices
from stagewright.planning.question import Question
from stagewright.planning.traced import trace_model
from stagewright.profile.profile import Ceilings, Profile, Table, Transfer, Unit
from stagewright.run import plan as planning
from stagewright.run import prepare as preparing
from stagewright.run import profile as profiles
from stagewright.run.plan import ask, auto_plan_lines, find_plan
from stagewright.run.prepare import prepare
from stagewright.run.profile import Subject
from stagewright.run.train import run
from stagewright.voice import Voice
from tests.commands import prints

MODEL = "vgg-small"
Made = list[tuple[int, int]]  # processes at once and threads of each profile that was made


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *majors: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(majors))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(majors))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (majors[index], 0))


def fake_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 8, 8, 8, 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(profiles, "own_cluster", lambda: open_cluster("rtx-2080ti-4"))
    monkeypatch.setattr(planning, "num_devices", lambda device: 4)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """A machine of two cores whose profiles are made up: two ranks are faster than one process with both cores."""
    found: Made = []
    units = trace_model(MODEL).shapes

    def measured(subject: Subject, voice: object = None, form: object = None) -> Profile:
        found.append((subject.together, subject.threads))
        (precision,) = subject.precisions
        tables = tuple(
            Table(
                precision,
                samples,
                tuple(
                    Unit(unit.name, str(unit.kind), 1e-4 * samples, 2e-4 * samples, 10, 4, 4, 4, 4, frozen=0)
                    for unit in units
                ),
            )
            for samples in subject.samples
        )
        links = tuple(Transfer(a, 1 - a, 1e9, 1e-5) for a in range(subject.together) if subject.together == 2)
        ceilings = Ceilings({precision: 1e11}, 1e10, 1e9, 1e9 if links else None, links)
        return Profile(MODEL, subject.device, "stagewright", (3, 32, 32), subject.together, ceilings, tables)

    fake_gpus(monkeypatch)
    monkeypatch.setattr(profiles, "measure_profile", measured)
    for module in (profiles, planning, preparing):
        monkeypatch.setattr(module, "num_cores", lambda: 2)
    monkeypatch.setattr(planning, "num_devices", lambda device: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profiles, "busy_seconds", lambda **_: 0.0)  # other tests run meanwhile
    return found


def resolved(**plan: Any) -> Config:
    plan = {"batch": 32} | plan
    model = {"name": MODEL, "classes": 10}
    return with_devices(make_config({"model": model, "data": {"image": 32}, "plan": plan}))


def auto_plan_of(config: Config, note: Callable[[str], None] = lambda line: None, **more: Any) -> planning.AutoPlan:
    units = [shape.name for shape in trace_model(MODEL).shapes]
    return find_plan(Question(config), units, None, Voice(note=note), **more)


def test_auto_is_the_gpus_in_bf16_where_all_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 8, 9)
    run = with_devices(make_config()).run
    assert (run.device, run.precision) == ("cuda", "bf16")
    assert with_devices(make_config({"run": {"precision": "fp16"}})).run.precision == "fp16"
    with pytest.raises(UserError, match=r"fp64.*with --device cuda"):
        with_devices(make_config({"run": {"precision": "fp64"}}))
    fake_gpus(monkeypatch, 8, 7)
    assert default_precision("cuda") == "fp32"
    fake_gpus(monkeypatch)
    run = with_devices(make_config()).run
    assert (run.device, run.precision) == ("cpu", "fp32")
    with pytest.raises(UserError, match=r"fp16.*with --device cpu; it needs --device cuda"):
        with_devices(make_config({"run": {"precision": "fp16"}}))


def test_profiles_once_and_says_what_was_chosen_why_and_how_to_keep_it(made: Made) -> None:
    said: list[str] = []
    auto = auto_plan_of(resolved(), said.append)
    assert sorted(made) == [(1, 2), (2, 1)], "two ranks of a thread, and one process with two"
    assert len(said) == 1 and "profiling" in said[0]
    lines = auto_plan_lines(auto)
    assert (str(auto.plan.mode), auto.plan.shape, auto.threads) == ("dp", "2", 1)
    assert "dp on 2 CPU ranks" in lines[0] and "measured here" in lines[0] and "one process would reach" in lines[1]
    assert lines[2].endswith(" --device cpu --precision fp32 --mode dp --placement 0:0-1 --batch 32 --microbatches 2")
    assert auto.interval is not None and auto.prediction is not None
    assert auto.interval.low < auto.prediction.images_per_second < auto.interval.high
    assert auto_plan_lines(auto_plan_of(resolved(), said.append)) == lines
    assert len(made) == 2 and len(said) == 1, "the second time both are in the cache"


def test_a_small_batch_gets_a_profile_of_small_microbatches(made: Made) -> None:
    assert auto_plan_of(resolved(batch=8), always=True).searched is not None
    assert auto_plan_of(resolved(), always=True).searched is not None
    assert len(made) == 4, "which a usual batch does not take"
    assert auto_plan_of(resolved(batch=2), always=True).searched is not None


def test_a_profile_of_a_busy_machine_is_not_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, said = count(step=1000.0), list[str]()
    monkeypatch.setattr(profiles, "busy_seconds", lambda **_: next(busy))
    monkeypatch.setattr(profiles, "LEAST_SECONDS", 0.0)
    auto_plan_of(resolved(), said.append)
    assert "of 2 cores busy during the profile" in said[-1]
    auto_plan_of(resolved(), said.append)
    assert len(made) == 4, "both are made anew"


def test_gpus_that_sum_gradients_through_the_host_get_the_plan_that_is_fastest_there(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_four_gpus(monkeypatch)
    config = resolved(batch=128)
    auto = auto_plan_of(config)
    assert (config.run.device, config.run.precision, made) == ("cuda", "bf16", [(1, 1)])
    assert auto.searched is not None and len(auto.searched.asked.setting.cluster.devices) == 4
    assert auto.plan.is_synchronous and "--device cuda --precision bf16" in "".join(auto_plan_lines(auto))


def test_plan_takes_the_precision_that_train_would_or_that_of_the_profile(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def precision_of(**given: Any) -> str:
        return ask(Question.of("plan", completed("plan", {"model": MODEL, "batch": 64, **given}))).setting.precision

    file = tmp_path / "profile.json"
    for precision in ("bf16", "fp32"):
        profiles.measure_profile(Subject(MODEL, (8, 32), (precision,), "cpu", together=2)).write(file)
        assert precision_of(profile=str(file)) == precision
    assert (precision_of(), precision_of(cluster="rtx-2080ti-4")) == ("fp32", "fp32")
    assert precision_of(cluster="rtx-2080ti-4", precision="fp16") == "fp16"
    fake_four_gpus(monkeypatch)
    assert precision_of() == "bf16"


def test_weights_lag_only_where_that_was_asked_for(made: Made) -> None:
    assert auto_plan_of(resolved()).plan.is_synchronous
    assert {str(c.plan.mode) for c in candidates(resolved())} == {"dp", "sync"}
    assert "stale" in {str(c.plan.mode) for c in candidates(resolved(mode="stale"))}
    assert "stale" in {str(c.plan.mode) for c in candidates(resolved(staleness=1))}
    assert {str(c.plan.mode) for c in candidates(resolved(mode="dp"))} == {"dp"}


def candidates(config: Config) -> tuple[Any, ...]:
    searched = auto_plan_of(config).searched
    assert searched is not None
    return searched.choice.candidates


def test_what_needs_no_search_has_none(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    short = find_plan(Question(resolved()), [shape.name for shape in trace_model(MODEL).shapes], 2)
    emulated = make_config({"model": {"name": MODEL}, "plan": {"batch": 32}, "run": {"emulate": True}})
    alone = auto_plan_of(with_devices(emulated))
    monkeypatch.setattr(planning, "num_devices", lambda device: 1)
    single = auto_plan_of(resolved(), always=True)
    assert {auto.plan.world for auto in (short, alone, single)} == {1} and not made
    assert "too short to profile" in auto_plan_lines(short)[0] and "one core" in auto_plan_lines(single)[0]


def test_a_model_that_no_profile_can_call_is_trained_by_one_process(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any) -> Profile:
        raise UserError("a profile is of a model with one input")

    monkeypatch.setattr(profiles, "measure_profile", refused)
    auto = auto_plan_of(resolved())
    assert (auto.plan.world, auto.threads) == (1, 2) and "one input" in "".join(auto_plan_lines(auto))


def test_explain_prints_the_candidates_and_trains_nothing(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = prints(capsys, "train", "--batch", "32", "--steps", "1", "--explain", "--runs", str(tmp_path / "runs"))
    assert "dp 2" in printed and "sync 1-1" in printed and "--placement 0:0-1" in printed
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_has_the_layout_that_was_chosen_and_searches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch)
    first = {"checkpoint": {"every": 1}, "run": {"steps": 1, "emulate": True, "runs": str(tmp_path)}}
    folder = run(make_config({"plan": {"batch": 8}}, first)).folder
    kept = read_toml(str(folder / "config.toml"))
    assert (kept["plan"]["placement"], kept["plan"]["mode"], kept["run"]["device"]) == ("0:0", "dp", "cpu")
    assert folder.name.endswith("-dp-1"), "one stage is never stale"

    def searched(*given: Any, **more: Any) -> None:
        raise AssertionError("a resumed run searches a plan")

    monkeypatch.setattr(preparing, "find_plan", searched)
    from_there = {"plan": kept["plan"], "run": kept["run"] | {"steps": 2, "resume": str(folder)}}
    assert run(make_config(first, from_there, given=())).summary["batches"] == 2


def test_classes_and_the_batch_are_those_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "data.safetensors"
    save_file({"images": torch.zeros(20, 3, 32, 32), "labels": torch.arange(20) % 3}, file)
    warnings: list[str] = []
    said: list[str] = []
    common = {
        "data": {"source": f"tensors:{file}"},
        "run": {"steps": 1, "emulate": True, "device": "cpu", "runs": str(tmp_path)},
    }
    job = prepare(make_config(common), Voice(warnings.append, said.append)).job
    assert (job.config.model.classes, job.plan.batch) == (3, 8) and not warnings
    assert "3 classes" in said[0] and "batch 8" in said[0]
    prepare(make_config(common, {"model": {"classes": 10}}), Voice(warnings.append))
    assert len(warnings) == 1 and "10 outputs" in warnings[0] and "3 classes" in warnings[0]
    with pytest.raises(UserError, match="labels up to 2 but the model has 2 outputs"):
        prepare(make_config(common, {"model": {"classes": 2}}))


def test_small_images_are_not_enlarged_and_few_of_them_get_advice(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number, side in enumerate((90, 110, 120, 139)):
            Image.new("RGB", (side, side)).save(tmp_path / "photos" / name / f"{number}.png")
    said: list[str] = []
    common: dict[str, Any] = {
        "model": {"name": "mobilenet_v2"},
        "data": {"source": f"folder:{tmp_path / 'photos'}"},
        "run": {"steps": 1, "emulate": True, "device": "cpu", "runs": str(tmp_path)},
    }
    job = prepare(make_config(common), Voice(note=said.append)).job
    assert job.config.data.image == 96 and "side 96, as the median has 115 pixels (the model's is 224)" in said[0]
    (advice,) = [line for line in said if "advice" in line]
    assert "8 images" in advice and "1,000" in advice and "--init" in advice
    said.clear()
    prepare(make_config(common, {"model": {"name": "vgg-small"}}), Voice(note=said.append))
    assert not any("advice" in line for line in said), "of a model without public weights there is none"


def test_stages_need_a_placement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--cut classifier.*--placement is auto"):
        prepare(make_config({"plan": {"cut": "classifier"}, "run": {"steps": 1, "runs": str(tmp_path)}}))
    with pytest.raises(UserError, match=r"--nodes names 10\.0\.0\.1"):
        prepare(make_config({"nodes": {"list": "10.0.0.1,10.0.0.2"}, "run": {"runs": str(tmp_path)}}))
