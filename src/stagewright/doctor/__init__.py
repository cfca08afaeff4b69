"""What this machine is, what will hurt, and what to do about it."""
