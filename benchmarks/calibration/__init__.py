"""The planner's constants: `calibrate` fits them to measured rows and published runs, and writes calibration.toml.

`rows` and `published` read what others measured, `reading` finds in the catalog what a row's words mean,
`architectures` has the shapes of models by their published dimensions, `splits` says how far
predictions are off, and `report` shows it.
"""
