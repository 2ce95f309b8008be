"""Convert text to token ids and back.

Our own tokenizers are SentencePiece byte-pair encodings, lossless for UTF-8 text: Kudo and
Richardson, 1808.06226. Imported models have a tokenizer.json: huggingface.co/docs/tokenizers.
"""

import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import sentencepiece as spm
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from run.threads import cores

# Texts are cut into pieces of up to 4000 characters, because SentencePiece is slower on longer
# texts. The trainer gets pieces that end at line ends, unless a line is longer.
MAX_PIECE_CHARS = 4000
TRAINING_PIECES = re.compile(r".{1,4000}\Z|.{0,3999}\n|.{1,4000}", re.DOTALL)
# A text to encode is cut in front of the last space between words, where our own models merge no
# characters, so the ids do not change. Without such a space, it is cut at a line end, or anywhere.
PIECES = re.compile(r".{1,4000}\Z|.{0,3999}\S(?= )|.{0,3999}\n|.{1,4000}", re.DOTALL)
UNKNOWN = "\u2585"  # SentencePiece's trainer silently ignores texts with this character
SPACE = "\u2581"  # SentencePiece's symbol for a space, which decodes to a space
SPACE_BYTES = ["<0xE2>", "<0x96>", "<0x81>"]  # the pieces for the UTF-8 bytes of SPACE
# Files next to the tokenizer's own file. generation_config.json may contain the BOS and EOS ids;
# tokenizer_config.json may contain split_special_tokens. The rest is kept for export.
CONFIGS = ("tokenizer_config.json", "generation_config.json")


