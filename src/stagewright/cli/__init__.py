"""The command line: `main` parses and dispatches, `parser` has every command and option, and one file per group of
commands runs them.

Nothing imports this folder but `stagewright.__main__`. `main` and `parser` start without torch; the modules of commands
import what they need at their top, and `main` imports the one that the user asked for.
"""
