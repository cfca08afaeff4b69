"""`stagewright.train`: the command line's options as keywords, and a script's objects where it takes names."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import stagewright
from stagewright import objects
from stagewright.cluster.placement import parse_placement
from stagewright.events import Evaluated, Saved, Step
from stagewright.plan.make import make_plan
from tests import make_options

_GENERATOR = torch.Generator().manual_seed(3)
_NUMBERS = torch.randn(24, 6, generator=_GENERATOR)
_LABELS = (_NUMBERS.sum(1) > 0).long()
PAIRS = TensorDataset(_NUMBERS, _LABELS)
ONE: dict[str, Any] = {"emulate": True, "monitor_every": 0, "batch": 8, "lr": 0.1, "shuffle": False}


class Named:
    """Samples with names."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"numbers": _NUMBERS[index], "target": _LABELS[index], "weight": 1.0 + index % 2}


def make_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10))


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def right(outputs: Tensor, target: Tensor) -> float:
    return float((outputs.argmax(1) == target).double().mean())


def weighted(outputs: Tensor, sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = functional.cross_entropy(outputs, sample["target"], reduction="none")
    return (each * sample["weight"]).sum(), sample["weight"].sum()


def plain(net: nn.Module, steps: int) -> nn.Module:
    """The same training, as a loop of one's own."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        rows = slice(8 * (step % 3), 8 * (step % 3) + 8)
        optimizer.zero_grad()
        functional.cross_entropy(net(_NUMBERS[rows]), _LABELS[rows]).backward()
        optimizer.step()
    return net


KNOWN = set[str]()  # objects of other tests


@pytest.fixture(autouse=True)
def _known() -> None:
    KNOWN.clear()
    KNOWN.update(objects.given())


def left_over() -> set[str]:
    """The objects that a call should have forgotten."""
    return objects.given().keys() - KNOWN


def test_train_takes_options_as_keywords_and_returns_the_result(tmp_path: Path) -> None:
    result = stagewright.train(
        make_net, image=8, samples=96, placement="0:0-1.0:2", mode="stale", batch=16, steps=12, eval_every=6,
        optimizer="adamw", lr=0.01, emulate=True, runs=tmp_path, export=tmp_path / "out.safetensors",
    )  # fmt: skip
    assert len(result.steps) == 12 and [evaluated.batch for evaluated in result.evaluations] == [6, 12]
    assert result.steps[-1].loss < result.steps[0].loss
    assert result.summary["plan"]["versions"] == [2, 1] and result.folder.parent == tmp_path
    make_net().load_state_dict(result.weights())
    (process,) = result.summary["use"]["ranks"]  # an emulated run is one process
    assert process["rank"] == 0 and process["peak_memory"] > 10 << 20 and result.summary["use"]["moments"] >= 2


def test_objects_train_as_a_loop_of_ones_own_does_and_stay_as_they_are(tmp_path: Path) -> None:
    net = small_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    result = stagewright.train(
        net, PAIRS, val=PAIRS, loss=nn.CrossEntropyLoss(), metrics={"right": right}, placement="0:0.0:1", mode="sync",
        epochs=2, runs=tmp_path, **ONE,
    )  # fmt: skip
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not left_over()
    expected = plain(net, 6)
    trained = result.load_into(small_net())
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    last = result.evaluations[-1]
    assert last.metrics["right"] == pytest.approx(right(expected(_NUMBERS), _LABELS))
    assert result.exported == result.folder / "weights.safetensors"
    assert "-Sequential" in result.folder.name


def test_a_loss_gets_all_fields_of_named_samples_and_collate_stacks_them(tmp_path: Path) -> None:
    sizes = []

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        sizes.append(len(samples))
        return {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in samples[0]}

    result = stagewright.train(
        lambda: small_net(), Named, collate=collate, loss=weighted, inputs="numbers", steps=1, runs=tmp_path, **ONE
    )
    assert len(result.steps) == 1 and 4 in sizes
    weights = torch.tensor([1.0, 2.0] * 4)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        logits = small_net()(_NUMBERS[:8])
    each = functional.cross_entropy(logits, _LABELS[:8], reduction="none")
    assert result.steps[0].loss == pytest.approx(float((each * weights).sum() / weights.sum()), rel=1e-5)


def test_an_optimizer_of_ones_own_and_groups_train(tmp_path: Path) -> None:
    given: dict[str, Any] = {"placement": "0:0.0:1", "mode": "sync", "steps": 3, "runs": tmp_path, **ONE}
    net = small_net()
    sgd = stagewright.train(net, PAIRS, group=[{"pattern": "2.*", "lr": 0.0}], **given).weights()
    assert torch.equal(sgd["2.weight"], net.state_dict()["2.weight"])  # its rate is 0
    own = stagewright.train(
        net, PAIRS, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        **{name: value for name, value in given.items() if name != "lr"},
    )  # fmt: skip
    expected = plain(net, 3)
    for name, tensor in own.weights().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])


def test_callbacks_see_every_record_in_order_and_may_stop_the_run(tmp_path: Path) -> None:
    seen: list[Any] = []

    def listen(record: Any) -> bool:
        seen.append(record)
        return isinstance(record, Step) and record.batch == 3

    given: dict[str, Any] = {"val": PAIRS, "eval_every": 2, "epochs": 5, "runs": tmp_path, **ONE}
    result = stagewright.train(net := small_net(), PAIRS, callbacks=[listen, lambda record: None], **given)
    assert [record.batch for record in seen if isinstance(record, Step)] == list(range(len(result.steps)))
    assert 4 <= len(result.steps) < 15 and any(isinstance(record, Saved) for record in seen)
    assert [type(record) for record in seen[:3]] == [Step, Step, Evaluated]
    expected = plain(net, len(result.steps))
    for name, tensor in result.weights().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    resumed = stagewright.train(small_net(), PAIRS, resume=result.folder, val=PAIRS)
    assert len(resumed.steps) == 15 and resumed.folder == result.folder


def test_what_a_callback_raises_is_raised_after_a_checkpoint(tmp_path: Path) -> None:
    def broken(record: Any) -> None:
        raise LookupError("no such key")

    with pytest.raises(LookupError, match="no such key") as error:
        stagewright.train(small_net(), PAIRS, callbacks=broken, epochs=9, runs=tmp_path, **ONE)
    assert "resume with resume='" in error.value.__notes__[0]
    (run,) = tmp_path.iterdir()
    assert list((run / "checkpoints").iterdir()) and not left_over()


def test_a_plan_may_be_given_as_a_value(tmp_path: Path) -> None:
    first = stagewright.train(
        small_net(), PAIRS, placement="0:0.0:1", mode="sync", cut="2", steps=1, runs=tmp_path, **ONE
    )
    second = stagewright.train(
        small_net(), PAIRS, plan=first.plan, steps=1, runs=tmp_path, emulate=True, monitor_every=0
    )
    assert second.plan == first.plan
    with pytest.raises(stagewright.UserError, match="--batch 8 changes nothing with --plan"):
        stagewright.train(small_net(), PAIRS, plan=first.plan, steps=1, runs=tmp_path, **ONE)


def test_the_state_of_the_calling_process_stays_as_it_was(tmp_path: Path) -> None:
    def state() -> list[Any]:
        generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
        return [*generators, torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()]

    net = small_net()
    before = state()
    stagewright.train(net, PAIRS, placement="0:0.0:1", steps=2, runs=tmp_path, **ONE)
    assert state() == before


def test_progress_is_shown_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (None, True):
        stagewright.train(small_net(), PAIRS, steps=2, progress=progress, runs=tmp_path, **ONE)
        out = capsys.readouterr().out
        assert ("step 2/2" in out) == bool(progress)


def test_warnings_of_a_run_without_progress_are_warnings_of_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="mean over each of 4 microbatches"):
        stagewright.train(
            small_net(), PAIRS, loss=functional.cross_entropy, steps=1, microbatches=4, runs=tmp_path, **ONE
        )
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bacth": 3}, "no option 'bacth'; did you mean 'batch'"),
        ({"metric": "top1"}, "no option 'metric'; did you mean 'metrics'"),
        ({"weights": "1:2"}, "'weights' is now 'shares'"),
        ({"data": DataLoader(PAIRS)}, "data is a DataLoader; give its dataset"),
        ({"model": 3}, "model is of type int"),
        ({"metrics": {"a,b": right}}, "name 'a,b'"),
        ({"metrics": [3]}, "metrics has a int"),
        ({"data": "synthetic", "collate": list}, "collate changes nothing with data 'synthetic'"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "optimizer is a SGD of parameters of this process"),
        ({"optimizer": 3}, "optimizer has a int"),
        ({"collate": list}, "collate changes nothing without data"),
        ({"data": iter(())}, "no length or no samples by index"),
        ({"batch": "many"}, "plan.batch = 'many'"),
        ({"loss": nn.CrossEntropyLoss, "data": PAIRS}, "is a class"),
    ],
)
def test_what_is_wrong_is_one_line(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(stagewright.UserError) as error:
        stagewright.train(**{"model": small_net(), "runs": tmp_path, "batch": 8, "steps": 1, **given})
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not left_over() and not list(tmp_path.iterdir())


def test_weights_of_a_named_model_need_an_export(tmp_path: Path) -> None:
    result = stagewright.train("resnet8", samples=8, batch=8, steps=1, emulate=True, runs=tmp_path)
    with pytest.raises(stagewright.UserError, match="export="):
        result.weights()


def test_weights_of_another_model_are_one_line(tmp_path: Path) -> None:
    result = stagewright.train(small_net(), PAIRS, steps=1, runs=tmp_path, **ONE)
    with pytest.raises(stagewright.UserError, match=r"of another model than this Linear: .*weight") as error:
        result.load_into(nn.Linear(2, 2))
    assert "\n" not in str(error.value)


def test_a_result_is_short_and_its_html_is_escaped() -> None:
    plan = make_plan(parse_placement("0:0.0:1"), batch=8, microbatches=4, cuts=["<u>"])
    steps = tuple(Step(number, 0, 2.0 - number, 0.1, 1.0, 8.0) for number in range(2))
    evaluations = (Evaluated(1, 8, 0.5, {"top1": 0.75}), Evaluated(2, 8, 0.75, {"top1": 0.5}))
    best = {"metric": "top1", "value": 0.75, "batch": 1}
    summary = {"model": "m:<Net>", "images_per_second": 1234.5, "best": best}
    result = stagewright.Result(Path("runs/a&b"), plan, steps, evaluations, summary, None)
    shown = repr(result)
    scores = "loss 0.75 top-1 50.00%", "top-1 75.00% after step 1"
    for part in ("<Net>", "sync 1-1", "steps 2", "loss 1", *scores, "1,234 images/s"):
        assert part in shown
    assert len(shown) < 250 and "\n" not in shown
    page = methodcaller("_repr_html_")(result)  # as notebooks do
    assert "&lt;Net&gt;" in page and "a&amp;b" in page and "<Net>" not in page


def test_keywords_are_those_of_the_table_of_options() -> None:
    assert make_options.FILE.read_text() == make_options.text(), "run python -m tests.make_options"
    named = inspect.signature(stagewright.train).parameters
    for name in ("model", "data", "metrics", "callbacks", "batch", "checkpoint_every", "staleness"):
        assert name in named
    assert named["steps"].kind is inspect.Parameter.KEYWORD_ONLY
