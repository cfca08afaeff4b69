"""Runs a plan's programs on ranks: one process per rank, or all of them emulated in one process.

`job`, `faults`, `status_file` and `gate` are shared by everything below. The folders import each other in one
direction: comm < stage < checkpoint < multinode < process. `run` and `bench` start ranks through `process`."""
