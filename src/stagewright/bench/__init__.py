"""Measure: suites of configurations in turns (`run`), Stagewright and stock PyTorch on the same work (`peers/`), what
lag costs in accuracy (`learning/`), models of libraries (`models/`), the demo (`demo/`), and single parts (`micro/`).
`suites/` and `studies/` hold the shipped TOML files.

Only `cli` imports this folder; it may import every other one.
"""
