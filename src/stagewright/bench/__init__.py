"""Measure: suites of configurations in turns (`run`, with `suites/`), this machine's loaders (`data`),
and two stages beside stock DDP (`demo/`). `result` is what a bench found, `pages` shows it,
`folder` keeps it, `compare` compares two.

Only `cli` imports this folder; it may import every other one.
"""
