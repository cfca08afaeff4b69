"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo ranks for the whole session; nothing starts before the first job."""
    from tests.distributed.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
