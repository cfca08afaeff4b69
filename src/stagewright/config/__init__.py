"""The configuration of a run: every option with its default and bounds (`sections`), what excludes or needs what
(`rules`), and its TOML files (`toml`).

Imports nothing of ours but `errors`; every other folder may import it.
"""
