"""What every test may ask for."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.marks import IS_NIGHTLY

try:
    from hypothesis import settings
except ImportError:  # on a machine that runs few of the tests
    pass
else:
    settings.register_profile("daily", deadline=None, derandomize=True, database=None)
    settings.register_profile("nightly", deadline=None)
    settings.load_profile("nightly" if IS_NIGHTLY else "daily")

if TYPE_CHECKING:
    from tests.distributed.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this session's own: no test finds a proof that a user's run, or other code, has left.

    Only the traced shapes of zoo models are shared by the processes of a session, which take seconds to trace.
    """
    folder, base = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shapes"
    shared.mkdir(exist_ok=True)
    (folder / "stagewright").mkdir()
    (folder / "stagewright" / "shapes").symlink_to(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("STAGEWRIGHT_CACHE", raising=False)  # it would come first
        patch.setenv("STAGEWRIGHT_QUIET", "1")  # on a loaded machine lines about what takes long would come at any time
        yield


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests outside tests/gpu train on the CPU, whatever this machine has: `--device auto` finds no GPU."""
    if "gpu" in request.path.parts:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():  # asked first: a process that begins without GPUs stays so
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo ranks for the whole session; nothing starts before the first job."""
    from tests.distributed.pool import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which only a server that is told its number can listen, as the store of a launcher's rank 0.

    A port that was found free and let go may be given to any other process before the server is up. This one stays
    bound, so the kernel gives it to nobody; and as it does not listen, a server that reuses addresses may.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
