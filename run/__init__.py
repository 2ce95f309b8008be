"""Support for runs: config, folder, checkpoints, device, processes and errors."""

from pathlib import Path

from run import threads

ROOT = Path(__file__).parents[1]  # the repository's root folder

# Every command imports this package before torch, whose libraries read these settings only once.
threads.bound_spinning()
