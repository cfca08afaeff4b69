"""The runtime: interprets a plan's programs on real ranks."""