class Tokenizer(ABC):
    """Base class of tokenizers: the rules by which all of them build documents and prompts.

    A document begins with `bos` and ends with `eos`. If `bos` is among the `eos_ids`, which end a
    generation, it is written only once between two documents. `files` holds the contents of the
    files that load() reads, by file name.
    """

    FILE: str  # the name of the tokenizer's own file
    files: dict[str, bytes]
    vocab_size: int
    # After these tokens, the text decoded so far may still change, because a run of byte tokens
    # is decoded as a whole.
    unstable_tokens = frozenset()

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Read a tokenizer.model, from SentencePiece or IdTokenizer, or a tokenizer.json.

        Raises OSError if the file cannot be read, and ValueError if it is not a usable tokenizer.
        """
        path = Path(os.path.expanduser(path))
        content = path.read_bytes()
        configs = {}
        for name in CONFIGS:
            file = path.with_name(name)
            if file.exists():
                configs[name] = file.read_bytes()
        try:
            if content.startswith(IdTokenizer.MAGIC):
                vocab_size, bos = content.removeprefix(IdTokenizer.MAGIC).split()
                tokenizer = IdTokenizer(int(vocab_size), int(bos))
            elif path.suffix == ".json":
                tokenizer = JsonTokenizer({JsonTokenizer.FILE: content, **configs})
            else:
                tokenizer = SentencePieceTokenizer(
                    {SentencePieceTokenizer.FILE: content, **configs}
                )
            for token in (tokenizer.bos, *tokenizer.eos_ids):
                if not 0 <= token < tokenizer.vocab_size:
                    raise ValueError(f"BOS or EOS is {token}, which is not in the vocabulary")
            return tokenizer
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ValueError(
                f"cannot read this tokenizer, or it has no EOS token ({path}: {error}). fix: "
                "set data.tokenizer to a different file, or first import the transformers model "
                "with tools.import_hf"
            ) from None

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a tokenizer on texts, with at most `vocab_size` tokens.

        These include the control tokens, all 256 bytes and every frequent character. Raises
        ValueError if the text is too short, or `vocab_size` too small for these tokens.
        """
        # Read all texts first: SentencePiece turns an exception in its iterator into a
        # RuntimeError, even one raised by a signal handler.
        pieces = []
        for text in texts:
            for part in text.split(UNKNOWN):
                pieces += TRAINING_PIECES.findall(part)
        model = io.BytesIO()
        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=iter(pieces),
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
                max_sentence_length=4 * MAX_PIECE_CHARS,  # bytes; UTF-8 takes up to 4 per character
                num_threads=len(cores()),
                minloglevel=2,
            )
        except RuntimeError as error:
            fix = "use more text"
            # SentencePiece requires a token for each byte and each frequent character.
            smallest = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
            if smallest:
                fix = f"data.vocab_size={smallest[1]} or more"
            raise ValueError(
                f"cannot train a tokenizer on this text (data.vocab_size={vocab_size}). fix: {fix}"
            ) from None
        return SentencePieceTokenizer({SentencePieceTokenizer.FILE: model.getvalue()})

    def set_special_ids(self, special: dict) -> None:
        """Set the BOS id and one or more EOS ids from the contents of a generation_config.json."""
        eos_ids = special["eos_token_id"]
        if not isinstance(eos_ids, list):
            eos_ids = [eos_ids]
        # Some files have null or -1 for a token that does not exist. EOS replaces a missing BOS.
        self.eos_ids = tuple(token for token in eos_ids if token >= 0) or tuple(eos_ids)
        self.eos = self.eos_ids[0]
        bos = special.get("bos_token_id")
        self.bos = self.eos if bos is None or bos < 0 else bos
        # Tokens that end a document. If BOS is also an EOS, the BOS of the next document ends it.
        self.document_ends = [] if self.bos in self.eos_ids else [self.eos]
        self.starts_with_bos = special.get("add_bos_token", True)  # whether prompts start with BOS

    def encode(self, text: str) -> list[int]:
        """Encode without BOS and EOS; text that looks like a special token stays ordinary text."""
        (tokens,) = self.encode_batch([text])
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt as one or more tokens.

        Text that looks like a special token becomes that token, as in transformers, unless
        tokenizer_config.json sets split_special_tokens.
        """
        tokens = self.encode_with_special_tokens(text)
        # BOS is prepended if the model expects it or the prompt is empty.
        if self.starts_with_bos or not tokens:
            tokens = [self.bos, *tokens]
        return tokens

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Encode texts as documents. Text that looks like a special token stays ordinary text."""
        documents = self.encode_batch(texts)
        assert len(documents) == len(texts)
        return [[self.bos, *tokens, *self.document_ends] for tokens in documents]

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text as encode() does, using all cores."""

    @abstractmethod
    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Encode without adding BOS or EOS; encode special tokens in the text as in a prompt."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """Decode tokens. Bytes that are not UTF-8 become U+FFFD; BOS and EOS are omitted."""

    @abstractmethod
    def piece(self, token: int) -> str:
        """Return a token's entry in the vocabulary, such as <s>, <0x41> or \u2581and."""

    def change(self, text: str, tokens: list[int]) -> str | None:
        """Describe how the text decoded from `tokens` differs from `text`; None if it does not."""
        decoded = self.decode(tokens)
        if decoded == text:
            return None
        start = 0
        for expected, character in zip(text, decoded, strict=False):
            if character != expected:
                break
            start += 1
        near = slice(max(0, start - 5), start + 15)
        return f"{text[near]!a} decodes to {decoded[near]!a}"

    def nbytes(self, tokens: np.ndarray) -> int | None:
        """Return the UTF-8 bytes of the documents in `tokens`; None if their text is unknown."""
        assert tokens.ndim == 1
        # Cut at BOS and EOS, so that each text is decoded separately, as it was encoded.
        starts = np.flatnonzero(np.isin(tokens, (self.bos, *self.eos_ids)))
        num_bytes = 0
        for document in np.split(tokens, starts):
            text = self.decode(document.tolist())
            num_bytes += len(text.encode())
        return num_bytes

    @property
    def sha256(self) -> str:
        """SHA-256 that identifies the tokenizer, including its BOS and EOS."""
        special_ids = f"{self.bos} {self.eos_ids}"
        return sha256(self.files[self.FILE] + special_ids.encode()).hexdigest()


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. A generation_config.json next to it, if present, sets BOS and EOS."""

    FILE = "tokenizer.model"

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.processor = spm.SentencePieceProcessor(model_proto=files[self.FILE])
        self.vocab_size = self.processor.vocab_size()
        special = {"bos_token_id": self.processor.bos_id(), "eos_token_id": self.processor.eos_id()}
        special |= json.loads(files.get("generation_config.json", "{}"))
        self.set_special_ids(special)
        # A SPACE in a text is encoded as its bytes, so that it decodes to itself.
        space_tokens = self.processor.piece_to_id(SPACE_BYTES)
        assert len(space_tokens) == len(SPACE_BYTES)
        self.text_separators = {SPACE: space_tokens}
        # In a prompt, the text of a special token becomes this token, unless it is to be split.
        self.prompt_separators = dict(self.text_separators)
        for token in range(self.vocab_size if not splits_special_tokens(files) else 0):
            if self.processor.is_control(token) or self.processor.is_unknown(token):
                self.prompt_separators[self.piece(token)] = [token]

    @cached_property
    def model(self) -> ModelProto:
        return ModelProto.FromString(self.files[self.FILE])

    @cached_property
    def processor_inside(self) -> spm.SentencePieceProcessor:
        """A processor for later parts of a text, without the space that some models prepend."""
        model = ModelProto()
        model.CopyFrom(self.model)
        model.normalizer_spec.add_dummy_prefix = False
        return spm.SentencePieceProcessor(model_proto=model.SerializeToString())

    def encode_with_special_tokens(self, text: str) -> list[int]:
        return self.encode_parts(text, self.prompt_separators)

    def encode_parts(self, text: str, separators: dict[str, list[int]]) -> list[int]:
        """Encode a text's parts between separators, joined by the separators' tokens."""
        pattern = "|".join(map(re.escape, separators))
        first, *others = re.split(f"({pattern})", text)
        tokens = self.processor.encode(first)
        for separator, part in zip(others[::2], others[1::2], strict=True):
            tokens += separators[separator] + self.processor_inside.encode(part)
        return tokens

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        # The first piece of each text is encoded as its start, the others as text in the middle.
        starts = []
        pieces = []
        num_pieces = []
        for text in texts:
            start, *others = self.cut(text)
            starts.append(start)
            pieces += others
            num_pieces.append(len(others))
        num_threads = len(cores())
        documents = self.processor.encode(starts, num_threads=num_threads)
        encoded = iter(())
        if pieces:
            encoded = iter(self.processor_inside.encode(pieces, num_threads=num_threads))
        for index, text in enumerate(texts):
            for tokens in islice(encoded, num_pieces[index]):
                documents[index] += tokens
            if SPACE in text:
                documents[index] = self.encode_parts(text, self.text_separators)
        return documents

    def cut(self, text: str) -> list[str]:
        """Cut a long text into pieces that can be encoded one by one."""
        # A model that trims its input would lose the spaces between pieces.
        if len(text) <= MAX_PIECE_CHARS or self.model.normalizer_spec.remove_extra_whitespaces:
            return [text]
        return PIECES.findall(text)

    def decode(self, tokens: list[int]) -> str:
        return self.processor.decode(tokens)

    def piece(self, token: int) -> str:
        return self.processor.id_to_piece(token)


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, with the BOS and EOS ids of the generation_config.json next to it.

    tools.import_hf writes both files.
    """

    FILE = "tokenizer.json"

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.processor = tokenizers.Tokenizer.from_str(files[self.FILE].decode())
        self.processor.no_padding()
        self.processor.no_truncation()
        vocabulary = self.processor.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        # Byte tokens, and added tokens, which may decode to an empty string.
        byte_tokens = {vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)}
        self.unstable_tokens = byte_tokens.union(self.processor.get_added_tokens_decoder())
        self.set_special_ids(json.loads(files["generation_config.json"]))
        # If BOS and EOS are added tokens, mark them as special: text in a document must not become
        # BOS or EOS, and both must decode to an empty string.
        for token, added in self.processor.get_added_tokens_decoder().items():
            if token in (self.bos, *self.eos_ids) and not added.special:
                added.special = True
                self.processor.add_special_tokens([added])
        self.splits_special_tokens = splits_special_tokens(files)
        # The tokenizer's post-processor may prepend BOS to a text.
        self.starts_with_bos = self.processor.encode("").ids == [self.bos]

    def encode_with_special_tokens(self, text: str) -> list[int]:
        self.processor.encode_special_tokens = self.splits_special_tokens
        return self.processor.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.processor.encode_special_tokens = True
        encodings = self.processor.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: list[int]) -> str:
        return self.processor.decode(tokens)

    def piece(self, token: int) -> str:
        return self.processor.id_to_token(token) or str(token)


