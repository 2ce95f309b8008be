"""SentencePiece byte-pair encoding that gives back any UTF-8 text to the letter. Kudo and Richardson, 1808.06226."""

import io
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import sentencepiece as spm

PIECE = 4000  # characters; the trainer's time grows with the length of what it is given at once
SPACE = "\u2581"  # SentencePiece's own sign for a space: it would come back as one


class Tokenizer:
    """Raises ValueError for bytes that are no SentencePiece model, or one without BOS and EOS."""

    def __init__(self, proto: bytes):
        try:
            self.processor = spm.SentencePieceProcessor(model_proto=proto)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"not a SentencePiece model ({error}). fix: another tokenizer.model"
            ) from None
        self.proto, self.sha256 = proto, sha256(proto).hexdigest()
        self.vocab_size, self.bos, self.eos = (
            self.processor.vocab_size(),
            self.processor.bos_id(),
            self.processor.eos_id(),
        )
        if self.bos < 0 or self.eos < 0:
            raise ValueError(
                f"a tokenizer needs BOS and EOS (ids {self.bos}, {self.eos}). fix: train it with both"
            )
        self.sign = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        try:
            proto = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(
                f"no tokenizer ({path}: {error.strerror}). fix: a path of one"
            ) from None
        return (IdTokenizer if proto.startswith(IdTokenizer.MAGIC) else cls)(proto)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """At most `vocab_size` pieces: control signs, 256 bytes, what is frequent, newlines and runs of spaces too."""
        written = io.BytesIO()
        ended: list[BaseException] = []

        def sentences() -> Iterator[str]:
            try:
                for text in texts:
                    yield from split(text)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                ended.append(error)
                raise

        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=sentences(),
                model_writer=written,
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
                max_sentence_length=4 * PIECE,
                num_threads=os.cpu_count(),
                minloglevel=2,
            )
        except RuntimeError as error:
            if ended:  # of a signal, say, which SentencePiece hands on as an error of its own
                raise ended[0] from None
            reason = str(error).rpartition("] ")[2].partition("\n")[0]
            fix = "more text, or another data.vocab_size"
            raise ValueError(
                f"no tokenizer from this text ({vocab_size=}: {reason}). fix: {fix}"
            ) from None
        return cls(written.getvalue())

    def encode(self, text: str) -> list[int]:
        """Without BOS and EOS; text that looks like them is ordinary text."""
        first, *rest = self.processor.encode(text.split(SPACE))
        return first + [token for part in rest for token in (*self.sign, *part)]

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """BOS + text + EOS of each, int32, made on all cores."""
        pairs = zip(texts, self.processor.encode(texts, num_threads=os.cpu_count()), strict=True)
        encoded = (self.encode(text) if SPACE in text else tokens for text, tokens in pairs)
        return [np.array([self.bos, *tokens, self.eos], dtype=np.int32) for tokens in encoded]

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are not UTF-8 come out as U+FFFD; BOS and EOS as nothing."""
        return self.processor.decode(tokens)

    def nbytes(self, tokens: np.ndarray) -> int | None:
        """UTF-8 bytes of the documents that these are; None where nobody knows."""
        starts = np.flatnonzero(np.isin(tokens, (self.bos, self.eos)))
        texts = self.processor.decode([part.tolist() for part in np.split(tokens, starts)])
        return sum(len(text.encode()) for text in texts)


class IdTokenizer(Tokenizer):
    """Stands for a tokenizer that is not here: the text of tokens is their ids, as in 464 3290. BOS is EOS.

    Its file is a line: SIGN, the size of the vocabulary, BOS. Raises ValueError for a BOS outside, and for other text.
    """

    MAGIC = b"ids "  # no SentencePiece model begins so

    def __init__(self, proto: bytes):
        self.processor, self.proto, self.sha256 = self, proto, sha256(proto).hexdigest()
        self.vocab_size, self.bos = map(int, proto.removeprefix(self.MAGIC).split())
        self.eos = self.bos
        if self.bos >= self.vocab_size:
            raise ValueError(
                f"BOS is outside the vocabulary (data.bos={self.bos}, {self.vocab_size}). fix: one inside"
            )

    def encode(self, text: str) -> list[int]:
        if bad := [
            word for word in text.split() if not word.isdecimal() or int(word) >= self.vocab_size
        ]:
            raise ValueError(
                f"not a token id below {self.vocab_size} ({bad[0]}). fix: numbers, as in 464 3290"
            )
        return [int(word) for word in text.split()]

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array([self.bos, *self.encode(text)]) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(str(token) for token in tokens if token != self.bos)

    def id_to_piece(self, tokens: list[int]) -> list[str]:
        return [str(token) for token in tokens]

    def nbytes(self, tokens: np.ndarray) -> None:
        return None


def split(text: str) -> Iterator[str]:
    """Pieces of up to PIECE characters, cut at line ends where there are any."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
