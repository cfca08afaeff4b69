"""`models`: models that nobody here wrote, by which cutting is tried, in small variants.

`catalog` lists them: `images` of torchvision and timm, `configured` of transformers, `own` of torch alone. `run` cuts
and trains them, beside `plain`.
"""