class IdTokenizer(Tokenizer):
    """A stand-in for an unknown tokenizer; the text of tokens is their ids, such as "464 3290".

    Its file is one line: MAGIC, the vocabulary size, and the id of BOS, which is also EOS.
    """

    FILE = "tokenizer.model"
    MAGIC = b"ids "  # no SentencePiece model begins with it

    def __init__(self, vocab_size: int, bos: int):
        self.files = {self.FILE: self.MAGIC + f"{vocab_size} {bos}\n".encode()}
        self.vocab_size = vocab_size
        self.set_special_ids({"eos_token_id": bos})

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Parse the ids. Raises ValueError for other text and for ids outside the vocabulary."""
        tokens = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise ValueError(
                    f"the run has no tokenizer, so text must be token ids below {self.vocab_size} "
                    f"({word}). fix: write ids such as 2; for words, choose a run with a tokenizer "
                    "(--run), train on data=text, or give data=tokens a data.tokenizer=FILE"
                )
            tokens.append(int(word))
        return tokens

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode_with_special_tokens(text) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(str(token) for token in tokens if token != self.bos)

    def piece(self, token: int) -> str:
        return str(token)

    def nbytes(self, tokens: np.ndarray) -> None:
        return None


def splits_special_tokens(files: dict[str, bytes]) -> bool:
    """Whether tokenizer_config.json declares special tokens in a prompt to be ordinary text."""
    config = json.loads(files.get("tokenizer_config.json", "{}"))
    return config.get("split_special_tokens", False)


def tokenizer_file(folder: Path) -> Path:
    """Return a folder's tokenizer.model, or its tokenizer.json if there is no tokenizer.model."""
    file = folder / SentencePieceTokenizer.FILE
    if file.exists():
        return file
    return folder / JsonTokenizer.FILE
