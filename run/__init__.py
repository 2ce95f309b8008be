"""Support for runs, in four groups of modules.

settings   compose, settings, ranges, instantiate, cli
storage    folder, checkpoint, paths
machine    hardware, distributed, compilation, threads
terminal   errors, progress, signals
"""

from pathlib import Path

from run import threads

ROOT = Path(__file__).parents[1]  # the repository's root folder

# train.py imports this package before torch, whose libraries read these settings only once.
threads.limit_spin_wait()
