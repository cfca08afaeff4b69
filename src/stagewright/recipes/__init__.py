"""Ready-made runs."""
