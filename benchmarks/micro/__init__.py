"""Benchmarks of single parts: data loading, checkpoints, the monitor, the planner, a script's loop, growth, start-up,
and how accurate predictions are. Each module's `measure` returns an `Outcome`.
"""
