"""Turn text, token ids or a generated task into batches, independently of the model."""
