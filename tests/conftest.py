"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stagewright.planning.calibrate import Calibration
    from tests.distributed.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this session's own: no test finds a proof that a user's run, or other code, has left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo ranks for the whole session; nothing starts before the first job."""
    from tests.distributed.pool import Pool

    pool = Pool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share the calibration run in one process, so that it is made once."""
    for item in items:
        if "calibration" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("calibration"))


@pytest.fixture(scope="session")
def calibration() -> Calibration:
    """The catalog fitted to the published runs; it takes a while."""
    from stagewright.planning.calibrate import calibrate

    return calibrate()
