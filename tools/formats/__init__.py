"""Convert models and their configs to and from `transformers`."""
