"""Text to token ids and back.

Our own are byte pairs of SentencePiece, lossless for UTF-8 text: Kudo and Richardson, 1808.06226.
Those of imported models may be a tokenizer.json, as huggingface.co/docs/tokenizers has it.
"""

import io
import json
import os
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np
import sentencepiece as spm
import tokenizers

# Pieces of up to 4000 characters, which end at a line end if there is one: the time that the
# trainer takes grows with their length.
MAX_PIECE_CHARS = 4000
PIECES = re.compile(r".{1,4000}\Z|.{0,3999}\n|.{1,4000}", re.DOTALL)
SPACE = "\u2581"  # SentencePiece's sign for a space: in a text, it would be decoded to a space
SPACE_BYTES = ["<0xE2>", "<0x96>", "<0x81>"]  # pieces of its UTF-8 bytes
# The files beside a tokenizer's own. The second one may have the ids of BOS and EOS.
CONFIGS = ("tokenizer_config.json", "generation_config.json")


class Tokenizer:
    """A SentencePiece model, with BOS and EOS of the generation_config.json beside it, if any.

    A document begins with `bos` and ends with `eos`; where `bos` is among `eos_ids`, which end a
    generation, it stands between documents. `files` are what load() reads, by their names.
    """

    # Where a run of bytes is decoded as a whole, the tokens after which it may go on.
    unstable_tokens = frozenset()

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.processor = spm.SentencePieceProcessor(model_proto=files["tokenizer.model"])
        self.vocab_size = self.processor.vocab_size()
        own = {"bos_token_id": self.processor.bos_id(), "eos_token_id": self.processor.eos_id()}
        self.set_special_ids(own | json.loads(files.get("generation_config.json", "{}")))
        # A SPACE in a text is encoded as its bytes, so that it comes back.
        self.space_tokens = self.processor.piece_to_id(SPACE_BYTES)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.model, which may be that of an IdTokenizer, or a tokenizer.json.

        Raises OSError where there is none, and ValueError for what is none.
        """
        path = Path(path).expanduser()
        content = path.read_bytes()
        files = {}
        for file in map(path.with_name, CONFIGS):
            if file.exists():
                files[file.name] = file.read_bytes()
        try:
            if content.startswith(IdTokenizer.MAGIC):
                vocab_size, bos = content.removeprefix(IdTokenizer.MAGIC).split()
                return IdTokenizer(int(vocab_size), int(bos))
            if path.suffix == ".json":
                return JsonTokenizer({"tokenizer.json": content, **files})
            return cls({"tokenizer.model": content, **files})
        except Exception as error:  # which tokenizers raises itself
            raise ValueError(
                f"not a tokenizer with BOS and EOS ({path}: {error}). "
                "fix: data.tokenizer=PATH of another, or tools.import_hf of its folder"
            ) from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train on texts, to at most `vocab_size` tokens.

        Among them are the control tokens, all 256 bytes, newlines and runs of spaces. Raises
        ValueError for text that no such tokenizer can be trained on.
        """
        # Read them first: SentencePiece turns an exception of its iterator, a signal's too, into a
        # RuntimeError.
        pieces = []
        for text in texts:
            pieces += PIECES.findall(text)
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
                max_sentence_length=4 * MAX_PIECE_CHARS,  # bytes; UTF-8 has up to 4 a character
                num_threads=os.cpu_count(),
                minloglevel=2,
            )
        except RuntimeError:
            raise ValueError(
                f"no tokenizer from this text ({vocab_size=}). "
                "fix: more text; or a data.vocab_size that is smaller, but above 300"
            ) from None
        return cls({"tokenizer.model": model.getvalue()})

    def set_special_ids(self, special: dict) -> None:
        """Set EOS, one or more, and BOS, as a generation_config.json has them."""
        eos_ids = special["eos_token_id"]
        self.eos_ids = tuple(eos_ids) if isinstance(eos_ids, list) else (eos_ids,)
        self.eos = self.eos_ids[0]
        self.bos = special.get("bos_token_id", self.eos)
        self.starts_with_bos = special.get("add_bos_token", True)  # of a prompt

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
        """Encode each text, as text alone, between BOS and EOS, which may be one."""
        ends = [self.eos][self.bos in self.eos_ids :]
        return [[self.bos, *tokens, *ends] for tokens in self.encode_batch(texts)]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text, on all cores."""
        documents = self.processor.encode(texts, num_threads=os.cpu_count())
        for index, text in enumerate(texts):
            if SPACE in text:
                documents[index] = self.encode(text)
        return documents

    def decode(self, tokens: list[int]) -> str:
        """Decode; bytes that are not UTF-8 become U+FFFD, BOS and EOS nothing."""
        return self.processor.decode(tokens)

    def nbytes(self, tokens: np.ndarray) -> int | None:
        """Count the UTF-8 bytes of the documents in `tokens`; None if there is no text of them."""
        # Cut at BOS and EOS, so that each text is decoded by itself, as it was encoded.
        starts = np.flatnonzero(np.isin(tokens, (self.bos, *self.eos_ids)))
        num_bytes = 0
        for document in np.split(tokens, starts):
            text = self.decode(document.tolist())
            num_bytes += len(text.encode())
        return num_bytes

    @property
    def sha256(self) -> str:
        """Identifies the tokenizer, and its BOS and EOS."""
        name = next(iter(self.files))
        return sha256(self.files[name] + f"{self.bos} {self.eos_ids}".encode()).hexdigest()


class IdTokenizer(Tokenizer):
    """Stands in for an unknown tokenizer: the text of tokens is their ids, as in 464 3290.

    Its file is one line: MAGIC, the size of the vocabulary, BOS, which is EOS too.
    """

    MAGIC = b"ids "  # no SentencePiece model begins with it

    def __init__(self, vocab_size: int, bos: int):
        self.files = {"tokenizer.model": self.MAGIC + f"{vocab_size} {bos}\n".encode()}
        self.vocab_size = vocab_size
        self.set_special_ids({"eos_token_id": bos})

    def encode(self, text: str) -> list[int]:
        """Read the ids. Raises ValueError for other text and for ids outside the vocabulary."""
        tokens = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise ValueError(
                    f"not a token id below {self.vocab_size} ({word}). fix: numbers such as 2, or "
                    "--run of a model of text"
                )
            tokens.append(int(word))
        return tokens

    def decode(self, tokens: list[int]) -> str:
        return " ".join(str(token) for token in tokens if token != self.bos)

    def nbytes(self, tokens: np.ndarray) -> None:
        return None


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, with the BOS and EOS ids of the generation_config.json beside it.

    tools/formats/special_tokens.py writes such files for a folder of Hugging Face that says it in
    another way.
    """

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.processor = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        self.processor.no_padding()
        self.processor.no_truncation()
        vocabulary = self.processor.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        # Bytes, and special tokens, which are decoded to nothing.
        byte_tokens = {vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)}
        self.unstable_tokens = byte_tokens.union(self.processor.get_added_tokens_decoder())
        self.set_special_ids(json.loads(files["generation_config.json"]))
        # Its template may put BOS in front of a text.
        self.starts_with_bos = self.processor.encode("").ids == [self.bos]

    def encode(self, text: str) -> list[int]:
        """Encode without BOS and EOS; a text that looks like a special token is that token."""
        self.processor.encode_special_tokens = False
        return self.processor.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text; what looks like a special token is text."""
        self.processor.encode_special_tokens = True
        return [each.ids for each in self.processor.encode_batch(texts, add_special_tokens=False)]


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer of a folder: tokenizer.model, or where there is none, tokenizer.json."""
    file = folder / "tokenizer.model"
    if file.exists():
        return file
    return folder / "tokenizer.json"
