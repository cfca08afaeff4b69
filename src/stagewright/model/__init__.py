"""Models: the zoo, loading a user's model, and cutting any model into stages.

`zoo` names our own models, of which `networks` holds the newer ones; `load` builds a model from its name, `call` says
what it is called with, `loss` what is minimised. `cut` traces it into a chain of units and cuts that, `walk` runs it
unit by unit, `probe` finds what crosses each cut. Imports `errors`, `files` and `objects` only; everything except
`config`, `cluster`, `data` and `report` may import it.
"""
