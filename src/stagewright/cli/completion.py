"""`stagewright completion`: print the script by which a shell completes commands, made of the table of commands."""

from __future__ import annotations

import argparse
import sys

from stagewright.cli.command.shells import SCRIPTS, Names
from stagewright.cli.parser import COMMANDS
from stagewright.cluster.catalog import shipped
from stagewright.model.networks.zoo import ZOO


def run(parsed: argparse.Namespace) -> None:
    sys.stdout.write(SCRIPTS[parsed.shell](COMMANDS, Names(tuple(ZOO), tuple(shipped().clusters))))
