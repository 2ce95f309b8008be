"""Text to batches: documents, tokenizer, token shards, loader. Nothing of the model or of the run."""


class IntegrityError(Exception):
    """What lies on disk is not what was written there."""
