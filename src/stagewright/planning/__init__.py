"""From options and measurements to a plan and its prediction: `build` makes the plan of a configuration, `setting`
describes where it runs, `simulate` and `predict` time it, `planner` finds the fastest, and `compare` says how sure
that is. `rows`, `reading` and `published` are rates that others measured; `calibrate` fits the catalog to them, and
`evidence` names what a prediction is based on.

Imports `plan`, `profile`, `schedule` and what is below them; `run`, `bench` and `cli` import it.
"""
