"""Ranks that a script's own loop drives: the batches it feeds them, its rates, one rank.

`run.script` imports this folder; it imports all others of runtime.
"""
