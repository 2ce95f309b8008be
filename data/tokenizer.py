"""Text to token ids and back.

Our own are byte pairs of SentencePiece, lossless for UTF-8 text: Kudo and Richardson, 1808.06226.
Those of others may be a tokenizer.json, as huggingface.co/docs/tokenizers has it.
"""

import io
import json
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import sentencepiece as spm
import tokenizers

MAX_PIECE_CHARS = 4000  # of one sentence for the trainer, whose time grows with its length
SPACE = "\u2581"  # SentencePiece's sign for a space: in a text, it would be decoded to a space
SPACE_BYTES = ["<0xE2>", "<0x96>", "<0x81>"]  # pieces of its UTF-8 bytes
# Where BOS and EOS of a tokenizer.json are found: an entry of a later file replaces an earlier one.
SPECIAL_TOKEN_FILES = ("tokenizer_config.json", "config.json", "generation_config.json")


class Tokenizer:
    """A SentencePiece model, from the bytes of its file.

    A document begins with `bos` and ends with `eos`; where `bos` is among `eos_ids`, which end a
    generation, it stands between documents. `files` are what load() reads, by their names.
    Raises ValueError for bytes that are no such model, or one without BOS and EOS.
    """

    # Whether a prompt begins with BOS, too.
    starts_with_bos = True

    def __init__(self, proto: bytes):
        try:
            self.processor = spm.SentencePieceProcessor(model_proto=proto)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"not a SentencePiece model ({error}). fix: data.tokenizer=PATH of another"
            ) from None
        self.proto = proto
        self.files = {"tokenizer.model": proto}
        self.vocab_size = self.processor.vocab_size()
        self.bos = self.processor.bos_id()
        self.eos = self.processor.eos_id()
        self.eos_ids = (self.eos,)
        if self.bos < 0 or self.eos < 0:
            raise ValueError(
                f"a tokenizer needs BOS and EOS (ids {self.bos}, {self.eos}). "
                "fix: data.tokenizer=null, which trains one"
            )
        # A SPACE in a text is encoded as its bytes, so that it comes back.
        self.space_tokens = self.processor.piece_to_id(SPACE_BYTES)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.model, which may be that of an IdTokenizer, or a tokenizer.json."""
        path = Path(path).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"no tokenizer ({path}: {error.strerror}). fix: data.tokenizer=null to train one"
            ) from None
        if path.suffix == ".json":
            # The configs beside it say what BOS and EOS are.
            files = {"tokenizer.json": content}
            for name in SPECIAL_TOKEN_FILES:
                file = path.with_name(name)
                if file.exists():
                    files[name] = file.read_bytes()
            return JsonTokenizer(files)
        if content.startswith(IdTokenizer.MAGIC):
            vocab_size, bos = map(int, content.removeprefix(IdTokenizer.MAGIC).split())
            return IdTokenizer(vocab_size, bos)
        return cls(content)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train on texts, to at most `vocab_size` tokens.

        Among them are the control tokens, all 256 bytes, newlines and runs of spaces. Raises
        ValueError for text that no such tokenizer can be trained on.
        """
        model = io.BytesIO()
        failure = None

        # SentencePiece turns an exception of its iterator, a signal's too, into a RuntimeError.
        def sentences() -> Iterator[str]:
            nonlocal failure
            try:
                for text in texts:
                    yield from split(text)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                failure = error
                raise

        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=sentences(),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                byte_fallback=True,
                character_coverage=0.9995,
                split_digits=True,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                unk_id=0,
                bos_id=1,
                eos_id=2,
                pad_id=-1,
                max_sentence_length=4 * MAX_PIECE_CHARS,  # bytes; UTF-8 has up to 4 a character
                num_threads=os.cpu_count(),
                minloglevel=2,
            )
        except RuntimeError as error:
            # An error of the texts is raised as it was, not as one of SentencePiece.
            if failure is not None:
                raise failure from None
            reason = str(error).rpartition("] ")[2].partition("\n")[0]
            raise ValueError(
                f"no tokenizer from this text ({vocab_size=}: {reason}). "
                "fix: more text, or another data.vocab_size"
            ) from None
        return cls(model.getvalue())

    def encode(self, text: str) -> list[int]:
        """Encode without BOS and EOS; a text that looks like one of them is ordinary text."""
        # Encode what is between the SPACEs, and put the bytes of one between the parts.
        parts = self.processor.encode(text.split(SPACE))
        tokens = parts[0]
        for part in parts[1:]:
            tokens += self.space_tokens + part
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text that is continued: one token at least."""
        tokens = self.encode(text)
        if self.starts_with_bos or not tokens:
            tokens = [self.bos, *tokens]
        return tokens

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Encode each text as BOS + text + EOS, on all cores."""
        encoded = self.processor.encode(texts, num_threads=os.cpu_count())
        documents = []
        for text, tokens in zip(texts, encoded, strict=True):
            if SPACE in text:
                tokens = self.encode(text)
            documents.append([self.bos, *tokens, self.eos])
        return documents

    def decode(self, tokens: list[int]) -> str:
        """Decode; bytes that are not UTF-8 become U+FFFD, BOS and EOS nothing."""
        return self.processor.decode(tokens)

    def nbytes(self, tokens: np.ndarray) -> int | None:
        """Count the UTF-8 bytes of the documents in `tokens`; None if there is no text of them."""
        # Cut at BOS and EOS, so that each text is decoded by itself, as it was encoded.
        starts = np.flatnonzero(np.isin(tokens, (self.bos, *self.eos_ids)))
        documents = [document.tolist() for document in np.split(tokens, starts)]
        return sum(len(self.decode(document).encode()) for document in documents)

    @property
    def sha256(self) -> str:
        """Identifies the tokenizer and its special tokens."""
        return sha256(b"".join(self.files.values())).hexdigest()

    def identity(self) -> tuple:
        """What must be equal for two tokenizers to be the same: the first file, BOS and EOS."""
        return next(iter(self.files.values())), self.bos, self.eos_ids

    def id_to_piece(self, tokens: list[int]) -> list[str]:
        """Name each token, for people."""
        return self.processor.id_to_piece(tokens)


