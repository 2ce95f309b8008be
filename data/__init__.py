"""Text to batches: sources of documents, a tokenizer, token shards on disk, a loader. Nothing of the model or of the run."""


class IntegrityError(Exception):
    """What lies on disk is not what was written there."""
