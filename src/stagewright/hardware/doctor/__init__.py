"""`stagewright doctor`: what this machine is, what will slow training down, and what to do about it.

`check` runs and prints everything; `system`, `gpus` and `measure` return findings. Only `cli` imports this.
"""
