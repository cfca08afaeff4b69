"""Metrics are exact sums over microbatches and replicas, whatever their counts; what a user's function does wrong is
one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn import functional

import stagewright
from stagewright import objects
from stagewright.cli.main import main
from stagewright.config.toml import make_config, read_toml
from stagewright.errors import UserError
from stagewright.events import Evaluated, Score
from stagewright.metrics import IMAGES, metric_values
from stagewright.model.loss import Loss, LossError, LossOptions, logits_of, target_of
from stagewright.model.networks.language import GPT
from stagewright.report.page import Curves, Summary, Table
from stagewright.run.report import make_page
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.comm.transport import Pending
from stagewright.runtime.job import Job
from stagewright.runtime.process.assemble import open_data
from stagewright.runtime.stage.scores import (
    BUILT_IN,
    Losses,
    NonFiniteLoss,
    Scorer,
    exchange_scores,
    load_metrics,
    make_scorer,
)
from tests.parity import Case, make_job

HERE = "tests.unit.runtime.stage.test_scores"


def largest(outputs: Tensor, sample: Mapping[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    """A user's metric: the mean largest logit of samples of odd classes, of which microbatches have unequally many."""
    odd = sample["label"] % 2 == 1
    return {"largest_logit": (outputs.amax(1)[odd].double().sum(), odd.sum())}


def make_gpt() -> GPT:
    return GPT(5, 1, 1, 4, 10)


CROSS_ENTROPY = Loss(LossOptions())


def evaluate(
    names: str, pieces: list[tuple[Any, Tensor]], replicas: int = 2, loss: str = "cross-entropy", field: str = "label"
) -> Evaluated:
    """What replicas that take pieces in turn report together."""
    scorers = [make_scorer(names, LossOptions(loss)) for _ in range(replicas)]
    for number, (outputs, target) in enumerate(pieces):
        scorers[number % replicas].add(outputs, {field: target}, len(target))
    return Evaluated.of(0, [scorer.score for scorer in scorers])


def pieces_of(outputs: Tensor, target: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(outputs.split(sizes), target.split(sizes), strict=True))


