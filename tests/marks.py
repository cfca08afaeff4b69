"""What takes too long for every day; `make soak` or `make nightly` runs it."""

import os

import pytest

soak = pytest.mark.skipif("STAGEWRIGHT_SOAK" not in os.environ, reason="takes long: make soak")
IS_NIGHTLY = "STAGEWRIGHT_NIGHTLY" in os.environ
nightly = pytest.mark.skipif(not IS_NIGHTLY, reason="takes long: make nightly")
