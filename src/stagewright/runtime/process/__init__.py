"""Processes of a run: the supervisor that starts and watches them (launch, external, supervisor, decide, children,
watchdog, signals), the process of one rank (rank, assemble, torch_flags) and how it gets a script's objects
(object_pipe), all ranks in one process (emulate), what drives either (session), and their events (log).

`link_test` measures connections between processes. `run` and `bench` import this folder; nothing below it does."""
