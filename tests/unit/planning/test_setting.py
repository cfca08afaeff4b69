"""Settings: what the catalog or a profile decides, and which machines a run is planned and predicted on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.config.sections import Config
from stagewright.config.toml import FIXED, make_config
from stagewright.errors import UserError
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.planning.predict import predict
from stagewright.planning.run_setting import config_setting, memory_setting, planning_setting, prediction_setting
from stagewright.planning.setting import make_setting
from stagewright.planning.traced import chain_of, trace_model
from stagewright.profile.profile import Ceilings, Profile, Table, Transfer, Unit

SHAPES = trace_model("resnet8", image=16).shapes
TWO = make_plan(parse_placement("0:0.0:1"), batch=16, microbatches=2, mode=Mode.SYNC)


def profile_of(*names: str, together: int = 2, has_links: bool = True) -> Profile:
    units = tuple(Unit(name, "linear", 1.0, 2.0, 9, 9, 9, 9, 9) for name in names)
    links = (Transfer(0, 1, 1e9, 1e-5),) if has_links else ()
    ceilings = Ceilings({"fp32": 1e9}, 1e9, 5e8, 1e8, links, 0.25)
    return Profile("m", "cpu", "stagewright", (3, 4, 4), together, ceilings, (Table("fp32", 8, units),))


def config_of(profile: Profile, path: Path) -> Config:
    profile.write(path)
    return make_config(FIXED, {"model": {"name": "resnet8"}, "data": {"image": 16}, "plan": {"profile": str(path)}})


def test_a_configuration_with_averaged_weights_counts_them(tmp_path: Path) -> None:
    config = config_of(profile_of("a", "b"), tmp_path / "p.json")
    averaged = replace(config, optimizer=replace(config.optimizer, ema=0.9))
    profile = profile_of("a", "b")
    found = [config_setting(one, None, profile).is_averaged for one in (config, averaged)]
    assert found == [False, True]


def test_the_catalog_decides_by_software_precision_and_data() -> None:
    cluster = shipped().cluster("titan-v-8")
    plain = make_setting(SHAPES, cluster, "fp32")
    assert plain.software is shipped().system("stagewright") and plain.loader is None and plain.covers(10**6)
    other = make_setting(SHAPES, cluster, "fp16", optimizer="adamw", software="pytorch", loads=True)
    assert other.software is shipped().system("pytorch") and other.optimizer == "adamw"
    assert other.loader == shipped().decode * (cluster.machines[0].cores or 1)
    seconds = [setting.tables("titan-v", 8).seconds for setting in (plain, other)]
    assert seconds[0] != seconds[1] and plain.tables("titan-v", 16).seconds > seconds[0]


def test_a_profile_decides_devices_software_and_sizes() -> None:
    setting = make_setting(profile_of("a", "b"), None, "fp32", software="pytorch", loads=True)
    assert setting.cluster.name == "the profiled machine" and len(setting.cluster.devices) == 2
    assert setting.software.name == "stagewright" and setting.software.update_passes == 2.0
    assert setting.software.context == setting.software.workspace == 0 and setting.loader is None
    assert (setting.overhead, setting.input, setting.covered) == (0.25, 48, (8, 8))
    assert [unit.name for unit in setting.tables("cpu", 8).units] == ["a", "b"]
    elsewhere = make_setting(profile_of("a", "b"), shipped().cluster("titan-v-8"), "fp32")
    assert elsewhere.cluster.name == shipped().cluster("titan-v-8").name
    with pytest.raises(UserError, match="has no links; profile again with --together 2"):
        make_setting(profile_of("a", has_links=False), None, "fp32")


def test_what_gpus_lose_by_steps_and_scaling_is_not_lost_on_cpus() -> None:
    """It made training on CPUs choose no lag at all."""
    shapes = trace_model("vgg-small").shapes
    level = Level(Link("memory", 1e9, 0.0), ((0, 1),))
    on_cpus, on_cards = (
        make_setting(shapes, Cluster((Machine(2, kind, (level,)),)), "fp32").software for kind in ("cpu", "titan-v")
    )
    assert on_cards.overhead > 0 and on_cards.jitter > 0
    assert on_cpus.overhead == on_cpus.jitter == on_cpus.half_jitter == on_cpus.network_jitter == 0


def test_the_measured_machine_has_the_slowest_of_its_links() -> None:
    links = (Transfer(0, 1, 3e9, 1e-5), Transfer(0, 2, 1e9, 2e-5), Transfer(1, 2, 2e9, 3e-5))
    ceilings = Ceilings({"fp32": 1e9}, 1e9, 5e8, 1e8, links)
    cluster = make_setting(replace(profile_of("a", together=3), ceilings=ceilings), None, "fp32").cluster
    found = {cluster.link(one, other) for one, other in combinations(cluster.devices, 2)}
    assert {(link.bandwidth, link.latency) for link in found} == {(1e9, 2e-5)}


def test_a_run_is_planned_by_its_profile_or_by_the_catalog(tmp_path: Path) -> None:
    chain = chain_of("resnet8", 10, 16)
    placement = parse_placement("0:0-2.0:3")
    measured = planning_setting(config_of(profile_of(*chain.units), tmp_path / "p.json"), chain, placement)
    assert measured is not None and measured.covered == (8, 8)
    with pytest.raises(UserError, match="the model is resnet8"):
        planning_setting(config_of(profile_of("a", "b"), tmp_path / "p.json"), chain, placement)
    computed = planning_setting(
        make_config(FIXED, {"model": {"name": "resnet8"}, "data": {"image": 16}}), chain, placement
    )
    assert computed is not None and len(computed.cluster.devices) == 4 and computed.covered is None
    assert planning_setting(make_config(FIXED, {"model": {"name": "no.such:net"}}), chain, placement) is None


def test_a_run_is_predicted_only_by_a_profile_of_as_many_processes(tmp_path: Path) -> None:
    assert prediction_setting(make_config(FIXED), TWO) is None
    found = prediction_setting(config_of(profile_of("a", "b"), tmp_path / "p.json"), TWO)
    assert found is not None and len(found.cluster.devices) == 2
    single = config_of(profile_of("a", together=1, has_links=False), tmp_path / "p.json")
    with pytest.raises(UserError, match=r"1 process .* 2 ranks; profile again with --together 2"):
        prediction_setting(single, TWO)
    alone = prediction_setting(single, make_plan(parse_placement("0:0"), batch=8))
    assert alone is not None and len(alone.cluster.devices) == 1


def test_memory_on_cpus_has_no_share_of_cuda() -> None:
    tables = {"model": {"name": "resnet8"}, "data": {"image": 16}}
    on_cpu, on_gpu = (
        memory_setting(make_config(FIXED, tables | {"run": {"device": device}}), TWO) for device in ("cpu", "cuda")
    )
    assert on_cpu.software.context == on_cpu.software.workspace == 0 < on_gpu.software.context
    assert on_cpu.cluster.kind_of(TWO.devices[1]) == "cpu" != on_gpu.cluster.kind_of(TWO.devices[1])


def test_the_setting_of_a_model_knows_what_its_cuts_tie() -> None:
    """Moving a model to tensors without storage must not make two parameters of a tied one."""
    traced = trace_model("tests.models:tied", None, 8)
    (tied,) = traced.tied(("third",))
    assert (tied.names, tied.homes, tied.size) == (("second.weight", "third.weight"), (0, 1), 4 * 4 * 9)
    weights = sum(parameter.numel() for parameter in chain_of("tests.models:tied", None, 8).model.parameters())
    assert sum(shape.parameters for shape in traced.shapes) == weights


def test_the_planner_plans_ties_with_what_they_cost() -> None:
    traced = trace_model("tests.models:tied", None, 8)
    cluster = shipped().cluster("rtx-3090-2")
    setting = make_setting(traced.shapes, cluster, "fp32", tied=traced.tied)
    plan = make_plan(
        (cluster.devices[:1], cluster.devices[1:]), batch=8, microbatches=8, mode=Mode.STALE, cuts=("third",)
    )
    found, without = (predict(plan, one) for one in (setting, replace(setting, tied=None)))
    assert [stage.versions for stage in found.plan.stages] == [2, 2] and len(found.plan.ties) == 1
    assert found.memory[1].weights > without.memory[1].weights
    assert found.traffic > without.traffic
