"""What a machine is: its system, its GPUs and how they are connected, here or as text from elsewhere."""
