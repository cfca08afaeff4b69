"""What a run uses of its machine while it lasts: memory, cores, GPUs, power."""
