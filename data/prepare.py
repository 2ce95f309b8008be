"""Turn documents into token shards, once: later runs find them in a cache, by a hash.

A corpus is built under a lock, in an atomic directory: if the folder exists, it is complete.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from filelock import FileLock

from data.corpus import Corpus
from data.tokenizer import Tokenizer, tokenizer_file
from run.cache_folder import writable_cache
from run.errors import naming
from run.progress import say, waiting
from run.sealed import acquire, atomic_directory, remove_leftovers, verify

# Part of the cache key: increase it if a change in data/ gives other tokens for the same text.
VERSION = 2
TRAIN_SHARD = "train-00000.bin"
VALIDATION_SHARD = "validation-00000.bin"
DOCUMENTS_PER_BATCH = 256  # tokenized together, on all cores
MAX_TOKENIZER_CHARS = 50_000_000  # characters of training text that a tokenizer is trained on
MAX_VALIDATION_BYTES = 2_000_000  # UTF-8 bytes held out, in whole documents


@dataclass(kw_only=True)
class Source:
    """Documents and their tokenizer.

    The tokenizer is the file `tokenizer`; without one, a tokenizer of `vocab_size` pieces is
    trained on the training documents.
    """

    tokens = None  # stop after this many training tokens; None: take all
    is_endless = False  # True if no row comes twice
    vocab_size: int
    tokenizer: str | None

    def corpus(self) -> Corpus | None:
        """Return the corpus of a source that has it ready; None if prepare() has to build it."""
        return None

    def identity(self) -> str:
        """Return a text that is equal if and only if the documents are equal."""
        # Where the tokenizer is stored does not change the documents.
        return json.dumps(vars(self) | {"tokenizer": None})

    def documents(self) -> Iterator[tuple[str, bool]]:
        """Yield each document with whether it is held out, in an order that never changes."""
        return iter(())


def text_hash(text: str) -> str:
    """SHA-256 in hexadecimal. Unlike Python's hash(), it is the same in every process."""
    return sha256(text.encode()).hexdigest()


def prepare(source: Source, cache_dir: Path) -> Corpus:
    """Open the corpus of a source, after building it in `cache_dir` if it is not there.

    It is built in another cache if `cache_dir` cannot be written. If several processes call this at
    once, one builds and the others wait. Raises ValueError for text that cannot be used, and
    IntegrityError for a corpus that was changed on disk.
    """
    corpus = source.corpus()
    if corpus is not None:
        return corpus

    # The cache key is the content and the tokenizer, or the vocabulary size of one to be trained.
    identity = source.identity()
    folder = cache_dir / folder_name(source, identity, source.vocab_size)
    tokenizer = None
    if source.tokenizer:
        tokenizer = Tokenizer.load(source.tokenizer)
        # A run's own tokenizer may be the one that was trained on this text: its corpus is there.
        if not has_tokenizer(folder, tokenizer):
            folder = cache_dir / folder_name(source, identity, tokenizer.sha256)
    if not folder.exists():
        folder = writable_cache(cache_dir) / folder.name
    if not folder.exists():
        build_once(source, tokenizer, folder)

    # Verify the files, and map the shards.
    files = verify(folder, f"delete {folder}, it is made again")
    tokenizer = Tokenizer.load(tokenizer_file(folder))
    dtype = dtype_of(tokenizer)
    with naming(folder):
        train = np.memmap(folder / TRAIN_SHARD, dtype, "r")
        validation = np.memmap(folder / VALIDATION_SHARD, dtype, "r")
    tokens_hash = text_hash(files[TRAIN_SHARD] + files[VALIDATION_SHARD])
    return Corpus(train=[train], validation=validation, tokenizer=tokenizer, sha256=tokens_hash)


def folder_name(source: Source, identity: str, vocabulary: int | str) -> str:
    """Name the cache folder of a text with a tokenizer: its SHA-256, or the size of a new one."""
    key = text_hash(json.dumps([VERSION, identity, vocabulary]))
    return f"{type(source).__name__.lower()}-{key[:16]}"


