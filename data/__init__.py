"""Text to batches: documents, tokenizer, token shards, loader. Nothing of the model or of the run."""
