"""The networks of the zoo that have a file of their own; only `model.zoo` imports them."""
