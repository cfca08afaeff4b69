"""The entry point of the command: turns an interrupt during imports into one line too."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from stagewright.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("stagewright: interrupted before it started\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
