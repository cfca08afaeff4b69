"""The soak: train under a seeded schedule of faults, and show that they changed nothing.

    schedule ──► run ──► check ──► ok, with a table of faults
                  ▲        └─► failed ──► shrink: which faults are enough to make it fail
                  └─────────────────────────┘

schedule    plans, kinds of faults, and the schedule as a value made from a seed
run         trains under a schedule of faults, measures what each costs, and compares
processes   one run: its machines in network namespaces, its supervisors and ranks, its disk
faults      how each kind of fault is made to happen
progress    how far a run is, from its metrics
sample      memory, threads and files of processes over time, and their slopes
check       what must hold at the end, as functions of values
shrink      the smallest schedule that still fails
clock/      a wall clock that can jump, for the processes of a run; model, what they train

`python -m tests.soak --plan stale --faults 20 --seed 1`; `make soak` runs all plans.
"""
