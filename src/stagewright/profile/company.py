"""A process that keeps another company while it measures: `python -m stagewright.profile.company SUBJECT`."""

from __future__ import annotations

import sys

from stagewright.profile.measure import keep_company

if __name__ == "__main__":
    keep_company(sys.argv[1])
