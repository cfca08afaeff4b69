"""How samples are stored: one module for each format, and what they share.

`records` reads encoded images by their places in an `index`; `folders`, `tar` and `ofrecord` find those places.
`fields` has what a microbatch is made of. Imports `errors`, `files`, `metrics` and `config.sources` only; `data`
imports it, and `cli` for commands.
"""
