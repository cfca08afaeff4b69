"""Other libraries' training interfaces over our engine: `hf`, transformers' Trainer.

Each needs its library, which the package does not depend on, and nothing else imports this folder.
"""
