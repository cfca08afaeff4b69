"""Plans: stages, ranks, microbatches, versions and depths."""
