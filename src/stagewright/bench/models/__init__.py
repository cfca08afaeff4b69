"""Models that nobody here wrote, by which cutting is tried: `libraries` imports the packages they come from.

Imported by `cli`.
"""
