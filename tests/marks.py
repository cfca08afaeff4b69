"""What takes too long for every day; `make soak` runs it."""

import os

import pytest

soak = pytest.mark.skipif("STAGEWRIGHT_SOAK" not in os.environ, reason="takes long: make soak")