def has_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether there is a corpus in `folder` with the same files of a tokenizer."""
    for name, content in tokenizer.files.items():
        file = folder / name
        if not file.exists() or file.read_bytes() != content:
            return False
    return True


def build_once(source: Source, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Build a corpus. Other processes that need it wait, if the file system has locks."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The system releases the lock if the process is killed, which a soft lock, the mere existence
    # of a file, would not guarantee.
    lock = FileLock(folder.with_name(".lock"), fallback_to_soft=False)
    try:
        if acquire(lock):
            # Unfinished folders are those of killed processes: another one would hold the lock.
            remove_leftovers(folder.parent)
            # Another process may have built it while this one was waiting.
            if not folder.exists():
                build_corpus(source, tokenizer, folder)
        else:
            build_unlocked(source, tokenizer, folder)
    finally:
        lock.release()


def build_unlocked(source: Source, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Build a corpus in a folder of this process, and rename it unless another was faster."""
    with TemporaryDirectory(prefix=".unlocked-", dir=folder.parent) as own:
        built = Path(own) / folder.name
        build_corpus(source, tokenizer, built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def build_corpus(source: Source, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write shards and tokenizer to `folder`; if `tokenizer` is None, train one."""
    with atomic_directory(folder) as staging, waiting("preparing the text, once"):
        if tokenizer is None:
            tokenizer = Tokenizer.train(tokenizer_corpus(source), source.vocab_size)
        for name, content in tokenizer.files.items():
            (staging / name).write_bytes(content)
        write_shards(source, tokenizer, staging)


def tokenizer_corpus(source: Source) -> Iterator[str]:
    """Yield training documents until they have MAX_TOKENIZER_CHARS characters."""
    size = 0
    for text, is_held_out in source.documents():
        if size >= MAX_TOKENIZER_CHARS:
            return
        if not is_held_out:
            size += len(text)
            yield text


def write_shards(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize the documents into a file for each split.

    Raises ValueError if a split has no document, OverflowError for a token id that is outside of
    the vocabulary and does not fit the dtype.
    """
    dtype = dtype_of(tokenizer)
    train_tokens = 0
    held_out_bytes = 0
    changes = []  # of held-out documents, which the tokenizer does not give back as they were
    with (
        (folder / TRAIN_SHARD).open("wb") as train,
        (folder / VALIDATION_SHARD).open("wb") as validation,
    ):
        for text, is_held_out, tokens in tokenized(source, tokenizer):
            raw = np.array(tokens, dtype).tobytes()
            if is_held_out:
                # The first held-out document is taken whatever its size. The first that does not
                # fit ends the split.
                is_first = held_out_bytes == 0
                held_out_bytes += len(text.encode())
                if is_first or held_out_bytes <= MAX_VALIDATION_BYTES:
                    validation.write(raw)
                    change = tokenizer.change(text, tokens)
                    if change is not None:
                        changes.append(change)
            else:
                train.write(raw)
                train_tokens += len(tokens)
                if source.tokens is not None and train_tokens >= source.tokens:
                    break
    if train_tokens == 0 or held_out_bytes == 0:
        raise ValueError(
            f"no text to train on, or none held out ({train_tokens} tokens, {held_out_bytes} "
            "bytes). fix: more documents"
        )
    if changes:
        say(
            f"warning: the tokenizer changes {len(changes)} of the held-out documents "
            f"({changes[0]}), and val_bpb counts the bytes that come back. fix: another "
            "data.tokenizer, if each byte matters"
        )


def tokenized(source: Source, tokenizer: Tokenizer) -> Iterator[tuple[str, bool, list[int]]]:
    """Yield each document, whether it is held out, and its tokens."""
    # A batch of documents is tokenized on all cores, and the whole text is never in memory.
    documents = source.documents()
    while batch := list(islice(documents, DOCUMENTS_PER_BATCH)):
        encoded = tokenizer.encode_documents([text for text, _ in batch])
        for (text, is_held_out), tokens in zip(batch, encoded, strict=True):
            yield text, is_held_out, tokens


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """The dtype of token ids in a shard."""
    if tokenizer.vocab_size <= 2**16:
        return np.dtype("uint16")
    return np.dtype("uint32")
