"""Data: encoded images and other sources, the one global order of samples, and the loading of microbatches."""
