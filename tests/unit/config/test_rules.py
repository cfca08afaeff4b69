"""The table of what excludes or needs what: a case per row, what counts as given, and a decision for every option."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stagewright.config.modes import Mode
from stagewright.config.rules import RULES, check_rules
from stagewright.config.sections import options
from stagewright.config.toml import as_tables, changed_keys, make_config, refuse_unused, without_unused
from stagewright.errors import UserError, either_of

_OPTIONS = {option.flag: option for option in options()}
_MACHINE = {"--device": "cpu", "--precision": "fp32"}  # of the cases below: auto is checked once it is known

_CUT, _LAGGING = (  # modes that take --cut, and --predict
    either_of(Mode.where(is_wanted)) for is_wanted in (lambda preset: preset.has_stages, lambda preset: preset.has_lag)
)

# Options of a run that change nothing: as keywords by flag, with what the error says about the reason.
_UNUSED = [
    *(
        ({flag: value, "--loss": loss}, f"with --loss {loss}; it needs --loss auto")
        for flag, value, loss in (
            ("--label-smoothing", 0.1, "mse"),
            ("--ignore-index", 0, "soft"),
            ("--class-weights", "1,2", "next-token"),
        )
    ),
    ({"--init": "a.safetensors", "--resume": "runs/a"}, "with --resume runs/a; give one of them"),
    *(
        ({flag: value}, "without an evaluation; give --val or --eval-every as well")
        for flag, value in {"--metric": "top1", "--best": "loss", "--early-stop": 2}.items()
    ),
    ({"--early-stop": 2, "--eval-every": 0}, "with --eval-every 0; it needs one above 0"),
    ({"--ema": 0.9}, "without an evaluation, an export or a checkpoint; give --val, --export or --checkpoint-every"),
    ({"--context": 8, "--data": "folder:a"}, "with --data folder:a; it needs --data tokens:FILE"),
    ({"--workers": 2, "--data": "tensors:a"}, "with --data tensors:a; it needs --data folder:DIR, .*python:"),
    ({"--workers": 2, "--data": "tar:*", "--decode": "once"}, "with --decode once; it needs --decode cpu"),
    ({"--loader-threads": 3, "--workers": 2, "--data": "tar:*"}, "with --workers 2; give one of them"),
    ({"--class-names": "a", "--data": "table:a"}, "with --data table:a; it needs --data folder:DIR, .* or segm"),
    ({"--samples": 64, "--data": "folder:a"}, "with --data folder:a; it needs --data synthetic"),
    ({"--learnable": True, "--data": "tensors:a"}, "with --data tensors:a; it needs --data synthetic"),
    *(
        ({flag: value}, "with --data synthetic; it needs --data folder:DIR, tar:GLOB")
        for flag, value in {
            "--class-names": "names.txt", "--crop": "padded", "--normalize": "imagenet", "--loader-threads": 2,
            "--ahead": 4, "--max-bad": 100, "--jitter": 0.4, "--cutout": 8, "--decode": "once",
        }.items()
    ),
    ({"--ahead": 8, "--decode": "once", "--data": "tar:*"}, "with --decode once; it needs --decode cpu or gpu"),
    *(
        ({flag: value, "--plan": "p.json"}, "with --plan p.json; give one of them")
        for flag, value in {
            "--placement": "0:0", "--shares": "1:1", "--cut": "a", "--mode": "sync", "--staleness": 1,
            "--versions": "2,1", "--depths": "1,1", "--policy": "gpipe", "--batch": 64, "--microbatches": 2,
        }.items()
    ),
    *(
        ({flag: value, "--mode": "dp"}, f"with --mode dp; it needs --mode {_CUT}")
        for flag, value in {"--cut": "a", "--shares": "1:1", "--dynamic": True}.items()
    ),
    ({"--staleness": 1, "--mode": "sync"}, "with --mode sync; it needs --mode stale"),
    ({"--versions": "2,1", "--mode": "pipedream"}, "with --mode pipedream; it needs --mode stale"),
    ({"--depths": "1,1", "--policy": "gpipe"}, "with --policy gpipe; it needs --policy 1f1b"),
    ({"--momentum": 0.9, "--optimizer": "adamw"}, "with --optimizer adamw; it needs --optimizer sgd"),
    ({"--nesterov": True, "--optimizer": "adamw"}, "with --optimizer adamw; it needs --optimizer sgd"),
    ({"--nesterov": True, "--momentum": 0.0}, "with --momentum 0; it needs one above 0"),
    ({"--predict": True, "--momentum": 0.0}, "with --momentum 0; it needs one above 0"),
    ({"--predict": True, "--mode": "sync"}, f"with --mode sync; it needs --mode {_LAGGING}"),
    *(({flag: 0.5}, "with --optimizer sgd; it needs --optimizer adamw") for flag in ("--beta1", "--beta2", "--eps")),
    ({"--lr-steps": "3"}, "with --lr-schedule constant; it needs --lr-schedule step"),
    ({"--lr-gamma": 0.1, "--lr-schedule": "poly"}, "with --lr-schedule poly; it needs --lr-schedule step"),
    ({"--lr-power": 2.0, "--lr-schedule": "cosine"}, "with --lr-schedule cosine; it needs --lr-schedule poly"),
    ({"--lr-final": 0.0}, "with --lr-schedule constant; it needs --lr-schedule poly or cosine"),
    *(
        ({flag: value}, "with --lr-schedule constant; it needs --lr-schedule one-cycle")
        for flag, value in {
            "--lr-peak": 0.3, "--lr-start-div": 25.0, "--lr-final-div": 10.0, "--lr-anneal": "linear"
        }.items()
    ),
    ({"--warmup": 5, "--lr-schedule": "one-cycle"}, "with --lr-schedule one-cycle; it needs --lr-schedule constant"),
    ({"--lr": 0.1, "--optimizer": "mine:make"}, "with --optimizer mine:make; it needs --optimizer sgd"),
    ({"--weight-decay": 0.1, "--optimizer": "mine:make"}, "with --optimizer mine:make; it needs --optimizer sgd"),
    ({"--group": "a:lr=1", "--optimizer": "mine:make"}, "with --optimizer mine:make; it needs --optimizer sgd"),
    ({"--layer-decay": 0.5, "--optimizer": "mine:make"}, "with --optimizer mine:make; it needs --optimizer sgd"),
    ({"--no-decay": True}, "with --weight-decay 0; it needs one above 0"),
    ({"--no-decay": True, "--group": "a:lr=1"}, "with --weight-decay 0; it needs one above 0"),
    *(
        ({flag: value}, "with --device cpu; it needs --device cuda")
        for flag, value in {
            "--share-gpu": True, "--channels-last": True, "--deterministic": True,
        }.items()
    ),
    ({"--loss-scale": 65536.0}, "with --precision fp32; it needs --precision fp16"),
    ({"--growth-interval": 9, "--precision": "bf16"}, "with --precision bf16; it needs --precision fp16"),
    *(
        ({flag: value, "--emulate": True, "--device": "cuda"}, "with --emulate; give one of them")
        for flag, value in {
            "--share-gpu": True, "--timeout": 9.0, "--start-timeout": 9.0, "--max-restarts": 1, "--backend": "gloo",
        }.items()
    ),
    *(
        ({flag: value}, "without --nodes")
        for flag, value in {"--node-index": 0, "--token": "a"}.items()
    ),
]  # fmt: skip

# Options that can't be used together.
_IMPOSSIBLE = [
    ({"--decode": "once", "--data": "tar:*", "--val": "segmentation:a"}, "--decode once .* with segmentation: data"),
    ({"--decode": "gpu", "--data": "tar:*"}, "--decode gpu .* with --device cpu; it needs --device cuda"),
    ({"--decode": "once", "--data": "tar:*", "--jitter": 0.4}, "--decode once .* with --jitter 0.4; give one"),
    ({"--precision": "fp16"}, "--precision fp16 .* with --device cpu; it needs --device cuda"),
    ({"--precision": "tf32"}, "--precision tf32 .* with --device cpu; it needs --device cuda"),
    ({"--precision": "fp64", "--device": "cuda"}, "--precision fp64 .* with --device cuda; it needs --device cpu"),
    ({"--backend": "nccl"}, "--backend nccl .* with --device cpu; it needs --device cuda"),
    ({"--backend": "nccl", "--share-gpu": True, "--device": "cuda"}, "--backend nccl .* with --share-gpu"),
    ({"--cuda-graph": "on"}, "--cuda-graph on .* with --device cpu; it needs --device cuda"),
    ({"--lr-schedule": "step"}, "--lr-schedule step .* without --lr-steps"),
    ({"--lr-schedule": "step", "--lr-steps": " , "}, "--lr-schedule step .* without --lr-steps"),
    ({"--cut": "a", "--shares": "1:1"}, "--cut a .* with --shares 1:1; give one"),
    ({"--staleness": 1, "--versions": "2,1"}, "--staleness 1 .* with --versions 2,1; give one"),
    ({"--steps": 3, "--epochs": 2}, "--steps 3 .* with --epochs 2; give one"),
    ({"--emulate": True, "--nodes": "10.0.0.1,10.0.0.2"}, "--emulate .* with --nodes 10.0.0.1,10.0.0.2; give one"),
]

# Options of other commands: their values, and what the error says.
_COMMANDS = [
    ("inspect", {"--inputs": "a", "--data": None}, "without --data"),
    ("plan", {"--lr": 0.1, "--optimizer": "adamw"}, "--lr 0.1 changes nothing with --optimizer adamw"),
    *(
        ("plan", {flag: True, "--lr": None}, f"{flag} changes nothing without --lr")
        for flag in ("--nesterov", "--predict")
    ),
    ("plan", {"--momentum": 0.9, "--lr": None}, "--momentum 0.9 changes nothing without --lr"),
    ("plan", {"--staleness": 1, "--mode": ["sync", "pipedream"]}, "with --mode sync,pipedream; it needs --mode stale"),
    ("value", {"--software": "oneflow", "--profile": "f"}, "--software oneflow changes nothing with --profile f"),
    ("simulate", {"--data": "imagenet", "--profile": "f"}, "--data imagenet changes nothing with --profile f"),
    ("simulate", {"--devices": 4, "--cluster": None}, "--devices 4 changes nothing without --cluster"),
    ("plan", {"--minutes": 2.0, "--try": None}, "--minutes 2.0 changes nothing without --try"),
    ("simulate", {"--batch": 8, "--plan": "p"}, "--batch 8 changes nothing with --plan p"),
    ("profile", {"--precision": "fp32,fp16", "--device": "cpu"}, "--precision fp32,fp16 .* with --device cpu"),
    ("watch", {"--once": True, "--serve": 0}, "--once changes nothing with --serve 0"),
    ("watch", {"--json": True, "--serve": 0}, "--json changes nothing with --serve 0"),
    ("cluster import", {"--here": True, "--topo": "a"}, "--here can't be used with --topo a"),
    ("cluster import", {"--here": True, "--smi": "a"}, "--here can't be used with --smi a"),
]


def tables(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for flag, value in (_MACHINE | values).items():
        section, _, name = _OPTIONS[flag].key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


@pytest.mark.parametrize(("values", "why"), _UNUSED, ids=lambda value: next(iter(value), "") if value else "")
def test_refuses_an_option_that_would_change_nothing_only_if_it_was_given(values: dict[str, Any], why: str) -> None:
    flag = next(iter(values))
    others = {other: value for other, value in values.items() if other != flag}
    with pytest.raises(UserError, match=rf"^{flag}\b.* changes nothing {why}"):
        make_config(tables(values))
    assert make_config(tables(values), given=make_keys(others)) == make_config(tables(values), given=())


def make_keys(values: dict[str, Any]) -> set[str]:
    return {_OPTIONS[flag].key for flag in values}


@pytest.mark.parametrize(("values", "message"), _IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_refuses_options_that_exclude_each_other_whoever_chose_them(values: dict[str, Any], message: str) -> None:
    for given in (None, ()):
        with pytest.raises(UserError, match=rf"^{message}"):
            make_config(tables(values), given=given)


@pytest.mark.parametrize(("command", "values", "message"), _COMMANDS, ids=lambda value: str(value)[:60])
def test_refuses_options_of_other_commands_by_the_same_table(
    command: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_rules(values, values.keys(), command)


def test_every_row_has_a_case() -> None:
    cases = [*(("train", values) for values, _ in (*_UNUSED, *_IMPOSSIBLE))]
    cases += [(command, values) for command, values, _ in _COMMANDS]
    defaults = {flag: option.default for flag, option in _OPTIONS.items()} | _MACHINE
    for rule in RULES:
        filled = (
            (command, (defaults if command == "train" else {}) | values, values)
            for command, values in cases
            if command in (rule.commands or (command,)) and rule.flag in values
        )
        assert any(rule.is_broken(values, given) for _, values, given in filled), rule.flag


# Options without a row, and why they always change something or why options alone can't tell.
_ALWAYS = {
    "every run": "--model --data --shuffle --batch --lr --optimizer --weight-decay --clip --seed "
    "--device --precision --compile --cuda-graph --threads --runs --log-every --monitor-every --track --export "
    "--resume --freeze --checkpoint-every --checkpoint-minutes --eval-every --val --limit --lr-schedule --steps "
    "--epochs --emulate --nodes --plan --unproven --loss --layer-decay",
    "its settings are checked one by one, and its names with the model": "--group",
    "the data and the model decide": "--inputs",
    "the planner and the synthetic data use it": "--image",
    "a factory may take it": "--classes",
    "a stopped run saves a checkpoint as well": "--keep",
    "it predicts the speed": "--profile",
    "torchrun and srun start ranks without --nodes": "--join-timeout --lost-timeout",
    "how many replicas a stage has is known with the plan": "--bucket",
}


def test_every_option_has_a_row_or_a_reason_to_have_none() -> None:
    listed = {flag for flags in _ALWAYS.values() for flag in flags.split()}
    assert listed <= _OPTIONS.keys()
    with_row = {rule.flag for rule in RULES if not rule.values and not rule.excludes and not rule.commands}
    assert listed.isdisjoint(with_row - {"--batch"})
    assert _OPTIONS.keys() - listed == (with_row & _OPTIONS.keys()) - {"--batch"}


def test_asking_for_what_happens_anyway_is_not_refused() -> None:
    run = {"share_gpu": False, "channels_last": False, "deterministic": False, "cuda_graph": "off", "backend": "gloo"}
    off = {"data": {"jitter": 0.0, "cutout": 0, "decode": "cpu"}, "optimizer": {"nesterov": False}, "run": run}
    assert make_config(off).run.cuda_graph == "off"
    assert make_config({"run": {"emulate": True, "backend": "auto"}}).run.emulate
    assert make_config({"plan": {"mode": "dp", "cut": None}}).plan.cut is None
    assert make_config({"schedule": {"kind": "one-cycle", "warmup": 0}}).schedule.kind == "one-cycle"


def test_a_group_that_has_momentum_or_decay_is_enough_for_what_needs_some() -> None:
    made = make_config({"optimizer": {"momentum": 0.0, "nesterov": True, "groups": ["a:momentum=0.5"]}})
    assert made.optimizer.nesterov
    assert make_config({"optimizer": {"no_decay": True, "groups": ["a:weight_decay=0.5"]}}).optimizer.no_decay


def test_a_mode_that_is_left_open_may_be_any_mode() -> None:
    planned = {"--mode": [], "--predict": True, "--lr": 0.1, "--momentum": 0.9, "--optimizer": "sgd"}
    check_rules(planned, {"--predict", "--lr"}, "plan")
    with pytest.raises(UserError, match="--predict changes nothing with --mode sync"):
        check_rules(planned | {"--mode": ["sync"]}, {"--predict", "--lr", "--mode"}, "plan")


def test_a_file_that_lists_every_option_gives_only_those_it_changes() -> None:
    every = as_tables(make_config({"run": {"seed": 3}}))
    assert changed_keys(every) == {"run.seed"}
    assert make_config(every, given=changed_keys(every)).run.seed == 3
    every["optimizer"]["beta1"] = 0.8
    with pytest.raises(UserError, match=r"--beta1 0.8 changes nothing"):
        make_config(every, given=changed_keys(every))


def test_a_given_option_replaces_the_one_that_it_excludes() -> None:
    before = {"run": {"steps": 5}, "plan": {"shares": "1:1", "staleness": 1}}
    now = {"run": {"epochs": 2}, "plan": {"cut": "a", "versions": "2,1"}}
    config = make_config(before, now, given={"run.epochs", "plan.cut", "plan.versions"})
    assert (config.run.steps, config.run.epochs) == (None, 2)
    assert (config.plan.shares, config.plan.cut) == (None, "a")
    assert (config.plan.staleness, config.plan.versions) == (None, "2,1")


def test_options_that_several_runs_share_are_refused_where_no_run_uses_them() -> None:
    fp16 = {"run": {"device": "cuda", "precision": "fp16", "loss_scale": 8.0}}
    fp32 = {"run": {"precision": "fp32", "loss_scale": 8.0}}
    refuse_unused([fp32, fp16], {"run.loss_scale"})
    assert without_unused(make_config(fp16, given=())).run.loss_scale == 8.0
    assert without_unused(make_config(fp32, given=())).run.loss_scale == 65536.0
    with pytest.raises(UserError, match=re.escape("--loss-scale 8.0 changes nothing with --precision fp32")):
        refuse_unused([fp32, fp32], {"run.loss_scale"})
