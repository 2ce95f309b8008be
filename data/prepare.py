"""Convert documents to token shards once; later runs find the shards in a cache.

The cache is keyed by a hash of the identity of the source and the tokenizer.

A corpus is built under a lock and its folder appears atomically: if the folder exists, it is
complete.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from filelock import FileLock

from data.corpus import Corpus
from data.files import PART_CHARS, DocumentPart
from data.tokenizer import Tokenizer, tokenizer_file
from run.checkpoint import acquire, atomic_directory, remove_leftovers, verify
from run.progress import print0
from run.ranges import PositiveInt

# Part of the cache key: increase it if a change in data/ changes the tokens of a text.
VERSION = 6
TRAIN_SHARD = "train-00000.bin"
VALIDATION_SHARD = "validation-00000.bin"
DOCUMENTS_PER_BATCH = 256  # tokenized together, on all cores
CHARS_PER_BATCH = 4 * PART_CHARS  # a batch also ends at this number of characters
MAX_TOKENIZER_CHARS = 50_000_000  # of text to train a tokenizer on
# Maximum held-out UTF-8 bytes. A part of PART_CHARS has no more: a character has up to 4 bytes.
MAX_VALIDATION_BYTES = 2_000_000


@dataclass(kw_only=True)
class Source:
    """Documents and their tokenizer.

    The tokenizer is read from the file `tokenizer`; without one, a tokenizer with at most
    `vocab_size` tokens is trained on the training documents.
    """

    tokens = None  # number of training tokens to stop after; None to use all
    is_endless = False  # True if no row repeats
    vocab_size: PositiveInt
    tokenizer: str | None

    def corpus(self) -> Corpus | None:
        """Return the corpus if the source has one ready; None if prepare() opens or builds it."""
        return None

    def identity(self) -> str:
        """Return a string that identifies the documents and the settings that select them."""
        # The tokenizer's path does not change the documents.
        return json.dumps(vars(self) | {"tokenizer": None})

    def parts(self) -> Iterator[DocumentPart]:
        """Yield documents, or consecutive parts of them, in a fixed order."""
        return iter(())


def text_hash(text: str) -> str:
    """Return a SHA-256 in hexadecimal. Unlike Python's hash(), it is the same in every process."""
    return sha256(text.encode()).hexdigest()


def prepare(source: Source, cache_dir: Path) -> Corpus:
    """Open a source's corpus; build it in `cache_dir` first if it is missing.

    Raises ValueError for unusable text, and IntegrityError for a corpus that was changed on disk.
    """
    corpus = source.corpus()
    if corpus is not None:
        return corpus

    # The key is the source's identity plus the tokenizer, or a new tokenizer's vocabulary size.
    identity = source.identity()
    folder = cache_dir / folder_name(source, identity, source.vocab_size)
    tokenizer = None
    if source.tokenizer:
        tokenizer = Tokenizer.load(source.tokenizer)
        # If a run's tokenizer was trained on this text, reuse the corpus that was built at that
        # time.
        if not has_tokenizer(folder, tokenizer):
            folder = cache_dir / folder_name(source, identity, tokenizer.sha256)
    if not folder.exists():
        build_once(source, tokenizer, folder)

    # Verify the files, and map the shards.
    files = verify(folder, f"delete {folder}, which will be rebuilt")
    tokenizer = Tokenizer.load(tokenizer_file(folder))
    dtype = dtype_of(tokenizer)
    train = np.memmap(folder / TRAIN_SHARD, dtype, "r")
    validation = np.memmap(folder / VALIDATION_SHARD, dtype, "r")
    tokens_hash = text_hash(files[TRAIN_SHARD] + files[VALIDATION_SHARD])
    return Corpus(train=[train], validation=validation, tokenizer=tokenizer, sha256=tokens_hash)


def folder_name(source: Source, identity: str, vocabulary: int | str) -> str:
    """Return the name of a text's cache folder.

    `vocabulary` is a tokenizer's SHA-256, or the vocabulary size of a new tokenizer.
    """
    key = text_hash(json.dumps([VERSION, identity, vocabulary]))
    return f"{type(source).__name__.lower()}-{key[:16]}"


