"""What a rank does with its stages: the worker that interprets programs, its replicas, weights and gradients.

`worker` is the entry point; `replica` runs one stage, `versions` keeps its weights, `gradients` its gradients,
`loss_scaling`, `precision` and `optimizer` decide the numbers. `checkpoint`, `multinode` and `process` may import this.
"""
