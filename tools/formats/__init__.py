"""Models on disk, ours and others'."""
