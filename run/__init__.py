"""Runs on disk and on the machine: config, folder, checkpoints, device, processes, errors."""

from run import threads

# Every command imports this package before torch, which reads these settings once.
threads.bound_spinning()
