"""Scripts of examples/ over real ranks: as plain PyTorch trains, and with the same bits however they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stagewright.data.order import permutation
from stagewright.model.networks.libraries import is_installed
from tests.distributed.namespaces import machines
from tests.distributed.test_command import ROOT, ranks_of
from tests.examples import (
    ALL,
    EXACT,
    GPT,
    IMAGES,
    ROUNDING,
    TEXT,
    Example,
    Trained,
    losses_of,
    notebook_cells,
    plain_gpt,
    train,
)
from tests.marks import daily, nightly
from tests.waiting import LONG

STAGES = ("--placement", "0:0.0:1", "--mode", "sync")


def start(
    folder: Path, *words: str, variables: dict[str, str] | None = None, is_weighted: bool = True
) -> subprocess.Popen[str]:
    """Start a command of Python on a script that leaves its weights in the folder."""
    folder.mkdir(exist_ok=True)
    path = str(ROOT / "src")
    if any(word.startswith(str(TEXT.script.parent)) for word in words):
        path = f"{ROOT / 'tests' / 'libraries'}:{path}"
    return subprocess.Popen(
        [sys.executable, *words, *(("--weights", str(folder / "weights.safetensors")) if is_weighted else ())],
        env={**os.environ, "PYTHONPATH": path, **(variables or {})},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(processes: Sequence[subprocess.Popen[str]], folder: Path) -> Trained:
    for process in processes:
        _, error = process.communicate(timeout=LONG)
        assert process.returncode == 0, error[-3000:]
    (run,) = (folder / "runs").iterdir()
    assert (run / "summary.json").exists() and (run / "report.html").exists() and ranks_of(folder) == []
    return Trained(losses_of(run), load_file(folder / "weights.safetensors"))


def assert_same_bits(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses and found.state.keys() == expected.state.keys()
    assert all((found.state[name] == tensor).all() for name, tensor in expected.state.items())


@pytest.mark.parametrize("example", daily(ALL, len(ALL)), ids=lambda one: one.name)
def test_two_ranks_train_what_plain_pytorch_does(example: Example, tmp_path: Path) -> None:
    """With the bits of emulated ranks."""
    example.require()
    options = (*EXACT, *STAGES, *example.stages)
    words = ("-m", "stagewright", "run", str(example.script), *options, "--", *example.arguments(tmp_path))
    running = start(tmp_path / "real", *words)
    plain = example.plain(tmp_path)
    emulated = train(example, tmp_path, *options, "--emulate")
    emulated = Trained(emulated.losses, load_file(tmp_path / "weights.safetensors"))
    real = end([running], tmp_path / "real")
    assert_same_bits(real, emulated)
    if example.name != "images":  # which keeps its best weights, not the last
        print(f"{example.name}: sync 1-1 over two processes {real.difference(plain):.1e}")
        assert real.difference(plain) < ROUNDING


@nightly
def test_the_trainer_of_transformers_trains_over_two_ranks(tmp_path: Path) -> None:
    """However they are started: accelerate must not take them for processes of its own."""
    TEXT.require()
    script, arguments = str(TEXT.script.with_name("trainer.py")), TEXT.arguments(tmp_path)
    options = (*STAGES, *TEXT.stages, "--set", "data.shuffle=false")
    command = ("-m", "stagewright", "run", script, *options)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    states, printed = [], []
    for name, words in (
        ("emulated", (*command, "--emulate")),
        ("run", command),
        ("torchrun", (*torchrun, *command)),
    ):
        folder = tmp_path / name
        running = start(folder, *words, "--", *arguments, "--output", str(folder / "model"), is_weighted=False)
        out, error = running.communicate(timeout=LONG)
        assert running.returncode == 0, error[-3000:]
        states.append(load_file(folder / "model" / "model.safetensors"))
        printed.append([line for line in out.splitlines() if "eval_accuracy" in line or "train_loss" in line])
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])
    assert [len(lines) for lines in printed] == [2, 2, 2]  # once, not by every rank


def srun(port: int, folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    """One process per rank, with the variables that srun gives them."""
    place = {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start(folder, *words, variables={**place, "SLURM_PROCID": str(rank)}) for rank in range(2)]


@nightly
def test_a_script_trains_the_same_bits_however_it_is_started(port: int, tmp_path: Path) -> None:
    """By python, by `stagewright run`, torchrun and srun; all as `stagewright run --emulate` does."""
    exact = ("--precision", "fp64")
    expected = train(GPT, tmp_path, *STAGES, *GPT.stages, *exact, "--emulate")
    (run,) = (tmp_path / "runs").iterdir()
    arguments = (*GPT.arguments(tmp_path), *exact)
    planned = (*arguments, "--plan", str(run / "plan.json"))
    script, folder = str(GPT.script), tmp_path / "python"
    real = end([start(folder, script, *planned)], folder)
    assert_same_bits(real, expected)
    plain = plain_gpt(tmp_path, lambda epoch, samples: permutation(0, epoch, samples).tolist())
    print(f"gpt: sync 1-1 over two processes {real.difference(plain):.1e}")
    assert real.difference(plain) < ROUNDING
    options = (*STAGES, *GPT.stages, "--")
    folder = tmp_path / "run"
    assert_same_bits(end([start(folder, "-m", "stagewright", "run", script, *options, *arguments)], folder), expected)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    folder = tmp_path / "torchrun"
    assert_same_bits(end([start(folder, *torchrun, script, *planned)], folder), expected)
    folder = tmp_path / "srun"
    assert_same_bits(end(srun(port, folder, script, *planned), folder), expected)


def scripted(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a shell script, with `stagewright` and `torchrun` of this Python."""
    folder.mkdir()
    for name, package in (("stagewright", "stagewright"), ("torchrun", "torch.distributed.run")):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {package} "$@"\n')
        command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), **more}


