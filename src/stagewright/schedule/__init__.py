"""Schedules: for every rank the ordered list of actions, as data."""
