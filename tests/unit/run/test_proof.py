"""What a run refuses before its first step for the model's sake, and where it says what was proven."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.run import train
from stagewright.run.prepare import prepare
from tests.traits import TRAITS

TWO_REPLICAS = "0:0-1"
TWO_STAGES = "0:0.0:1"


def configured(name: str, folder: Path, placement: str, precision: str = "fp32", **tables: dict[str, Any]) -> Any:
    trait = TRAITS[name]
    inputs, labels = trait.data(16)
    save_file({"images": inputs.contiguous(), "labels": labels}, folder / "data.safetensors")
    given: dict[str, dict[str, Any]] = {
        "model": {"name": trait.model},
        "data": {"source": f"tensors:{folder / 'data.safetensors'}"},
        "plan": {"placement": placement, "mode": "sync", "batch": 8, "microbatches": 2},
        "run": {"steps": 1, "emulate": True, "precision": precision, "runs": str(folder / "runs")},
    }
    for section, options in tables.items():
        given[section] = given.get(section, {}) | options
    return make_config(given, given=())


def test_a_forward_that_changes_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"changes its parameter 'embed\.weight'"):
        prepare(configured("parameters that forward changes", tmp_path, "0:0"))


@pytest.mark.parametrize(
    ("placement", "options", "piece"),
    [(TWO_REPLICAS, {}, "each of 2 replicas"), ("0:0", {"checkpoint": {"every": 1}}, "no checkpoint holds")],
)
def test_state_in_an_attribute_is_refused_with_replicas_and_checkpoints(
    placement: str, options: dict[str, Any], piece: str, tmp_path: Path
) -> None:
    prepare(configured("counter attribute", tmp_path, "0:0"))
    with pytest.raises(UserError, match=f"attribute 'steps'.*{piece}"):
        prepare(configured("counter attribute", tmp_path, placement, **options))


def test_an_attribute_that_no_forward_reads_is_no_state(tmp_path: Path) -> None:
    prepare(configured("output kept as an attribute", tmp_path, TWO_REPLICAS, checkpoint={"every": 1}))


def test_weights_that_no_file_can_hold_are_refused_before_training(tmp_path: Path) -> None:
    run = {"export": str(tmp_path / "w.safetensors")}
    with pytest.raises(UserError, match=r"'blocks\.0\.filter' is complex128"):
        prepare(configured("complex parameters", tmp_path, TWO_STAGES, "fp64", run=run))


def test_lazy_parameters_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="of a lazy module has no shape yet"):
        prepare(configured("lazy modules", tmp_path, "0:0"))


def test_the_log_and_the_page_say_what_was_proven(tmp_path: Path) -> None:
    folder = train.run(configured("no_grad in a block", tmp_path, TWO_STAGES)).folder
    assert "proven: 2 stages" in (folder / "log.txt").read_text()
    assert "proven against the whole model" in (folder / "report.html").read_text()
    unproven = train.run(configured("no_grad in a block", tmp_path, TWO_STAGES, run={"unproven": True})).folder
    assert "not proven" in (unproven / "log.txt").read_text() and not (unproven / "proof.json").exists()
    assert "proven against" not in (unproven / "report.html").read_text()
    whole = train.run(configured("no_grad in a block", tmp_path, "0:0")).folder
    assert "proven" not in (whole / "log.txt").read_text()