def classes(*shape: int, count: int = 7, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(count, shape, generator=generator)
    target[torch.rand(shape, generator=generator) < ignored] = -100
    return torch.randn(shape[0], count, *shape[1:], generator=generator, dtype=torch.double), target


@pytest.mark.parametrize("shape", [(9,), (9, 3, 2)])
def test_top1_and_top5_and_the_loss_are_those_of_all_samples_at_once(shape: tuple[int, ...]) -> None:
    logits, target = classes(*shape)
    found = evaluate("auto", pieces_of(logits, target, 4, 4, 1))
    ranked = logits.argsort(1, descending=True) == target.unsqueeze(1)
    assert found.samples == 9 and list(found.metrics) == ["top1", "top5"]
    assert found.loss == pytest.approx(float(functional.cross_entropy(logits, target)), rel=1e-12)
    assert found.metrics["top1"] == pytest.approx(float(ranked[:, :1].any(1).double().mean()), rel=1e-12)
    assert found.metrics["top5"] == pytest.approx(float(ranked[:, :5].any(1).double().mean()), rel=1e-12)


def test_top5_of_five_classes_is_measured_only_where_it_is_asked_for() -> None:
    given = pieces_of(*classes(9, count=5), 4, 5)
    assert list(evaluate("auto", given).metrics) == ["top1"], "it could only be 100 %"
    assert evaluate("top5", given).metrics == {"top5": 1.0}
    assert list(evaluate("auto", pieces_of(*classes(9, count=6), 4, 5)).metrics) == ["top1", "top5"]


@pytest.mark.parametrize("is_last", [False, True], ids=["classes second", "classes last"])
def test_ignored_targets_do_not_count_and_unequal_counts_are_exact(is_last: bool) -> None:
    logits, target = classes(9, 5, ignored=0.4)
    target[4] = -100  # a microbatch without any target
    given = logits.movedim(1, -1) if is_last else logits
    loss, field = ("next-token", "targets") if is_last else ("cross-entropy", "label")
    found = evaluate("top1,perplexity,accuracy", pieces_of(given, target, 4, 1, 3, 1), loss=loss, field=field)
    kept = target != -100
    flat, right = logits.movedim(1, -1)[kept], target[kept]
    mean = float(functional.cross_entropy(flat, right))
    assert found.loss == pytest.approx(mean, rel=1e-12)
    expected = float((flat.argmax(1) == right).double().mean())
    assert found.metrics == pytest.approx({"top1": expected, "perplexity": math.exp(mean), "accuracy": expected})


def test_regression_and_multi_label_metrics_count_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, target = torch.randn(9, 3, generator=generator), torch.randn(9, 3, generator=generator)
    scorer = make_scorer("mae,mse", LossOptions("mse"))
    for piece, right in pieces_of(outputs, target, 4, 5):
        scorer.add(piece, {"target": right}, len(right))
    values = metric_values(scorer.score.totals)
    assert values["mae"] == pytest.approx(float(functional.l1_loss(outputs, target)), rel=1e-6)
    assert values["mse"] == pytest.approx(float(functional.mse_loss(outputs, target)), rel=1e-6)
    labels = (target > 0).float()
    assert BUILT_IN["accuracy"](outputs, {"labels": labels}) == {
        "accuracy": (float(((outputs > 0) == (target > 0)).sum()), 27.0)
    }
    assert BUILT_IN["mae"](outputs[:, :1], {"label": target[:, 0]})["mae"][1] == 9, "not 9 x 9"


def test_iou_is_the_mean_over_classes_of_the_whole_data() -> None:
    logits, target = classes(9, 4, 4, count=3, ignored=0.2)
    found = evaluate("iou", pieces_of(logits, target, 4, 4, 1)).metrics
    kept = target != -100
    predicted, right = logits.argmax(1)[kept], target[kept]
    each = [
        int(((predicted == k) & (right == k)).sum()) / int(((predicted == k) | (right == k)).sum()) for k in range(3)
    ]
    assert found == pytest.approx({"iou": sum(each) / 3, "iou/0": each[0], "iou/1": each[1], "iou/2": each[2]})
    assert next(iter(found)) == "iou"


def test_auto_measures_only_the_loss_where_targets_are_not_class_numbers() -> None:
    soft = torch.softmax(torch.randn(4, 3), 1)
    found = evaluate("auto", [(torch.randn(4, 3), soft)], loss="soft")
    assert found.metrics == {} and found.loss > 0


def test_auto_is_perplexity_where_the_next_token_is_predicted() -> None:
    logits, target = classes(9, 5, ignored=0.4)
    found = evaluate("auto", pieces_of(logits.movedim(1, -1), target, 4, 5), loss="next-token", field="targets")
    mean = float(functional.cross_entropy(logits, target))
    assert found.metrics == {"perplexity": pytest.approx(math.exp(mean))}


@pytest.mark.parametrize("field", ["labels", "input_ids"])
def test_metrics_of_the_next_token_have_the_loss_s_targets(field: str) -> None:
    """A model that knows each next token, of as many classes as there are positions."""
    tokens = torch.randint(6, (4, 6), generator=torch.Generator().manual_seed(0))
    logits = 20.0 * functional.one_hot(tokens.roll(-1, 1), 6).double()
    scorer = make_scorer("top1,perplexity,iou", LossOptions("next-token"))
    scorer.add(logits, {field: tokens}, len(tokens))
    assert metric_values(scorer.score.totals)["top1"] == 1.0
    assert metric_values(scorer.score.totals)["perplexity"] == pytest.approx(1.0, abs=1e-6)
    wrong = logits.roll(1, -1)  # of every token but 5, which does not count
    wrong[tokens.roll(-1, 1) == 5] = logits[tokens.roll(-1, 1) == 5]
    scorer = make_scorer("top1", LossOptions("next-token", ignore_index=5))
    scorer.add(wrong, {field: tokens}, len(tokens))
    assert metric_values(scorer.score.totals)["top1"] == 0.0


def _tokens() -> tuple[Tensor, dict[str, Tensor]]:
    logits, target = classes(2, 3)
    return logits, {"labels": target}


def test_finds_the_logits_and_the_target() -> None:
    tensor, other = torch.ones(2), torch.zeros(1)
    for outputs in (
        tensor,
        SimpleNamespace(logits=tensor),
        {"loss": other, "logits": tensor},
        ({"x": [tensor]}, other),
    ):
        assert logits_of(outputs) is tensor
    for name in ("label", "labels", "target", "targets"):
        assert target_of({"image": other, name: tensor}) is tensor
    with pytest.raises(LossError, match="NoneType"):
        logits_of(None)
    with pytest.raises(LossError, match="the samples have image but no label"):
        target_of({"image": other})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("3", "returned str"),
        ([("x", 1)], "returned list"),
        ({"x": 1.0}, "returned 1.0 as 'x'"),
        ({"x": (1.0, 2.0, 3.0)}, "as 'x'"),
        ({"x": (math.nan, 1.0)}, r"\(nan, 1.0\) as 'x'"),
        ({"x": (1.0, math.inf)}, "as 'x'"),
        ({"x": (1.0, -1.0)}, "at least 0"),
        ({"x": (torch.ones(2), 1)}, "as 'x'"),
        ({3: (1.0, 1.0)}, "as '3'"),
        ({"loss": (1.0, 1.0)}, "returns 'loss', as the loss does"),
        ({str(number): (1, 1) for number in range(600)}, "returned 600 names"),
    ],
)
def test_a_metric_that_returns_something_else_is_one_line(returned: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"^metric 'mine' .*{said}") as error:
        Scorer({"mine": lambda outputs, sample: returned}, CROSS_ENTROPY).add(*_tokens(), 2)
    assert "\n" not in str(error.value)


