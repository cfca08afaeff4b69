"""`bench overhead`, `peers`, `gpu`, `transformers` and `shared`: Stagewright and stock PyTorch on the same work, in
turns.

`cases` says what is compared, `run` runs and prints it, `launch` starts the rank processes of each side, `process` is
what each of them executes, and `sides` is how each side trains. Only `cli` imports this folder.
"""
