"""Training: the loss, optimizers, evaluation, logging and checkpoints of a run."""
