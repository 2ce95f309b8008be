"""Convert documents to token shards once; later runs find the shards in a cache.

The cache is keyed by a hash of the identity of the source and the tokenizer.

A corpus is built under a lock and its folder appears atomically: if the folder exists, it is
complete.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from filelock import FileLock

from data.corpus import Corpus
from data.files import PART_CHARS, Part
from data.tokenizer import Tokenizer, tokenizer_file
from run.checkpoint import acquire, atomic_directory, remove_leftovers, verify
from run.progress import say
from run.ranges import PositiveInt

# Part of the cache key: increase it if a change in data/ changes the tokens of a text.
VERSION = 3
TRAIN_SHARD = "train-00000.bin"
VALIDATION_SHARD = "validation-00000.bin"
DOCUMENTS_PER_BATCH = 256  # tokenized together, on all cores
CHARS_PER_BATCH = 4 * PART_CHARS  # a batch also ends at this number of characters
MAX_TOKENIZER_CHARS = 50_000_000  # maximum amount of training text for training a tokenizer
# Maximum number of held-out UTF-8 bytes. Only the first document is cut to fit this limit.
MAX_VALIDATION_BYTES = 2_000_000


@dataclass(kw_only=True)
class Source:
    """Documents and their tokenizer.

    The tokenizer is read from the file `tokenizer`; without one, a tokenizer of `vocab_size` pieces
    is trained on the training documents.
    """

    tokens = None  # number of training tokens to stop after; None to use all
    is_endless = False  # True if no row repeats
    vocab_size: PositiveInt
    tokenizer: str | None

    def corpus(self) -> Corpus | None:
        """Return the corpus if the source has one ready; None if prepare() must build it."""
        return None

    def identity(self) -> str:
        """Return a string that identifies the documents and the settings that select them."""
        # The tokenizer's path does not change the documents.
        return json.dumps(vars(self) | {"tokenizer": None})

    def note(self) -> str | None:
        """Return a line about the files read and skipped; None if there is nothing to report."""
        return None

    def parts(self) -> Iterator[Part]:
        """Yield the documents, long ones in parts, in a fixed order."""
        return iter(())


def text_hash(text: str) -> str:
    """Return a SHA-256 in hexadecimal. Unlike Python's hash(), it is the same in every process."""
    return sha256(text.encode()).hexdigest()


