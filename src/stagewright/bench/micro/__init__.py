"""Benchmarks of single parts: data loading, checkpoints, the monitor, the planner, and how accurate predictions are.

Each module has `measure`, `describe` (one JSON object) and `show` (for the terminal). Only `cli` imports this folder.
"""
