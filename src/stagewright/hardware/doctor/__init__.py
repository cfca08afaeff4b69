"""`stagewright doctor`: what this machine is, what will slow training down, and what to do about it.

`check` runs everything, `system`, `gpus` and `measure` return findings, `show` prints them. Only `cli` imports this.
"""
