"""What keeps CUDA graphs from being tried; the type in which samples are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from stagewright.api.training import train
from stagewright.config.toml import make_config
from stagewright.run.prepare import prepare
from stagewright.runtime.job import Job
from stagewright.runtime.process import assemble
from stagewright.runtime.process.assemble import graph_obstacle, input_dtype
from tests.parity import Case, make_job
from tests.pictures import make_ofrecord

_MAY_DIFFER = "may do something else for another batch"


@pytest.mark.parametrize(
    ("model", "placement", "cut", "words"),
    [
        ("plain", "0:0", None, "use --cuda-graph on"),
        ("dropping", "0:0", None, "use --cuda-graph on"),
        ("sometimes", "0:0", None, _MAY_DIFFER),
        ("untraceable", "0:0", None, _MAY_DIFFER),
        ("plain", "0:0.0:1", "third", "the run has 2 ranks"),
        ("plain", "0:0-1", None, "the run has 2 ranks"),
    ],
)
def test_only_what_is_known_to_run_alike_for_every_batch_on_one_rank_is_captured(
    model: str, placement: str, cut: str | None, words: str, tmp_path: Path
) -> None:
    mode = "stale" if cut else "dp"
    found = graph_obstacle(make_job(Case(model, placement, cut, mode=mode, steps=1), tmp_path))
    assert found is not None and words in found


def test_one_of_our_own_models_is_captured_unless_a_script_trains_it(tmp_path: Path) -> None:
    made = make_job(Case("plain", "0:0", mode="dp", steps=1), tmp_path)

    def named(name: str) -> Job:
        return replace(made, config=replace(made.config, model=replace(made.config.model, name=name)))

    job = named("resnet8")
    assert graph_obstacle(job) is None
    for name in ("timm:resnet18", "torchvision:resnet18"):
        assert "use --cuda-graph on" in str(graph_obstacle(named(name))), "a library's model is other people's code"
    assert graph_obstacle(replace(job, is_scripted=True)) == "a script may change its model between batches"


@pytest.mark.parametrize(
    ("model", "precision", "dtype"),
    [
        ("resnet8", "bf16", torch.bfloat16),
        ("resnet8", "fp32", torch.float32),
        ("tests.models:plain", "bf16", torch.float32),
    ],
)
def test_images_for_our_own_models_are_loaded_in_autocasts_type(
    model: str, precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    run = {"precision": precision, "device": "cpu", "steps": 1, "eval_every": 1, "runs": str(tmp_path)}
    tables = {"model": {"name": model, "classes": 7}, "data": {"image": 8}, "plan": {"batch": 4, "placement": "0:0"}}
    job = prepare(make_config({**tables, "run": run})).job
    assert input_dtype(job) is dtype
    assert job.evaluation is not None
    used = replace(job.evaluation.whole, casts_inputs=False)
    assert input_dtype(replace(job, evaluation=replace(job.evaluation, whole=used))) is torch.float32
    assert input_dtype(replace(job, is_scripted=True)) is torch.float32


_SEEN: list[torch.dtype] = []


def weighted(outputs: Tensor, sample: Mapping[str, Tensor]) -> Tensor:
    """A loss by a weight of each sample."""
    _SEEN.append(sample["weight"].dtype)
    return (functional.cross_entropy(outputs, sample["label"], reduction="none") * sample["weight"]).mean()


@pytest.mark.parametrize("placement", ["0:0", "0:0.0:1"])
def test_numbers_that_the_loss_reads_keep_their_type(placement: str, tmp_path: Path) -> None:
    """365.8788 as bf16 is 366."""
    _SEEN.clear()
    generator = torch.Generator().manual_seed(0)
    fields = {"image": torch.randn(8, 3, 8, 8, generator=generator), "label": torch.arange(8) % 7}
    save_file({**fields, "weight": torch.linspace(365.8788, 615.0356, 8)}, tmp_path / "data.safetensors")
    options = {"data": f"tensors:{tmp_path / 'data.safetensors'}", "inputs": "images=image", "placement": placement}
    loss = f"{__name__}:weighted"
    mode = "dp" if placement == "0:0" else "sync"
    made = train(
        "resnet8", loss=loss, emulate=True, device="cpu", precision="bf16", batch=4, steps=2, mode=mode,
        runs=str(tmp_path), **options,
    )  # fmt: skip
    assert made.steps and set(_SEEN) == {torch.float32}


def test_images_in_autocasts_type_train_and_evaluate_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"ofrecord:{make_ofrecord(tmp_path, 40)}"
    results = []
    for number, choose in enumerate((input_dtype, lambda job: torch.float32)):
        monkeypatch.setattr(assemble, "input_dtype", choose)
        export = str(tmp_path / f"{number}.safetensors")
        options = {"data": data, "image": 24, "batch": 10, "steps": 4, "eval_every": 2, "lr": 0.05, "precision": "bf16"}
        results.append(
            train("resnet8", emulate=True, placement="0:0", device="cpu", runs=str(tmp_path), export=export, **options)
        )
    (some, others), (scores, same) = (run.weights() for run in results), (run.evaluations for run in results)
    assert all(torch.equal(some[name], others[name]) for name in some)
    assert [found.metrics for found in scores] == [found.metrics for found in same] and scores