def has_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether the corpus in `folder` has the files of this tokenizer."""
    for name, content in tokenizer.files.items():
        file = folder / name
        if not file.exists() or file.read_bytes() != content:
            return False
    return True


def build_once(source: Source, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Build a corpus. Other processes that build one wait, if the file system supports locks."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    print0("preparing the text (only once)")
    # The operating system releases the lock if the process is killed. It would not release a soft
    # lock, which is only a file that exists.
    lock = FileLock(folder.with_name(".lock"), fallback_to_soft=False)
    try:
        if acquire(lock):
            # Unfinished folders are from killed processes: a running process would hold the lock.
            remove_leftovers(folder.parent)
        # Another process may have built it while this one was waiting.
        if not folder.exists():
            build_corpus(source, tokenizer, folder)
    finally:
        lock.release()


def build_corpus(source: Source, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the shards and the tokenizer to `folder`; train a tokenizer if `tokenizer` is None."""
    with atomic_directory(folder) as staging:
        if tokenizer is None:
            tokenizer = Tokenizer.train(tokenizer_texts(source), source.vocab_size)
        for name, content in tokenizer.files.items():
            (staging / name).write_bytes(content)
        write_shards(source, tokenizer, staging)


def tokenizer_texts(source: Source) -> Iterator[str]:
    """Yield parts of training documents until they have MAX_TOKENIZER_CHARS characters."""
    num_chars = 0
    for part in source.parts():
        if num_chars >= MAX_TOKENIZER_CHARS:
            return
        if not part.is_held_out:
            num_chars += len(part.text)
            yield part.text
    if num_chars == 0:
        raise ValueError(
            "no document is left to train on (each is blank, held out, or excluded, for example as "
            "a copy). fix: add other documents"
        )


def write_shards(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize the documents into one file per split.

    Raises ValueError if a split is empty, and OverflowError if a token id outside the
    vocabulary does not fit the dtype.
    """
    dtype = dtype_of(tokenizer)
    train_tokens = 0
    num_documents = Counter()  # by whether they are held out
    held_out_bytes = 0
    change = None  # an example of a text that the tokenizer does not reproduce
    with (
        (folder / TRAIN_SHARD).open("wb") as train,
        (folder / VALIDATION_SHARD).open("wb") as validation,
    ):
        for part, tokens in tokenized(source, tokenizer):
            raw = np.array(tokens, dtype).tobytes()
            num_documents[part.is_held_out] += part.is_first
            if not part.is_first:
                change = change or change_at_cut(tokenizer)
            if part.is_held_out:
                # The first part that does not fit ends the split.
                held_out_bytes += len(part.text.encode())
                if held_out_bytes <= MAX_VALIDATION_BYTES:
                    validation.write(raw)
                    change = change or tokenizer.change(part.text, tokens)
            else:
                train.write(raw)
                train_tokens += len(tokens)
                has_enough = source.tokens is not None and train_tokens >= source.tokens
                if has_enough and part.is_last:
                    break
    if train_tokens == 0 or held_out_bytes == 0:
        raise ValueError(
            f"no training text or no held-out text ({train_tokens} training tokens, "
            f"{held_out_bytes} held-out bytes). fix: use more documents"
        )
    unused = ""
    if held_out_bytes > MAX_VALIDATION_BYTES:
        unused = f", of which at most {MAX_VALIDATION_BYTES:,} bytes are used"
    print0(
        f"{num_documents[False]:,} documents to train on, {num_documents[True]:,} held out{unused}"
    )
    if change is not None:
        print0(
            f"warning: the tokenizer does not reproduce the text ({change}); val_bpb counts the "
            "bytes of the decoded text"
        )


def tokenized(source: Source, tokenizer: Tokenizer) -> Iterator[tuple[DocumentPart, list[int]]]:
    """Yield each part with its tokens, with BOS and EOS only where a document begins and ends."""
    # Each batch is tokenized on all cores; the whole text need not fit into memory.
    for batch in batches(source.parts()):
        encoded = tokenizer.encode_documents([part.text for part in batch])
        for part, tokens in zip(batch, encoded, strict=True):
            if not part.is_first:
                tokens = tokens[1:]
            if not part.is_last:
                tokens = tokens[: len(tokens) - len(tokenizer.document_ends)]
            yield part, tokens


def change_at_cut(tokenizer: Tokenizer) -> str | None:
    """Describe what a cut between two parts adds to a text, such as a space; None if nothing."""
    first, second = tokenizer.encode_documents(["1\n", "2"])
    return tokenizer.change("1\n2", first[: len(first) - len(tokenizer.document_ends)] + second[1:])


def batches(parts: Iterable[DocumentPart]) -> Iterator[list[DocumentPart]]:
    """Group parts into lists that are tokenized together."""
    batch = []
    num_chars = 0
    for part in parts:
        batch.append(part)
        num_chars += len(part.text)
        if len(batch) == DOCUMENTS_PER_BATCH or num_chars >= CHARS_PER_BATCH:
            yield batch
            batch = []
            num_chars = 0
    if batch:
        yield batch


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of the token ids in a shard."""
    if tokenizer.vocab_size <= 2**16:
        return np.dtype("uint16")
    return np.dtype("uint32")
