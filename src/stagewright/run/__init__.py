"""One run from its options to its files: prepare it, train it, resume it, watch it, report it, export its weights.

`prepare` turns a configuration into a job and `train` runs it; the other modules are what they and the commands use.
Imported by `api`, `bench` and `cli`.
"""
