"""What people see of runs: pages as HTML and Markdown, and progress in a terminal or a browser (`live/`).

`read` reads a run folder; `run` and `compare` make a `page` of it, from `figures`, `summary`, `sections` and
`timeline`; `html` (with `charts`) and `markdown` draw that page, and both show the `numbers` of a figure. `columns` are
what tables have of a row, `words` how numbers are written. Anyone may import this folder; it imports only `metrics`,
`events`, `files`, `voice` and `errors`, and `run/report.py` tells it the plan's ranks.
"""
