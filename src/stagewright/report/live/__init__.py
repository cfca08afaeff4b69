"""A run while it trains: `terminal` prints progress, tables and timelines, `watch` follows a run folder, `serve` shows
its page to browsers on this machine. Imports nothing but the report folder and rich.
"""
