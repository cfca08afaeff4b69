"""Checkpoints: files and manifest (format, folder), a rank's side (save, load) and the supervisor's side (commit).

`pauses` agrees on the batch after which every rank saves. `run` and `cli` read checkpoints through `folder`."""
