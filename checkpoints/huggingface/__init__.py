"""Models in the layout of `transformers`, written and read."""
