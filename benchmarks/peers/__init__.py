"""`overhead`, `peers`, `gpu`, `transformers` and `shared`: Stagewright and stock PyTorch on the same work, in turns.

`cases` says what is compared, `run` has the rank processes of all sides, which train in turns, and `sides` is how each
side trains; `whole` compares whole commands, `shared` predicts first what it measures.
"""
