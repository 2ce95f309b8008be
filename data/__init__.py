"""Text to batches: documents, tokenizer, shards, loader. Nothing of the model."""
