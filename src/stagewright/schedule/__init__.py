"""Schedules as data: for every rank the ordered list of its actions, from a plan alone.

`policy` orders them, `lower` adds transfers, `requires` says what each waits for, `check` proves a plan. Imports only
`plan`; the simulator and the workers of `runtime` run the same programs.
"""