def test_a_metric_that_raises_and_two_of_one_name_are_one_line() -> None:
    def broken(outputs: Any, sample: Any) -> Any:
        raise RuntimeError("no such\nfield")

    with pytest.raises(UserError, match=r"^metric 'mine' raised RuntimeError: no such$"):
        Scorer({"mine": broken}, CROSS_ENTROPY).add(*_tokens(), 2)
    with pytest.raises(UserError, match="metric 'mine' returns 'top1', as metric 'top1' does; rename one of them"):
        Scorer({"top1": BUILT_IN["top1"], "mine": BUILT_IN["top1"]}, CROSS_ENTROPY).add(*_tokens(), 2)
    with pytest.raises(
        UserError, match=r"metric 'mae' raised ValueError: outputs are \[2, 7, 3\] but targets \[2, 3\]"
    ):
        Scorer(load_metrics("mae"), CROSS_ENTROPY).add(*_tokens(), 2)


@pytest.mark.parametrize("returned", [0.25, torch.tensor(0.25), (0.5, 2), {"mine": (0.5, 2)}])
def test_a_metric_may_return_a_mean_or_one_total_and_count(returned: Any) -> None:
    scorer = Scorer({"package:mine": lambda outputs, sample: returned}, CROSS_ENTROPY)
    scorer.add(*_tokens(), 2)
    assert scorer.score.totals["mine"] == (0.5, 2.0)


def test_a_users_metric_gets_the_target_of_pairs() -> None:
    def right(outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs.argmax(1) == target).double().mean()

    name = objects.put(right)
    scorer = make_scorer(name, LossOptions(is_paired=True))
    scorer.add(torch.eye(4), {"input": torch.ones(4), "target": torch.tensor([0, 1, 2, 2])}, 4)
    objects.remove(name)
    assert scorer.score.totals["right"] == (3.0, 4.0)


def test_names_are_cleaned_and_bounded() -> None:
    scorer = Scorer({"mine": lambda outputs, sample: {"a\x1b[31m": (1, 2), "b" * 99: (1, 1)}}, CROSS_ENTROPY)
    scorer.add(*_tokens(), 2)
    assert list(scorer.score.totals) == ["loss", "a\\x1b[31m", "b" * 60] and scorer.score.samples == 2


def test_an_unknown_metric_is_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("top2", "did you mean 'top"), ("no.such:one", "can't import no"), (f"{HERE}:HERE", "called")):
        with pytest.raises(SystemExit) as ended:
            main(["train", "--emulate", "--eval-every", "0", "--metric", name, "--runs", str(tmp_path)])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1 and name in error and said in error
    assert not list(tmp_path.iterdir())


def test_a_loss_is_a_mean_or_a_total_and_a_count(tmp_path: Path) -> None:
    events: list[Any] = []
    losses = Losses(make_job(Case(), tmp_path).plan, 0, events.append)
    losses.add([(0, Reading(torch.tensor(0.5))), (1, Reading(torch.tensor([6.0, 4.0])))], None)
    losses.flush()
    assert events[0].losses == ((0, 0.5, 1.0), (1, 6.0, 4.0))
    with pytest.raises(NonFiniteLoss):
        losses.add([(2, Reading(torch.tensor([math.nan, 4.0])))], None)


# --- Whole runs -------------------------------------------------------------------------------------------------------


def make_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10))


