"""Plans as values (`plan`, `make`), the formulas of their time and memory (`cost`, `memory`, `estimate`, `stability`),
and the search for the fastest one (`search`, over the arrays of `search_space` and `stage_costs`).

Nothing here simulates or chooses by simulation: `planning` does, and this folder never imports it.
"""
