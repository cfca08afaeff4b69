"""Training data, from files on disk to microbatches on a device.

`datasets` opens folders, tar shards and OFRecord parts through an `index`; `sources` turns records into samples;
`order` says which samples make up which microbatch; `loader` and `on_device` load microbatches; `survey` and `convert`
are commands. Imports `errors` and `metrics` only; `runtime`, `run`, `bench` and `cli` may import it.
"""
