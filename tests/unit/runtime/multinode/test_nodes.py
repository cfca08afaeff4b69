"""`--nodes`: which machines take part, which one this is, and the token they share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.config.sections import NodesConfig
from stagewright.errors import UserError
from stagewright.runtime.multinode.nodes import Node, find_site, interface_of, read_nodes, read_token

TOKEN = {"STAGEWRIGHT_TOKEN": "sixteen letters or more"}


def test_reads_addresses_and_names_with_and_without_a_port() -> None:
    nodes = read_nodes("10.0.0.1, 10.0.0.2:7000,fd00::1,[fd00::2],[fd00::3]:7001,worker-3.lan,worker-4:7002")
    assert [(node.host, node.port) for node in nodes] == [
        ("10.0.0.1", 29600),
        ("10.0.0.2", 7000),
        ("fd00::1", 29600),
        ("fd00::2", 29600),
        ("fd00::3", 7001),
        ("worker-3.lan", 29600),
        ("worker-4", 7002),
    ]
    assert str(nodes[1]) == "machine 1 (10.0.0.2)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not an address or host name"),
        ("10.0.0.1,", "not an address or host name"),
        ("10.0.0.1:0", "port 0"),
        ("10.0.0.1:65536", "port 65536"),
        ("10.0.0.1:" + "9" * 5000, "port 99999999;"),
        ("[fd00::1", "not an address or host name"),
        ("fd00::zz", "not an address or host name"),
        ("a b", "not a host name"),
        ("$(reboot)", "not a host name"),
        ("10.0.0.1,10.0.0.1", "10.0.0.1:29600 twice"),
    ],
)
def test_refuses_a_piece_that_is_not_a_machine(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_nodes(text)
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_finds_this_machine_by_address_or_index() -> None:
    found = find_site(NodesConfig("127.0.0.1:7000,127.0.0.1:7001", index=1), TOKEN)
    assert found is not None and found.index == 1 and found.address == "127.0.0.1" and not found.is_host
    assert found.nodes[0] == Node(0, "127.0.0.1", 7000)
    with pytest.raises(ValueError, match=r"2 of them .* are this machine; choose one with --node-index"):
        find_site(NodesConfig("127.0.0.1:7000,127.0.0.1:7001"), TOKEN)
    with pytest.raises(ValueError, match=r"198.51.100.1, 198.51.100.2, and none of them is this machine"):
        find_site(NodesConfig("198.51.100.1,198.51.100.2"), TOKEN)
    with pytest.raises(ValueError, match=r"index is 2 but --nodes names 2 machines \(0-1\)"):
        find_site(NodesConfig("127.0.0.1:7000,127.0.0.1:7001", index=2), TOKEN)
    with pytest.raises(ValueError, match=r"machine 0 \(198.51.100.1\), but this machine does not have that address"):
        find_site(NodesConfig("198.51.100.1,198.51.100.2", index=0), TOKEN)
    assert find_site(NodesConfig(), {}) is None


def test_refuses_a_name_that_only_this_machine_can_reach() -> None:
    with pytest.raises(ValueError, match=r"machine 0 \(localhost\), which is .* no other machine can reach"):
        find_site(NodesConfig("localhost,198.51.100.2"), TOKEN)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program of this name on the path: a shell script."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(script: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o700)

    return write


SLURM = TOKEN | {"SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}


def test_reads_machines_and_index_from_slurm(scontrol: Callable[[str], None]) -> None:
    scontrol('test "$1 $2" = "show hostnames" && echo "$3" | tr , "\\n"')  # without brackets there is nothing to expand
    site = find_site(NodesConfig("slurm"), SLURM)
    assert site is not None and site.index == 0 and [node.host for node in site.nodes] == ["localhost"]
    stepped = SLURM | {"SLURM_STEP_NODELIST": "n1,n2"}
    assert [node.host for node in read_nodes("slurm", stepped)] == ["n1", "n2"]
    with pytest.raises(UserError, match="SLURM_NODEID is None"):
        find_site(NodesConfig("slurm"), TOKEN | {"SLURM_JOB_NODELIST": "localhost"})


@pytest.mark.parametrize(
    ("listed", "script", "message"),
    [
        (None, "echo a", "SLURM_JOB_NODELIST is not set; start the command with srun"),
        ("-a", "echo a", "'-a' can't be read"),
        ("a\x1b", "echo a", "can't be read"),
        ("a[", "exit 1", "names no machines"),
        ("a", "yes a", "names more than 4096 machines"),
        ("a", "seq 4097", "names more than 4096 machines"),
        ("a", "echo 'a;b'", "'a;b' of 'slurm' is not a host name"),
        ("a", "printf '%0300d' 1", "is not a host name"),
        ("a", "printf '\\377\\n'", "can't be read by scontrol"),
        ("a", "echo a; echo a", "names a:29600 twice"),
    ],
)
def test_does_not_trust_what_scontrol_prints(
    listed: str | None, script: str, message: str, scontrol: Callable[[str], None]
) -> None:
    scontrol(script)
    with pytest.raises(UserError, match=re.escape(message)):
        read_nodes("slurm", {} if listed is None else {"SLURM_JOB_NODELIST": listed})


def test_says_that_scontrol_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="'n1' needs scontrol, which is not on the PATH"):
        read_nodes("slurm", {"SLURM_JOB_NODELIST": "n1"})


def test_refuses_a_token_that_is_short_or_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 32 + "\n")
    for mode in (0o644, 0o640, 0o604, 0o620):  # all, the group, others, or a group that may write
        path.chmod(mode)
        with pytest.raises(ValueError, match="can be read by others; chmod 600"):
            read_token(str(path), {})
    path.chmod(0o600)
    assert read_token(str(path), {}) == "x" * 32
    path.write_text("short")
    with pytest.raises(ValueError, match="has 5 characters; a token needs at least 16"):
        read_token(str(path), {})
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="not text"):
        read_token(str(path), {})
    with pytest.raises(ValueError, match="No such file"):
        read_token(str(tmp_path / "none"), {})
    with pytest.raises(UserError, match="not UTF-8"):
        read_token(None, dict.fromkeys(TOKEN, os.fsdecode(b"\xff" * 40)))
    with pytest.raises(ValueError, match="several machines need a token"):
        read_token(None, {})


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="Linux names its interfaces there")  # noqa: PTH110
def test_finds_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("198.51.100.1") is None
