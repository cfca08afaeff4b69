"""The command line: `main` parses and dispatches, `parser` has every command with the options that it takes, `command/`
what an option and a command are, and one file per group of commands runs them.

Only `stagewright.__main__` imports this folder, and `api` its `parser`. `main` and `parser` start without torch; the
modules of commands import what they need at their top, and `main` imports the one that the user asked for.
"""
