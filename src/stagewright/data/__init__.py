"""Training data, from files on disk to microbatches on a device.

`formats` reads what is stored; `datasets` opens images, which have `labels` or masks (`segmentation`); `sources` opens
any data that `config.sources` lists and gives samples by index; `order` says which samples make up which microbatch;
`loader` and `on_device` load microbatches, by the threads of `pool` or by `processes`; `survey` and `convert` are
commands. Imports `errors`, `files`, `metrics`, `objects` and `config.sources` only; `runtime`, `run`, `bench` and `cli`
may import it.
"""