def test_a_users_metric_goes_from_replicas_to_the_page(tmp_path: Path) -> None:
    """Of 22 samples in 11 pieces over two replicas, with the plain computation beside it."""
    result = stagewright.train(
        make_net, image=8, samples=22, placement="0:0.0:1-2", staleness=1, batch=8, microbatches=4, steps=2,
        eval_every=1, metrics=[largest, "perplexity", "top1"], emulate=True, monitor_every=0, runs=str(tmp_path),
        export=str(tmp_path / "w.safetensors"),
    )  # fmt: skip
    found = result.evaluations[-1]
    assert list(found.metrics) == ["largest_logit", "perplexity", "top1"]
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.loss), rel=1e-6)
    model = make_net().eval()
    model.load_state_dict(result.weights())
    config = make_config(read_toml(str(result.folder / "config.toml")), given=())
    fields = open_data(config, "synthetic").batch(np.arange(22))
    labels = fields["label"]
    with torch.no_grad():
        logits = model(fields["image"])
    total, count = largest(logits, fields)["largest_logit"]
    assert found.metrics["largest_logit"] == pytest.approx(float(total / count), rel=1e-4)
    assert found.metrics["top1"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert result.summary["evaluations"][-1]["metrics"] == found.metrics
    page = make_page([result.folder])
    curves = {block.title: block for block in page.blocks if isinstance(block, Curves)}
    assert [point.y for point in curves["Largest_logit"].curves[0].points] == [
        evaluated.metrics["largest_logit"] for evaluated in result.evaluations
    ]
    assert not curves["Largest_logit"].is_small and curves["Perplexity"].is_small and "Accuracy" in curves
    (summary,) = [block for block in page.blocks if isinstance(block, Summary)]
    assert any(re.search(r"largest_logit \S+, perplexity \S+, top-1 \S+%", line) for line in summary.lines)


def test_a_run_of_tokens_tells_tokens_per_second_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes((np.arange(81) % 10).astype("<u2").tobytes())
    main(["train", "--model", f"{HERE}:make_gpt", "--emulate", "--data", f"tokens:{data}", "--context", "5",
          "--batch", "8", "--steps", "4", "--eval-every", "0", "--log-every", "1", "--monitor-every", "0",
          "--runs", str(tmp_path / "runs")])  # fmt: skip
    shown = capsys.readouterr().out
    assert "images/s" not in shown and len(re.findall("tokens/s", shown)) >= 3 and "perplexity" in shown
    (folder,) = (tmp_path / "runs").iterdir()
    summary, job = (json.loads((folder / name).read_text()) for name in ("summary.json", "job.json"))
    assert (summary["unit"], summary["per_sample"]) == (job["unit"], job["per_sample"]) == ("tokens", 5)
    main(["watch", "--once", str(folder)])
    main(["report", str(folder)])
    shown = capsys.readouterr().out
    assert "4 steps of 40 tokens" in shown and "tokens/s" in shown and "images" not in shown
    page = make_page([folder])
    (over_time,) = [b for b in page.blocks if isinstance(b, Curves) and b.title == "Throughput"]
    (epochs,) = [block for block in page.blocks if isinstance(block, Table) and block.title == "Epochs"]
    assert over_time.y == "tokens/s" and epochs.columns[3] == "tokens/s"
    main(["watch", "--json", str(folder)])
    state = json.loads(capsys.readouterr().out)
    assert state["images_per_second"] == summary["images_per_second"] and state["unit"] == "tokens"
    speed = 5 * summary["images_per_second"]
    main(["watch", "--once", str(folder)])
    assert f"{speed:.0f} tokens/s" in capsys.readouterr().out.replace(",", "")


def test_the_job_of_an_older_run_is_loaded(tmp_path: Path) -> None:
    job = make_job(Case(), tmp_path)
    job.save(tmp_path / "job.json")
    found = json.loads((tmp_path / "job.json").read_text())
    del found["unit"], found["per_sample"], found["config"]["run"]["metrics"]
    (tmp_path / "job.json").write_text(json.dumps(found))
    assert Job.load(tmp_path / "job.json") == job and job.throughput_unit == IMAGES


def test_scores_add_up_by_name() -> None:
    one, other = Score(2, {"a": (1.0, 2.0)}), Score(3, {"b": (5.0, 1.0), "a": (2.0, 1.0)})
    assert one + other == Score(5, {"a": (3.0, 3.0), "b": (5.0, 1.0)}) and Score() + one == one


def test_every_rank_gets_the_same_scores_in_the_order_of_the_last_stages_ranks() -> None:
    store, last_ranks = HashStore(), (3, 1)
    scores = {1: Score(2, {"loss": (0.1 + 0.2, 2.0)}), 3: Score(5, {"loss": (math.inf, 5.0), "top1": (1 / 3, 5.0)})}
    found: dict[int, tuple[Score, ...]] = {}

    def run(rank: int) -> Iterator[Pending]:
        found[rank] = yield from exchange_scores(store, "scores/7", rank, last_ranks, scores.get(rank))

    runs = [run(rank) for rank in range(4)]
    store.set("scores/6/3", "{}")  # of another exchange
    waiting = [next(runs[0]), next(runs[1])]
    assert not any(pending.is_completed() for pending in waiting), "rank 3 has not posted its score"
    waiting += [next(run) for run in runs[2:]]
    assert [pending.is_completed() for pending in waiting] == [True] * 4
    assert [next(run, None) for run in runs] == [None] * 4
    assert found == dict.fromkeys(range(4), (scores[3], scores[1]))
