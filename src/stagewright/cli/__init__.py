"""The command line: `main` parses and dispatches, `options` has every option, `parser` every command with the options
that it takes, and one file per group of commands runs them.

Nothing imports this folder but `stagewright.__main__`. `main`, `options` and `parser` start without torch; the modules
of commands import what they need at their top, and `main` imports the one that the user asked for.
"""
