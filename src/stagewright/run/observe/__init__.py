"""What looks at a run while it trains: the monitor of its processes and GPUs, a user's callbacks, and trackers.

`run.train` imports this folder; it imports the runtime and hardware, and nothing of `run`.
"""
