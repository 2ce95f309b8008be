"""The objects that every part of a run may use."""

from dataclasses import dataclass
from pathlib import Path

from data.corpus import Corpus
from data.loader import Loader
from run.distributed import Ranks
from run.settings import Settings
from run.signals import Signals
from training.clock import Clock


@dataclass(frozen=True)
class Environment:
    """The settings of a run, its text, its folder, and the processes that train it."""

    settings: Settings
    corpus: Corpus
    loader: Loader
    run_dir: Path
    ranks: Ranks
    signals: Signals
    clock: Clock
