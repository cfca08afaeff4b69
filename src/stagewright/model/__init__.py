"""Models: loading a user's model, recording its forward, cutting it into stages and proving the cut.

`load` builds a model from its name (`networks` has our own, those of installed packages, and weights), `call` says what
it is called with, `loss` what is minimised. `standin` makes copies to analyse. `record` makes a graph of a forward and
`trace` both forwards of a model; `units` are the calls of a graph and `slice` cuts it; `blocks` cuts a model without a
graph. A `chain` is a model with the ways to cut it; `pieces` runs what it was cut into, `walk` unit by unit. `probe`
finds what crosses each cut, and `prove` compares the pieces with the whole model.
"""
