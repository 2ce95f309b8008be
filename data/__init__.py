"""From text to batches: documents, tokenizer, shards, loader. Does not know the model."""