def prepare(source: Source, cache_dir: Path) -> Corpus:
    """Open a source's corpus; build it in `cache_dir` first if it is missing.

    If `cache_dir` is not writable, the corpus is built in a different cache. If several processes
    call this at once, one builds the corpus and the others wait. Raises ValueError for unusable
    text, and IntegrityError for a corpus that was changed on disk.
    """
    corpus = source.corpus()
    note = source.note()
    if note is not None:
        say(note)
    if corpus is not None:
        return corpus

    # The cache key is the content plus the tokenizer, or the vocabulary size of a new tokenizer.
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
    """Name a text's cache folder by a tokenizer's SHA-256 or a new tokenizer's vocabulary size."""
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
    """Build a corpus. Other processes that need it wait, if the file system supports locks."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    say("preparing the text (only once)")
    # The operating system releases the lock if the process is killed. It would not release a soft
    # lock, which is only a file that exists.
    lock = FileLock(folder.with_name(".lock"), fallback_to_soft=False)
    try:
        has_lock = acquire(lock)
        if has_lock:
            # Unfinished folders are from killed processes: a running process would hold the lock.
            remove_leftovers(folder.parent)
            # Another process may have built it while this one was waiting.
            if not folder.exists():
                build_corpus(source, tokenizer, folder)
        else:
            build_unlocked(source, tokenizer, folder)
    finally:
        lock.release()


def build_unlocked(source: Source, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Build a corpus in a private folder; move it into place unless `folder` exists by then."""
    with TemporaryDirectory(prefix=".unlocked-", dir=folder.parent) as own:
        built = Path(own) / folder.name
        build_corpus(source, tokenizer, built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def build_corpus(source: Source, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the shards and the tokenizer to `folder`; train a tokenizer if `tokenizer` is None."""
    with atomic_directory(folder) as staging:
        if tokenizer is None:
            tokenizer = Tokenizer.train(tokenizer_corpus(source), source.vocab_size)
        for name, content in tokenizer.files.items():
            (staging / name).write_bytes(content)
        write_shards(source, tokenizer, staging)


def tokenizer_corpus(source: Source) -> Iterator[str]:
    """Yield training documents until they add up to MAX_TOKENIZER_CHARS characters.

    The last document is cut at that limit, between two parts.
    """
    size = 0
    texts = []  # parts of the current document
    for part in source.parts():
        if size >= MAX_TOKENIZER_CHARS:
            break
        if not part.is_held_out:
            size += len(part.text)
            texts.append(part.text)
        if texts and part.is_last:
            text = "".join(texts)
            texts = []
            yield text
    if texts:
        yield "".join(texts)


def write_shards(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize the documents into one file per split.

    Raises ValueError if a split has no document, and OverflowError if a token id outside the
    vocabulary does not fit the dtype.
    """
    dtype = dtype_of(tokenizer)
    train_tokens = 0
    held_out_bytes = 0
    changes = []  # differences in held-out documents that the tokenizer does not reproduce
    held_out_documents = 0
    end = 0  # file offset of the end of the last held-out document that is kept
    is_first = True  # whether the part begins a document
    with (
        (folder / TRAIN_SHARD).open("wb") as train,
        (folder / VALIDATION_SHARD).open("wb") as validation,
    ):
        for part, tokens in tokenized(source, tokenizer):
            raw = np.array(tokens, dtype).tobytes()
            if part.is_held_out:
                # The first part that does not fit ends the split. Its document is left out unless
                # it is the first document.
                held_out_bytes += len(part.text.encode())
                if held_out_bytes <= MAX_VALIDATION_BYTES:
                    validation.write(raw)
                    if part.is_last or held_out_documents == 0:
                        end = validation.tell()
                    # A part inside a document may decode without its first space.
                    if is_first and part.is_last:
                        change = tokenizer.change(part.text, tokens)
                        if change is not None:
                            changes.append(change)
                held_out_documents += part.is_last
            else:
                train.write(raw)
                train_tokens += len(tokens)
                has_enough = source.tokens is not None and train_tokens >= source.tokens
                if has_enough and part.is_last:
                    break
            is_first = part.is_last
        validation.truncate(end)
    if train_tokens == 0 or held_out_bytes == 0:
        raise ValueError(
            f"no training text or no held-out text ({train_tokens} tokens, {held_out_bytes} "
            "bytes). fix: add documents, or lower data.holdout"
        )
    if changes:
        say(
            f"warning: the tokenizer does not reproduce {len(changes)} of the held-out documents "
            f"({changes[0]}); val_bpb counts the bytes of the decoded text. fix: choose a "
            "different data.tokenizer"
        )


def tokenized(source: Source, tokenizer: Tokenizer) -> Iterator[tuple[Part, list[int]]]:
    """Yield each document part with the tokens that it has when the whole document is encoded."""
    # Each batch is tokenized on all cores; the whole text is never in memory.
    for batch in batches(cut_at_tokens(source.parts(), tokenizer)):
        encoded = tokenizer.encode_documents([before + part.text for part, before in batch])
        for (part, before), tokens in zip(batch, encoded, strict=True):
            if before:
                tokens = without_start(tokens, part.text, before, tokenizer)
            if not part.is_last:
                tokens = tokens[: len(tokens) - len(tokenizer.document_ends)]
            yield part, tokens


def cut_at_tokens(parts: Iterable[Part], tokenizer: Tokenizer) -> Iterator[tuple[Part, str]]:
    """Split documents of more than PART_CHARS characters at token boundaries.

    Yields each part with the character before it, which is empty for a document's first part.
    """
    rest = ""  # text of the document not yet yielded
    before = ""
    for part in parts:
        text = rest + part.text
        while len(text) > PART_CHARS:
            # Without a token boundary, cut at PART_CHARS, which may change a token.
            cut = tokenizer.last_cut(text[:PART_CHARS]) or PART_CHARS
            yield part._replace(text=text[:cut], is_last=False), before
            before = text[cut - 1]
            text = text[cut:]
        if part.is_last:
            yield part._replace(text=text), before
            text = ""
            before = ""
        rest = text


def batches(parts: Iterable[tuple[Part, str]]) -> Iterator[list[tuple[Part, str]]]:
    """Group parts into lists that are tokenized together."""
    batch = []
    num_chars = 0
    for part, before in parts:
        batch.append((part, before))
        num_chars += len(part.text)
        if len(batch) == DOCUMENTS_PER_BATCH or num_chars >= CHARS_PER_BATCH:
            yield batch
            batch = []
            num_chars = 0
    if batch:
        yield batch


def without_start(tokens: list[int], text: str, before: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of `text`, without BOS, given the `tokens` of before + text.

    A tokenizer may treat the start of a text differently, for example by adding a space, so the
    tokens of `text` alone may differ.
    """
    (start,) = tokenizer.encode_documents([before])
    start = start[: len(start) - len(tokenizer.document_ends)]
    if tokens[: len(start)] == start:
        return tokens[len(start) :]
    # The text was cut inside a token.
    (tokens,) = tokenizer.encode_documents([text])
    return tokens[1:]


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of the token ids in a shard."""
    if tokenizer.vocab_size <= 2**16:
        return np.dtype("uint16")
    return np.dtype("uint32")
