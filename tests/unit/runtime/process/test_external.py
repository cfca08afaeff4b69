"""The place of a process that torchrun or srun has started, and what it is told before the ranks meet."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.config.sections import Config, NodesConfig, RunConfig
from stagewright.errors import UserError
from stagewright.runtime.process.external import ExternalGroup, ExternalRank, find_rank
from tests.parity import Case, make_job
from tests.waiting import LONG

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1"}


def pair(port: int) -> tuple[ExternalGroup, ExternalGroup]:
    """Two ranks, which wait for each other."""
    places = [ExternalRank("srun", rank, 2, "127.0.0.1", port) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda place: ExternalGroup(place, float(LONG)), places)
    return first, second


def test_a_command_without_a_launcher_starts_its_ranks_itself() -> None:
    for environment in ({}, {"RANK": "0"}, {"WORLD_SIZE": "3"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}):
        assert find_rank(Config(), environment) is None  # the last is a batch script, which runs once
    assert find_rank(Config(), {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert find_rank(Config(nodes=NodesConfig("slurm")), SRUN) is None  # one command per machine


def test_finds_its_rank_in_the_variables_of_torchrun() -> None:
    assert find_rank(Config(), TORCHRUN) == ExternalRank("torchrun", 1, 3, "10.0.0.1", 29500)
    again = find_rank(Config(), {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert again is not None and again.attempt == 2


def test_finds_its_rank_and_a_common_port_in_the_variables_of_srun() -> None:
    found = [
        find_rank(Config(), {**SRUN, "MASTER_ADDR": "n1", "SLURM_PROCID": str(rank), "SLURM_STEP_ID": str(step)})
        for rank, step in ((0, 1), (2, 1), (0, 2))
    ]
    first, last, other = found
    assert first is not None and last is not None and other is not None
    assert (last.rank, last.world, last.host) == (2, 3, "n1") and last.launcher == "srun"
    assert first.port == last.port != other.port and 1024 < first.port < 32768


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (Config(), {**TORCHRUN, "RANK": "one"}, "RANK is 'one', not a number"),
        (Config(), {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is None"),
        (Config(nodes=NodesConfig("a,b")), TORCHRUN, "torchrun has started 3 processes, one per rank, but --nodes a,b"),
        (Config(run=RunConfig(emulate=True)), SRUN | {"MASTER_ADDR": "a"}, "srun has started 3 .* but --emulate"),
        (Config(run=RunConfig(max_restarts=2)), TORCHRUN, "give --max-restarts 2 to torchrun"),
    ],
)
def test_refuses_options_that_do_not_fit_the_launcher(
    config: Config, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        find_rank(config, environment)


def test_other_ranks_get_the_job_that_rank_0_has_prepared(port: int, tmp_path: Path) -> None:
    job = make_job(Case("plain", "0:0.0:1", "third"), tmp_path)
    first, second = pair(port)
    with first:
        first.publish(job)
    assert second.receive() == job
    meeting = second.meeting(job)
    assert meeting.site is not None and meeting.site.index == 1 and meeting.site.address == "127.0.0.1"
    assert [name.partition(" (")[0] for name in meeting.site.names] == ["rank 0", "rank 1"]


def test_other_ranks_end_where_rank_0_fails_to_prepare_a_job(port: int) -> None:
    first, second = pair(port)
    with pytest.raises(UserError, match="wrong"), first:
        raise UserError("wrong")
    assert second.receive() is None


def test_names_a_rank_that_can_not_see_the_run_folder(port: int, tmp_path: Path) -> None:
    first, second = pair(port)
    job = make_job(Case("plain", "0:0.0:1", "third"), tmp_path)
    first.publish(job)
    (Path(job.folder) / "job.json").unlink()
    with pytest.raises(UserError, match=r"rank 1 on .* can't see .*job.json.*; choose --runs on a shared"):
        second.receive()


def test_the_placement_must_say_which_ranks_are_on_one_machine(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["here", "there"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(hosts))
    first, _ = pair(port)
    with pytest.raises(UserError, match=r"ranks 0 and 1 on machine 0, but srun has started them on (here|there) and"):
        first.publish(make_job(Case("plain", "0:0.0:1", "third"), tmp_path))


def test_a_restart_by_torchrun_continues_in_the_folder_of_the_run(port: int, tmp_path: Path) -> None:
    place = ExternalRank("torchrun", 0, 1, "127.0.0.1", port)
    before = ExternalGroup(place, float(LONG))
    assert before.restarted_job() is None
    job = make_job(Case("plain", "0:0"), tmp_path)
    before.publish(job)
    again = ExternalGroup(replace(place, attempt=1), float(LONG))
    assert again.restarted_job() == job
    second = ExternalGroup(replace(place, attempt=1), float(LONG))  # the script's second training has not begun before
    assert second.restarted_job() is None
