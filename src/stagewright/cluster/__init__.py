"""Hardware as values: devices, links and machines (`topology`), placements of stages on them (`placement`), and the
catalog of known devices, links, software and clusters (`catalog`, from the TOML files beside it).

Imports only `errors`, `files` and `metrics`; every other folder may import it.
"""
