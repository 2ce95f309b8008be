"""Turn text into batches with a tokenizer, shards and a loader, independently of the model."""
