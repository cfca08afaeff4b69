"""Data: sources, the one global order of samples, and the loading of microbatches."""
