"""Processes of a run: the supervisor that starts and watches them (launch, supervisor, agent, watchdog, signals), the
process of one rank (rank, assemble), all ranks in one process (emulate), and what happens to their events (log).

`link_test` measures connections between processes. `run` and `bench` import this folder; nothing below it does."""
