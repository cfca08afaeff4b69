"""Models: the zoo, and how a model is cut into units."""
