"""Runs on the disk and on the machine: config, folder, checkpoints, device, processes, errors."""
