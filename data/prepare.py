"""Turn documents into token shards, once: later runs find them in a cache, by a hash.

A corpus is built under a lock, in an atomic directory: a folder that has its name is complete.
"""

import fcntl
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.corpus import Corpus
from data.files import text_hash
from data.loader import check_enough_tokens
from data.sources import Source
from data.tokenizer import Tokenizer, tokenizer_file
from run.progress import waiting
from run.sealed import StagingDirectory, atomic_directory, flock, remove_leftovers, verify

# Part of the cache key: increase it if a change in data/ gives other tokens for the same text.
FORMAT_VERSION = 1
SPLITS = ("train", "validation")
DOCUMENTS_PER_BATCH = 256  # tokenized together, on all cores
MAX_TOKENIZER_CHARS = 50_000_000  # characters of training text that a tokenizer is trained on
MAX_VALIDATION_BYTES = 2_000_000  # UTF-8 bytes held out at most, in whole documents


def prepare(source: Source, cache_dir: Path, min_tokens: int = 0, quiet: bool = False) -> Corpus:
    """Open the corpus of a source, after building it in `cache_dir` if it is not there.

    Of processes that call this at once, one builds and the others wait. Raises ValueError for text
    that cannot be used or has fewer than `min_tokens` training tokens, and leaves no files then.
    Raises IntegrityError for a corpus that was changed on disk.
    """
    corpus = source.corpus()
    if corpus is not None:
        return corpus

    # The cache key is the content and the tokenizer, or the vocabulary size of one to be trained.
    tokenizer = source.pretrained_tokenizer()
    vocabulary = source.vocab_size if tokenizer is None else tokenizer.sha256
    cache_key = text_hash(json.dumps([FORMAT_VERSION, source.fingerprint(), vocabulary]))
    folder = cache_dir / f"{source.name}-{cache_key[:16]}"
    if not folder.exists():
        with exclusive(cache_dir):
            # Another process may have built it while this one was waiting for the lock.
            if not folder.exists():
                build_corpus(source, tokenizer, folder, min_tokens, quiet)
    return open_corpus(folder)


def open_corpus(folder: Path) -> Corpus:
    """Verify a folder that build_corpus() wrote and map its shards."""
    manifest = verify(folder, f"delete {folder}, it is made again")
    shards = {}
    hashes = []
    for split in SPLITS:
        name = shard_name(split)
        shards[split] = [np.memmap(folder / name, manifest["dtype"], mode="r")]
        hashes.append(manifest["files"][name]["sha256"])
    return Corpus(
        **shards,
        validation_bytes=manifest["validation_bytes"],
        tokenizer=Tokenizer.load(tokenizer_file(folder)),
        sha256=text_hash(json.dumps(hashes)),
    )


@contextmanager
def exclusive(cache_dir: Path) -> Iterator[None]:
    """Let one process at a time build in the cache; the lock ends with it, however it ends.

    Removes a cache that is still empty after a failure.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / ".lock").open("w") as lock:
        flock(lock, fcntl.LOCK_EX)
        # Whatever is unfinished under the lock was left by a process that was killed.
        remove_leftovers(cache_dir)
        try:
            yield
        except BaseException:
            if [path.name for path in cache_dir.iterdir()] == [".lock"]:
                shutil.rmtree(cache_dir)
            raise


def build_corpus(
    source: Source, tokenizer: Tokenizer | None, folder: Path, min_tokens: int, quiet: bool
) -> None:
    """Write shards, tokenizer and manifest to `folder`; train a tokenizer if there is none."""
    with atomic_directory(folder) as staging:
        if tokenizer is None:
            message = f"training a tokenizer of {source.vocab_size} pieces, once"
            with waiting(message, is_shown=not quiet):
                tokenizer = Tokenizer.train(tokenizer_corpus(source), source.vocab_size)
        staging.metadata = write_shards(source, tokenizer, staging, quiet)
        for name, content in tokenizer.files.items():
            staging.create(name).write(content)
        # Raised in here, the error removes the folder too.
        check_enough_tokens(staging.metadata["train_tokens"], min_tokens)


def tokenizer_corpus(source: Source) -> Iterator[str]:
    """Yield training documents until they have MAX_TOKENIZER_CHARS characters."""
    size = 0
    for text, is_held_out in source.documents():
        if size >= MAX_TOKENIZER_CHARS:
            return
        if not is_held_out:
            size += len(text)
            yield text


def write_shards(
    source: Source, tokenizer: Tokenizer, folder: StagingDirectory, quiet: bool
) -> dict:
    """Tokenize the documents into a file for each split -> what the manifest says about them.

    Raises ValueError if a split has no document.
    """
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    files = {split: folder.create(shard_name(split)) for split in SPLITS}
    train_tokens = 0
    max_train_tokens = source.tokens or math.inf
    validation_bytes = 0
    is_validation_full = False

    # Batches use all cores without the whole text in memory. Without a terminal, there is no bar.
    documents = source.documents()
    with tqdm(unit=" tokens", unit_scale=True, desc="tokenize", disable=quiet or None) as bar:
        while train_tokens < max_train_tokens:
            batch = list(islice(documents, DOCUMENTS_PER_BATCH))
            if not batch:
                break
            encoded = tokenizer.encode_documents([text for text, _ in batch])
            shards = {split: [] for split in SPLITS}
            for tokens, (text, is_held_out) in zip(encoded, batch, strict=True):
                if train_tokens >= max_train_tokens:
                    break
                if not is_held_out:
                    shards["train"] += tokens
                    train_tokens += len(tokens)
                    continue
                # The first held-out document is taken whatever its size. The first that does not
                # fit ends the split.
                nbytes = len(text.encode())
                if validation_bytes > 0 and validation_bytes + nbytes > MAX_VALIDATION_BYTES:
                    is_validation_full = True
                if not is_validation_full:
                    shards["validation"] += tokens
                    validation_bytes += nbytes
            # A token that does not fit into the dtype raises OverflowError.
            for split, tokens in shards.items():
                files[split].write(np.array(tokens, dtype).tobytes())
            bar.update(len(shards["train"]))

    for split, file in files.items():
        if file.size == 0:
            raise ValueError(f"no {split} text (of {type(source).__name__}). fix: data.path=PATH")
    return {"validation_bytes": validation_bytes, "train_tokens": train_tokens, "dtype": dtype.name}


def shard_name(split: str) -> str:
    return f"{split}-00000.bin"