@nightly
def test_two_machines_train_the_same_bits_by_torchrun(tmp_path: Path) -> None:
    expected = train(GPT, tmp_path, "--placement", "0:0.0:1", "--mode", "stale", "--emulate")
    folder = tmp_path / "machines"
    environment = scripted(folder, RUNS=str(folder / "runs"))
    arguments = (*GPT.arguments(tmp_path), "--weights", str(folder / "weights.safetensors"))
    with machines() as two:
        script = ("sh", "examples/torchrun/train.sh", two.address(0))
        running = [two.run(machine, [*script, str(machine), *arguments], environment) for machine in range(2)]
        assert_same_bits(end(running, folder), expected)


@nightly
def test_a_job_of_slurm_trains_the_same_bits(port: int, tmp_path: Path) -> None:
    """With an `srun` that starts two tasks here, with its variables."""
    expected = train(GPT, tmp_path, "--placement", "0:0.0:1", "--mode", "stale", "--emulate")
    folder = tmp_path / "slurm"
    environment = scripted(
        folder, RUNS=str(folder / "runs"), PLACEMENT="0:0.0:1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    (folder / "srun").write_text(
        "#!/bin/sh\nset -eu\nwhile expr x$1 : x-- >/dev/null; do shift; done\nexport SLURM_STEP_NUM_TASKS=2\n"
        'SLURM_PROCID=1 "$@" & other=$!\nSLURM_PROCID=0 "$@"\nwait $other\n'
    )
    (folder / "srun").chmod(0o755)
    running = subprocess.Popen(
        ["sh", "examples/slurm/job.sh", *GPT.arguments(tmp_path), "--weights", str(folder / "weights.safetensors")],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert_same_bits(end([running], folder), expected)


@nightly
def test_the_script_of_accelerate_trains_what_the_plain_one_does(tmp_path: Path) -> None:
    if not is_installed("accelerate"):
        pytest.skip("accelerate is not installed")
    states = []
    for name in ("plain", "accelerated"):
        script = str(IMAGES.script.with_name(f"{name}.py"))
        running = start(tmp_path / name, script, *IMAGES.arguments(tmp_path))
        assert running.wait(LONG) == 0
        states.append(load_file(tmp_path / name / "weights.safetensors"))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@nightly
def test_the_notebook_trains_over_two_ranks(tmp_path: Path) -> None:
    """Its cells one after another in a fresh interpreter, as a kernel runs them."""
    kernel = (
        "import json, sys\n"
        "for cell in json.loads(sys.argv[1]):\n"
        "    exec(compile(cell, '<cell>', 'exec'), globals())\n"
        "print(result)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", kernel, json.dumps(notebook_cells())],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("after step") for line in lines) == 8
    assert "plan stale 1-1, steps 256" in lines[-1]
    (run,) = (tmp_path / "runs").iterdir()
    assert len(list((run / "ranks").iterdir())) >= 2 and ranks_of(tmp_path) == []
