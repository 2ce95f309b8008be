"""BOS and EOS of a Hugging Face tokenizer, which the configs of a folder name in several ways."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

from data.tokenizer import JsonTokenizer, Tokenizer
from run.errors import IntegrityError

# An entry of a later file replaces one of an earlier file.
CONFIGS = ("tokenizer_config.json", "config.json", "generation_config.json")
# The texts in a normalizer or decoder that replace others, as JSON writes them.
REPLACEMENTS = re.compile(r'"content": "((?:\\.|[^"\\])+)"')
MOST_GROWTH = 64
UNUSUAL = "a \U0010ffff"  # which a tokenizer must encode, if only as unknown
# Texts that some tokenizers change: blanks, line ends, letters of several forms, rare characters,
# and the sign for a blank of SentencePiece.
FRAGILE = (
    "a b",
    " a",
    "a  b",
    "a ",
    "a\tb\n",
    "A .",
    "\ufb01 \u00bd",
    "e\u0301",
    "\u0436\U0001f408",
    "a\u2581b",
)


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Raise ValueError for what reading a file that may hold anything raises."""
    try:
        yield
    except (ValueError, OSError, IntegrityError, KeyboardInterrupt):
        raise
    except BaseException as error:  # tokenizers panic with one that is no Exception
        raise ValueError(
            f"{what}: entries are missing or of other types ({error}). "
            "fix: get all files of the model again"
        ) from None


def import_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, with the ids of BOS and EOS as our checkpoints have them.

    Of a tokenizer.json and a tokenizer.model, it is the one that transformers reads, so that it can
    be exported again as it is. Raises ValueError where it has no EOS, or puts more than BOS in
    front of a text.
    """
    files = {}
    settings = {}
    for name in CONFIGS:
        if (folder / name).exists():
            files[name] = (folder / name).read_bytes()
            content = read_json(folder / name)
            settings |= {key: value for key, value in content.items() if value is not None}
    files.pop("config.json", None)  # of the model

    # What it puts in front of a prompt: BOS or nothing.
    if (folder / "tokenizer.json").exists():
        files["tokenizer.json"] = (folder / "tokenizer.json").read_bytes()
        check_growth(read_json(folder / "tokenizer.json"))
        tokenizer = with_special_ids(JsonTokenizer, files, {"eos_token_id": 0})
        tokenizer.decode(tokenizer.encode(UNUSUAL))
        vocabulary = tokenizer.processor.get_vocab()
        prefix = tokenizer.processor.encode("").ids
        is_in_front = tokenizer.processor.encode("a").ids[: len(prefix)] == prefix
    else:
        files = {"tokenizer.model": (folder / "tokenizer.model").read_bytes()}
        tokenizer = Tokenizer(files)
        piece = tokenizer.processor.id_to_piece
        vocabulary = {piece(token): token for token in range(tokenizer.vocab_size)}
        pieces = {"bos_token": piece(tokenizer.bos), "eos_token": piece(tokenizer.eos)}
        settings = pieces | settings
        settings.pop("bos_token_id", None)  # the tokenizer's is put in front, not the model's
        prefix = special_ids(settings, "bos", vocabulary)
        if not settings.get("add_bos_token", True):
            prefix = []
        is_in_front = True

    # Without a BOS, an EOS stands between documents: the one that a model calls BOS, if any.
    eos_ids = special_ids(settings, "eos", vocabulary)
    model_bos = special_ids(settings, "bos", vocabulary)
    candidates = [*prefix, *(token for token in model_bos if token in eos_ids), *eos_ids]
    has_only_bos = len(prefix) <= 1 and is_in_front
    if not eos_ids or max(candidates) >= tokenizer.vocab_size or not has_only_bos:
        raise ValueError(
            f"a tokenizer needs EOS, and may add only BOS, in front (EOS {eos_ids}, adds {prefix}, "
            f"{tokenizer.vocab_size} tokens). fix: eos_token in tokenizer_config.json, or "
            "eos_token_id in config.json or generation_config.json"
        )
    special = {
        "bos_token_id": candidates[0],
        "eos_token_id": eos_ids,
        "add_bos_token": len(prefix) == 1,
    }
    return with_special_ids(type(tokenizer), files, special)


def describe_changes(tokenizer: Tokenizer) -> list[str]:
    """Describe the FRAGILE texts, and those with an added token, that do not come back."""
    texts = [*FRAGILE]
    if isinstance(tokenizer, JsonTokenizer):
        for token in tokenizer.processor.get_added_tokens_decoder().values():
            texts.append(f"a {token.content} b")
    changes = [tokenizer.change(text, tokenizer.encode(text)) for text in texts]
    return [change for change in changes if change is not None]


def read_json(file: Path) -> dict:
    """What a file holds. Raises ValueError with its name where it is missing or no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"no JSON ({file}: {error}). fix: get all files of the model; a run of ours "
            "needs no import"
        ) from None


def check_growth(content: dict) -> None:
    """Raise ValueError for a tokenizer.json whose replacements may multiply a text."""
    changes = json.dumps([content.get("normalizer"), content.get("decoder")], ensure_ascii=False)
    growth = prod(map(len, REPLACEMENTS.findall(changes)))
    if growth > MOST_GROWTH:
        raise ValueError(f"replacements that multiply a text (tokenizer.json: {growth} times)")


def with_special_ids(kind: type, files: dict[str, bytes], ids: dict) -> Tokenizer:
    return kind(files | {"generation_config.json": json.dumps(ids).encode()})


def special_ids(settings: dict, kind: str, vocabulary: dict[str, int]) -> list[int]:
    """The ids of BOS or EOS: `eos_token_id`, which may be a list, or that of `eos_token`."""
    ids = settings.get(f"{kind}_token_id", [])
    if ids == []:
        # A token may be a dict of its content and options.
        token = settings.get(f"{kind}_token")
        if isinstance(token, dict):
            token = token["content"]
        ids = vocabulary.get(token, [])
    if not isinstance(ids, list):
        ids = [ids]
    return ids
