"""What every unit of a model costs on a device: measured there, computed for a device of the catalog, or imported.

`profile` holds the values and their file; `measure`, `analytic` and `pipedream` make them; `shapes` finds what a
unit does to one sample, `architectures` knows that of models of the literature. Imports `model` and `cluster`;
`plan`, `planning`, `run` and `cli` may import it.
"""
