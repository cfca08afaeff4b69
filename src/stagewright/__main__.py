"""Where the command begins: an interrupt while it is still importing is one line too."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from stagewright.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("stagewright: interrupted before it began\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
