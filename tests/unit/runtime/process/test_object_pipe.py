"""A script's objects on their way to ranks: what travels, how, and what happens to a process that does not read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from stagewright import objects
from stagewright.cluster.placement import parse_placement
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.plan.make import make_plan
from stagewright.runtime.process.children import start_process
from stagewright.runtime.process.object_pipe import content_for, given_names, pack, receive_objects, require_portable
from tests.waiting import wait_until

LARGE = bytes(3 << 20)  # more than a pipe holds
COUNT = "import os; print(len(os.fdopen(int(os.environ['STAGEWRIGHT_OBJECTS']), 'rb').read()))"


def in_this_process(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receive what was packed, as a rank does."""
    reading, writing = os.pipe()
    thread = threading.Thread(target=lambda: os.fdopen(writing, "wb").write(content))
    thread.start()
    monkeypatch.setenv("STAGEWRIGHT_OBJECTS", str(reading))
    receive_objects()
    thread.join()
    assert "STAGEWRIGHT_OBJECTS" not in os.environ


def test_a_process_inherits_a_pipe_with_everything() -> None:
    started = start_process([sys.executable, "-Ic", COUNT], LARGE, stdout=subprocess.PIPE)
    assert started.communicate()[0] == f"{len(LARGE)}\n" and started.returncode == 0


def test_a_process_that_ends_without_reading_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = set(threading.enumerate())
    started = start_process([sys.executable, "-Ic", "import os; os._exit(3)"], LARGE)
    assert started.wait() == 3
    wait_until(lambda: before.issuperset(threading.enumerate()))
    assert raised == []


def test_a_command_that_does_not_exist_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        start_process(["/no/such/program"], LARGE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_views_of_one_storage_travel_once_and_stay_views(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(100, 1000)
    name = objects.put(list(whole), "views")
    content = pack([name])
    assert len(content) < 2 * whole.nbytes
    objects.remove(name)
    in_this_process(content, monkeypatch)
    found = objects.load_object(name, "data")
    objects.remove(name)
    assert torch.equal(torch.stack(found), whole)
    found[0].add_(1)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_functions_of_a_script_share_its_globals_and_its_folders_are_imported_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script: dict[str, object] = {"__name__": "__main__", "seen": []}
    exec("def add(x):\n    seen.append(x)\ndef count():\n    return len(seen)", script)
    names = [objects.put(script[name]) for name in ("add", "count")]
    monkeypatch.setattr(sys, "path", [*sys.path, "/a/folder/of/the/script"])
    content = pack(names)
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    objects.remove(*names)
    in_this_process(content, monkeypatch)
    add, count = (objects.load_object(name, "loss") for name in names)
    objects.remove(*names)
    add(1)
    assert count() == 1 and script["seen"] == [] and "/a/folder/of/the/script" in sys.path


def test_an_object_that_can_not_travel_is_named() -> None:
    class Locked(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.lock = threading.Lock()

    name = objects.put(Locked())
    with pytest.raises(UserError, match=r"^Locked can't be sent to ranks \(TypeError.*lock.*give a function"):
        require_portable(make_config({"model": {"name": name}}))
    objects.remove(name)


def test_bytes_that_are_no_objects_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="can't be made again in another process"):
        in_this_process(b"[]\nno objects", monkeypatch)


def test_a_rank_gets_the_objects_that_its_stages_need() -> None:
    own = {name: f"stagewright.objects:{name}" for name in ("net", "data", "val", "loss", "metric")}
    config = make_config(
        {
            "model": {"name": own["net"]},
            "data": {"source": f"python:{own['data']}", "val": f"python:{own['val']}"},
            "loss": {"name": own["loss"]},
            "run": {"metrics": f"top1,{own['metric']}"},
        }
    )
    plan = make_plan(parse_placement("0:0.0:1.0:2"), batch=4, microbatches=4, cuts=["a", "b"])
    found = [{name.partition(":")[2] for name in given_names(config, plan, rank)} for rank in range(3)]
    assert found == [{"net", "data", "val"}, {"net"}, {"net", "loss", "metric"}]
    assert set(given_names(config)) == set(own.values()) and not given_names(make_config({}))


def test_only_runs_of_a_users_code_have_a_pipe_and_ranks_alike_share_what_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(parse_placement("0:0-1.0:2"), batch=4, microbatches=4, cuts=["a"])
    packed: dict[tuple[str, ...], bytes] = {}
    assert content_for(make_config({}), plan, 0, packed) is None and not packed
    named = content_for(make_config({"model": {"name": "nets:make"}}), plan, 0, packed)
    assert named is not None and named.endswith(b"]\n")
    in_this_process(named, monkeypatch)  # folders alone
    own = make_config({"model": {"name": objects.put(torch.nn.Linear(1, 1), "net")}})
    first, second = (content_for(own, plan, rank, packed) for rank in (0, 2))
    assert first is second and len(packed) == 2
    objects.remove(own.model.name)
