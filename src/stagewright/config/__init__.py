"""The configuration of a run: every option with its default and bounds (`sections`), groups of parameters (`groups`),
what excludes or needs what (`rules`), and its TOML files (`toml`).

Imports nothing of ours but `errors` and `files`; every other folder may import it.
"""
