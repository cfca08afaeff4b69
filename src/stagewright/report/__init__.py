"""What people see of runs: pages as HTML and Markdown, and progress in a terminal or a browser (`live/`).

`read` reads a run folder, `run` and `compare` make a `page` of it, `html` and `markdown` draw that page. Anyone may
import this folder; it imports only `metrics`, `events`, `files` and `errors`, and `run/report.py` tells it the plan's
ranks.
"""
