"""Documents to token shards, once: later runs find them by what they are made from.

A build happens under a lock, in a sealed folder: what has the right name is complete.
"""

import fcntl
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.atomic_dir import StagingDirectory, atomic_directory, flock, remove_leftovers, verify
from common.progress import waiting
from data.shards import ShardWriter, open_shard
from data.sources import Source
from data.tokenizer import Tokenizer

SPLITS = ("train", "validation")
SAMPLE = 50_000_000  # characters a tokenizer is trained on
VALIDATION = 2_000_000  # bytes held out at most, at whole documents


@dataclass
class Corpus:
    """Token shards of both splits, the UTF-8 bytes of the validation tokens, where known, and a hash of all."""

    train: list[np.ndarray]
    validation: list[np.ndarray]
    validation_bytes: int | None
    tokenizer: Tokenizer
    sha256: str


def prepare(
    source: Source,
    cache: Path,
    enough: Callable[[int], None] = lambda tokens: None,
    quiet: bool = False,
) -> Corpus:
    """Finds the corpus, or builds it in the cache. Of processes that call at once, one builds and the others wait.

    `enough` may raise ValueError for the number of training tokens; then nothing is kept.
    Raises ValueError for text that cannot be used, IntegrityError for shards that were changed.
    """
    given = source.pretrained_tokenizer()
    if (shards := source.memmapped_shards()) is not None:
        size = given.nbytes(np.concatenate(shards["validation"]))
        return Corpus(
            **shards, validation_bytes=size, tokenizer=given, sha256=digest(source.fingerprint())
        )
    code = [
        path.read_text()
        for path in sorted(Path(__file__).parent.glob("*.py"))
        if path.stem != "loader"
    ]
    made_from = [source.fingerprint(), given.sha256 if given else source.vocab_size, *code]
    folder = cache / f"{type(source).__name__.lower()}-{digest(json.dumps(made_from))[:16]}"
    if not folder.exists():
        with exclusive(cache):
            if not folder.exists():
                build_corpus(source, given, folder, enough, quiet)
    about = verify(folder, f"delete {folder}, it is made again")
    shards = {
        split: [open_shard(folder / name, about["dtype"]) for name in about[split]]
        for split in SPLITS
    }
    content = json.dumps(
        [about["files"][name]["sha256"] for split in SPLITS for name in about[split]]
    )
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    size = about["validation_bytes"] or tokenizer.nbytes(np.concatenate(shards["validation"]))
    return Corpus(**shards, validation_bytes=size, tokenizer=tokenizer, sha256=digest(content))


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


@contextmanager
def exclusive(cache: Path) -> Iterator[None]:
    """One process at a time prepares, until it ends, however it ends. What fails leaves no trace."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        flock(lock, fcntl.LOCK_EX)
        remove_leftovers(cache)
        try:
            yield
        except BaseException:
            if [path.name for path in cache.iterdir()] == [".lock"]:
                shutil.rmtree(cache)
            raise


def build_corpus(
    source: Source,
    tokenizer: Tokenizer | None,
    folder: Path,
    enough: Callable[[int], None],
    quiet: bool,
) -> None:
    with atomic_directory(folder) as unsealed:
        if tokenizer is None:
            with waiting(
                f"training a tokenizer of {source.vocab_size} pieces, once", is_shown=not quiet
            ):
                tokenizer = Tokenizer.train(tokenizer_corpus(source), source.vocab_size)
        unsealed.about = write_shards(source, tokenizer, unsealed, quiet)
        unsealed.create("tokenizer.model").write(tokenizer.proto)
        enough(unsealed.about["train_tokens"])


def tokenizer_corpus(source: Source) -> Iterator[str]:
    """Training documents up to SAMPLE characters."""
    size = 0
    for text, held_out in source.documents():
        if size >= SAMPLE:
            return
        if not held_out:
            size += len(text)
            yield text


def write_shards(
    source: Source, tokenizer: Tokenizer, folder: StagingDirectory, quiet: bool
) -> dict:
    train, validation = (ShardWriter(folder, split, tokenizer.vocab_size) for split in SPLITS)
    held_bytes, held_enough = 0, False
    with tqdm(
        unit=" tokens", unit_scale=True, desc="tokenise", disable=quiet or not sys.stderr.isatty()
    ) as bar:
        for tokens, size, held_out in source.tokenize(tokenizer):
            if not held_out:
                train.write(tokens)
                bar.update(len(tokens))
            elif held_bytes == 0 or (not held_enough and held_bytes + size <= VALIDATION):
                validation.write(tokens)
                held_bytes += size
            else:
                held_enough = True
            if train.total >= (source.tokens or math.inf):
                break
    for split, writer in (("training", train), ("validation", validation)):
        writer.flush()
        if not writer.names:
            raise ValueError(f"no {split} text (of {type(source).__name__}). fix: more documents")
    return {
        "train": train.names,
        "validation": validation.names,
        "validation_bytes": held_bytes,
        "train_tokens": train.total,
        "dtype": train.dtype.name,
    }
