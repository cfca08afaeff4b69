"""From options and measurements to a plan and its prediction: `build` makes the plan of a configuration, `setting`
describes where it runs, `simulate` and `predict` time it, `planner` compares candidates, and `calibrate` fits the
catalog to published runs.

Imports `plan`, `profile`, `schedule` and what is below them; `run`, `bench` and `cli` import it.
"""