class IdTokenizer(Tokenizer):
    """Stands in for an unknown tokenizer: the text of tokens is their ids, as in 464 3290.

    Its file is one line: MAGIC, the size of the vocabulary, BOS, which is EOS too. Raises
    ValueError for a BOS outside the vocabulary.
    """

    MAGIC = b"ids "  # no SentencePiece model begins with it

    def __init__(self, vocab_size: int, bos: int):
        if bos >= vocab_size:
            raise ValueError(
                f"BOS is outside the vocabulary (data.bos={bos}, {vocab_size}). "
                f"fix: data.bos={vocab_size - 1}"
            )
        self.files = {"tokenizer.model": self.MAGIC + f"{vocab_size} {bos}\n".encode()}
        self.vocab_size = vocab_size
        self.bos = bos
        self.eos = bos
        self.eos_ids = (bos,)

    def encode(self, text: str) -> list[int]:
        """Read the ids. Raises ValueError for other text and for ids outside the vocabulary."""
        tokens = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise ValueError(
                    f"not a token id below {self.vocab_size} ({word}). fix: numbers, as in 464 3290"
                )
            tokens.append(int(word))
        return tokens

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        return [[self.bos, *self.encode(text)] for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(str(token) for token in tokens if token != self.bos)

    def id_to_piece(self, tokens: list[int]) -> list[str]:
        return [str(token) for token in tokens]

    def nbytes(self, tokens: np.ndarray) -> None:
        return None


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, and what other files of its folder say of BOS and EOS.

    Raises ValueError where it is none, has no EOS, or puts more than BOS in front of a text.
    """

    def __init__(self, files: dict[str, bytes]):
        # The library raises Exception itself.
        try:
            self.processor = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:
            raise ValueError(
                f"not a tokenizer.json ({error}). fix: data.tokenizer=PATH of another"
            ) from None
        self.processor.no_padding()
        self.processor.no_truncation()
        self.vocab_size = 1 + max(self.processor.get_vocab(with_added_tokens=True).values())

        # Its post-processor says what it adds to a prompt: BOS in front, or nothing.
        prefix = self.processor.encode("").ids
        self.starts_with_bos = len(prefix) == 1
        is_in_front = self.processor.encode("a").ids[: len(prefix)] == prefix
        settings = read_special_tokens(files)
        self.eos_ids = self.find_ids(settings, "eos")
        if not self.eos_ids or len(prefix) > 1 or not is_in_front:
            raise ValueError(
                f"a tokenizer needs EOS, and may add only BOS, in front (EOS {self.eos_ids}, "
                f"adds {prefix}). fix: eos_token in tokenizer_config.json"
            )
        self.eos = self.eos_ids[0]
        # Without a BOS, an EOS stands between documents: the one that a model calls BOS, if any.
        separators = [token for token in self.find_ids(settings, "bos") if token in self.eos_ids]
        self.bos = [*prefix, *separators, self.eos][0]
        special = {"bos_token_id": self.bos, "eos_token_id": list(self.eos_ids)}
        if not all(token in range(self.vocab_size) for token in (self.bos, *self.eos_ids)):
            raise ValueError(
                f"a special token outside the vocabulary of {self.vocab_size} ({special}). "
                "fix: the configs that belong to this tokenizer.json"
            )
        # A model's config.json is not the tokenizer's.
        self.files = files | {"generation_config.json": json.dumps(special).encode()}
        self.files.pop("config.json", None)

    def find_ids(self, settings: dict, kind: str) -> tuple[int, ...]:
        """The ids of BOS or EOS: `eos_token_id`, which may be a list, or those of `eos_token`."""
        ids = settings.get(f"{kind}_token_id", [])
        if ids == []:
            token = settings.get(f"{kind}_token")
            # A token may be a dict of its content and options.
            content = token.get("content") if isinstance(token, dict) else token
            ids = self.processor.token_to_id(content) if content else None
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (ids,)

    def encode(self, text: str) -> list[int]:
        """Encode without BOS and EOS; a text that looks like a special token is that token."""
        self.processor.encode_special_tokens = False
        return self.processor.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Encode each text between BOS and EOS; what looks like a special token is text."""
        self.processor.encode_special_tokens = True
        encodings = self.processor.encode_batch(texts, add_special_tokens=False)
        end = [] if self.bos in self.eos_ids else [self.eos]
        return [[self.bos, *encoding.ids, *end] for encoding in encodings]

    def decode(self, tokens: list[int]) -> str:
        return self.processor.decode(tokens)

    def id_to_piece(self, tokens: list[int]) -> list[str]:
        return [self.processor.id_to_token(token) or str(token) for token in tokens]


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer of a folder: tokenizer.model, or where there is none, tokenizer.json."""
    file = folder / "tokenizer.model"
    return file if file.exists() else folder / "tokenizer.json"


def read_special_tokens(files: dict[str, bytes]) -> dict:
    """What the configs say; a later file replaces an entry of an earlier one."""
    settings = {}
    for name in SPECIAL_TOKEN_FILES:
        try:
            content = json.loads(files.get(name, b"{}"))
            settings |= {key: value for key, value in content.items() if value is not None}
        except (ValueError, AttributeError) as error:
            raise ValueError(f"not a config ({name}: {error}). fix: fetch it again") from None
    return settings


def split(text: str) -> Iterator[str]:
    """Cut a text into pieces of up to MAX_PIECE_CHARS, at line ends if there are any."""
    start = 0
    while start < len(text):
        end = start + MAX_PIECE_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
