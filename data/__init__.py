"""From text to batches: documents, tokenizer, shards, loader. Independent of the model."""
