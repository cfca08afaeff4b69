"""This machine: its host, GPUs and connections, what a run uses of them, and `stagewright doctor` (`doctor/`).

`gpu` is the only module that talks to NVIDIA's management library; `smi` and `cluster_file` turn another machine's
`nvidia-smi` output into a cluster file; `versions` has what was tested. Anything above `cluster` may import this
folder; `doctor` is for `cli` alone.
"""
