"""Read BOS and EOS of a Hugging Face tokenizer, which configs specify in several ways."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerFile

from data.tokenizer import CONFIGS as KEPT_FILES
from data.tokenizer import JsonTokenizer, Tokenizer
from run.errors import IntegrityError

# Entries in later files replace entries in earlier files.
CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)
# Classes of transformers 5 that replace the pre-tokenizer in a tokenizer.json with their own, and
# their defaults for add_prefix_space.
REBUILDING_CLASSES = {"GPT2Tokenizer": False, "Qwen2Tokenizer": False, "LlamaTokenizer": True}
# Names of classes that use a tokenizer.json unchanged.
PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
# The pattern by which Qwen2Tokenizer splits a text, regardless of the tokenizer.json.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Ids in a config.json and a generation_config.json that an export restores. The padding token comes
# from the tokenizer.
ID_ENTRIES = ("bos_token_id", "eos_token_id")
IMPORTED_IDS = "imported_ids"  # an entry in our checkpoints' generation_config.json
TEMPLATES = "additional_chat_templates"  # a folder in transformers; one .json file in ours
SAVE_AGAIN = (
    "save it again with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
# The replacement texts in a normalizer or decoder, as they appear in JSON.
REPLACEMENTS = re.compile(r'"content": "((?:\\.|[^"\\])+)"')
MOST_GROWTH = 64
UNUSUAL = "a \U0010ffff"  # a text that a tokenizer must encode, even if only as <unk>
# Texts that some tokenizers change: spaces, line endings, letters with several forms, rare
# characters, and SentencePiece's symbol for a space.
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
# Texts that some classes may split differently: digits, spaces, line endings, letters.
CUTS = (
    *FRAGILE,
    "12345 678",
    "x=1;\r\n\r\n  y",
    "don't DON'T",
    "a_b-c...",
    "\u0442\u0435\u0441\u0442 \u0436",
)


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Convert the exceptions that reading an untrusted file can raise into ValueError."""
    try:
        yield
    except (ValueError, OSError, IntegrityError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic in tokenizers is not a subclass of Exception
        raise ValueError(
            f"{what}: entries are missing or have wrong types ({error}). fix: download the model "
            "again"
        ) from None


def import_tokenizer(folder: Path) -> Tokenizer:
    """Return a folder's tokenizer, with the ids of BOS and EOS as in our checkpoints.

    If the folder has a tokenizer.json and a tokenizer.model, we read the file that transformers
    reads, so that it can be exported unchanged, with chat template and special tokens. Raises
    ValueError if the tokenizer has no EOS, adds more than BOS before a text, or encodes to
    different ids in transformers.
    """
    files = {}
    settings = {}
    imported_ids = {}
    for name in CONFIGS:
        if (folder / name).exists():
            content = read_json(folder / name)
            if name in ("config.json", "generation_config.json"):
                imported_ids[name] = {key: content[key] for key in ID_ENTRIES if key in content}
            # Two files may name the special tokens; transformers reads only one of them.
            if name == "special_tokens_map.json" and "added_tokens_decoder" in settings:
                continue
            settings |= {key: value for key, value in content.items() if value is not None}
    if (folder / "added_tokens.json").exists() and "added_tokens_decoder" not in settings:
        settings["added_tokens"] = [*read_json(folder / "added_tokens.json")]
    for name in KEPT_FILES:
        if (folder / name).exists():
            files[name] = (folder / name).read_bytes()
    templates = {}
    for file in sorted((folder / TEMPLATES).glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if templates:
        files[f"{TEMPLATES}.json"] = json.dumps(templates, indent=1).encode()

    # The tokens that the tokenizer adds before a prompt: BOS or nothing.
    if (folder / "tokenizer.json").exists():
        files["tokenizer.json"] = (folder / "tokenizer.json").read_bytes()
        content = read_json(folder / "tokenizer.json")
        check_growth(content)
        tokenizer = with_special_ids(JsonTokenizer, files, {"eos_token_id": 0})
        tokenizer.decode(tokenizer.encode(UNUSUAL))
        vocabulary = tokenizer.processor.get_vocab()
        prefix = tokenizer.processor.encode("").ids
        is_in_front = tokenizer.processor.encode("a").ids[: len(prefix)] == prefix
        special_tokens = {token["content"]: token for token in content["added_tokens"]}
        check_class(settings, content, adds_bos=bool(prefix))
    else:
        check_sentencepiece_class(settings)
        model = (folder / "tokenizer.model").read_bytes()
        files["tokenizer.model"] = with_prefix_space(model, settings.get("add_prefix_space"))
        tokenizer = with_special_ids(Tokenizer, files, {})
        piece = tokenizer.processor.id_to_piece
        vocabulary = {piece(token): token for token in range(tokenizer.vocab_size)}
        pieces = {"bos_token": piece(tokenizer.bos), "eos_token": piece(tokenizer.eos)}
        settings = pieces | settings
        settings.pop("bos_token_id", None)  # prompts get the tokenizer's BOS, not the model's
        prefix = special_ids(settings, "bos", vocabulary)
        if not settings.get("add_bos_token", True):
            prefix = []
        is_in_front = not settings.get("add_eos_token", False)
        special_tokens = tokenizer.special_tokens

    # Without a BOS, an EOS separates documents: the one that the model calls BOS, if any.
    eos_ids = existing(special_ids(settings, "eos", vocabulary))
    model_bos = existing(special_ids(settings, "bos", vocabulary))
    candidates = [*prefix, *(token for token in model_bos if token in eos_ids), *eos_ids]
    has_only_bos = len(prefix) <= 1 and is_in_front
    if not eos_ids or max(candidates) >= tokenizer.vocab_size or not has_only_bos:
        raise ValueError(
            f"a tokenizer needs EOS, and may prepend only BOS (EOS {eos_ids}, prepends {prefix}, "
            f"{tokenizer.vocab_size} tokens). fix: set eos_token in tokenizer_config.json, or "
            "eos_token_id in config.json or generation_config.json"
        )
    check_named_tokens(settings, special_tokens)
    special = {
        "bos_token_id": candidates[0],
        "eos_token_id": eos_ids,
        "add_bos_token": len(prefix) == 1,
        IMPORTED_IDS: imported_ids,
    }
    # The tokenizer's padding token takes precedence; old model configs have -1 for no padding.
    if "pad_token" in settings:
        settings.pop("pad_token_id", None)
    for token in special_ids(settings, "pad", vocabulary):
        if 0 <= token < tokenizer.vocab_size:
            special["pad_token_id"] = token
    return with_special_ids(type(tokenizer), files, special)


def class_in_transformers(settings: dict) -> str:
    """Return the name of the class that transformers 5 uses for a tokenizer with these settings.

    The name is "" if transformers uses the file unchanged.
    """
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    model_type = settings.get("model_type")
    if model_type == "qwen2" or (model_type == "qwen3" and not name):
        return "Qwen2Tokenizer"
    if model_type == "mistral" or name in PLAIN_CLASSES:
        return ""
    return name


def check_sentencepiece_class(settings: dict) -> None:
    """Raise ValueError if transformers uses a class with different rules for a tokenizer.model."""
    name = class_in_transformers(settings)
    if name in ("", "LlamaTokenizer"):
        return
    fix = "add the model's tokenizer.json"
    if settings.get("model_type") != "qwen2":
        fix += (
            ', or set "tokenizer_class": "LlamaTokenizer" in tokenizer_config.json if that is '
            "correct"
        )
    raise ValueError(
        "a tokenizer.model alone gives different ids in transformers (model_type "
        f"{settings.get('model_type')}, read with {name}). fix: {fix}"
    )


def check_class(settings: dict, content: dict, adds_bos: bool) -> None:
    """Raise ValueError if the tokenizer's class changes the effect of its tokenizer.json."""
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    is_byte_level = '"ByteLevel"' in steps
    if name not in REBUILDING_CLASSES or (name == "LlamaTokenizer" and is_byte_level):
        return
    adds_space = re.search(
        r'"add_prefix_space": true|"prepend_scheme": "(first|always)"|"type": "Prepend"', steps
    )
    actual = {"add_prefix_space": adds_space is not None}
    if name == "LlamaTokenizer":
        actual |= {"add_bos_token": adds_bos, "add_eos_token": False}
    expected = actual | {"add_prefix_space": REBUILDING_CLASSES[name]} | settings
    for key, value in actual.items():
        if expected[key] != value:
            raise ValueError(
                f"{name} and tokenizer.json differ ({key} is {expected[key]} in "
                f"tokenizer_config.json, {value} in tokenizer.json). "
                f'fix: set "{key}": {json.dumps(value)} in tokenizer_config.json if that is correct'
            )


def with_prefix_space(model: bytes, adds_space: bool | None) -> bytes:
    """Return a SentencePiece model that adds a space before a text if and only if `adds_space`.

    Raises ValueError if `adds_space` is None and the model adds no space, unlike transformers.
    """
    content = ModelProto.FromString(model)
    if adds_space is None and not content.normalizer_spec.add_dummy_prefix:
        raise ValueError(
            "add_prefix_space is missing from tokenizer_config.json (tokenizer.model does not "
            'prepend a space, but transformers would). fix: set "add_prefix_space": false in it'
        )
    if adds_space in (None, content.normalizer_spec.add_dummy_prefix):
        return model
    content.normalizer_spec.add_dummy_prefix = adds_space
    return content.SerializeToString()


def check_named_tokens(settings: dict, special_tokens: dict) -> None:
    """Raise ValueError for tokens in the configs that the tokenizer lacks or defines differently.

    transformers would add them with new ids. `special_tokens` maps the text of each of the
    tokenizer's special tokens to its options (tokenizer.json) or to a list of ids.
    """
    named = []
    for key, value in settings.items():
        if key.endswith("_token") and isinstance(value, str | dict):
            named.append(value)
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens"):
        tokens = settings.get(key, [])
        named += tokens.values() if isinstance(tokens, dict) else tokens
    texts = [token["content"] if isinstance(token, dict) else token for token in named]
    different = [text for text in texts if text not in special_tokens]

    for token in settings.get("added_tokens_decoder", {}).values():
        known = special_tokens.get(token["content"])
        options = {key: token.get(key) for key in ("lstrip", "rstrip", "single_word")}
        is_equal = known is not None
        if isinstance(known, dict):
            is_equal = all(known[key] == value for key, value in options.items())
        if not is_equal:
            different.append(token["content"])
    if different:
        raise ValueError(
            "some tokens are missing from the tokenizer, or have different options there "
            f"(tokenizer_config.json: {', '.join(dict.fromkeys(different))}). fix: {SAVE_AGAIN}"
        )


def describe_changes(tokenizer: Tokenizer) -> list[str]:
    """Describe how a round trip changes FRAGILE texts and texts that contain an added token."""
    texts = [*FRAGILE]
    if isinstance(tokenizer, JsonTokenizer):
        for token in tokenizer.processor.get_added_tokens_decoder().values():
            texts.append(f"a {token.content} b")
    changes = [tokenizer.change(text, tokenizer.encode(text)) for text in texts]
    return [change for change in changes if change is not None]


def describe_versions(tokenizer: Tokenizer, model_type: str = "") -> list[str]:
    """Describe how transformers 4 or 5 may tokenize differently from the model's files."""
    config = json.loads(tokenizer.files.get("tokenizer_config.json", "{}"))
    differences = []
    name = class_in_transformers({"model_type": model_type} | config)
    if isinstance(tokenizer, JsonTokenizer) and has_other_cuts(tokenizer, name):
        differences.append(
            f"transformers 5 reads tokenizer.json with {name}, which splits some texts "
            "differently; attend and transformers 4 follow the file"
        )
    if isinstance(tokenizer, JsonTokenizer):
        is_llama = str(config.get("tokenizer_class") or "").removesuffix("Fast") == "LlamaTokenizer"
        adds_space = is_llama and '"Prepend"' in tokenizer.files["tokenizer.json"].decode()
    else:
        model = ModelProto.FromString(tokenizer.files["tokenizer.model"])
        adds_space = model.normalizer_spec.add_dummy_prefix
        if "add_bos_token" not in config:
            differences.append(
                "BOS is prepended to a prompt, as in transformers 4 (transformers 5 omits it if "
                "tokenizer_config.json has no add_bos_token)"
            )
    if adds_space:
        differences.append(
            "texts that begin with a space or contain a special token may get different ids in "
            "transformers (4 and 5 differ)"
        )
    return differences


def has_other_cuts(tokenizer: JsonTokenizer, name: str) -> bool:
    """Return whether this class of transformers 5 produces, or may produce, different ids."""
    if name in ("", "LlamaTokenizer"):  # `check_class` covers LlamaTokenizer
        return False
    theirs = TokenizerFile.from_str(tokenizer.files["tokenizer.json"].decode())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "GPT2Tokenizer")
    if name == "Qwen2Tokenizer":
        theirs.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
        theirs.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif name == "GPT2Tokenizer":
        theirs.normalizer = None
        theirs.pre_tokenizer = byte_level
    else:
        return True
    ours = tokenizer.processor
    return any(theirs.encode(text).ids != ours.encode(text).ids for text in CUTS)


def describe_bos(tokenizer: Tokenizer) -> str | None:
    """Describe a BOS that the configs name but encoding never prepends; None if there is none."""
    imported_ids = json.loads(tokenizer.files["generation_config.json"])[IMPORTED_IDS]
    for name, ids in imported_ids.items():
        named = ids.get("bos_token_id")
        if named not in (None, tokenizer.bos):
            begin = "BOS" if tokenizer.starts_with_bos else "EOS"
            return (
                f"{name} has bos_token_id {named}, which the tokenizer never prepends; documents "
                f"and empty prompts begin with {begin}, {tokenizer.bos}"
            )
    return None


def read_json(file: Path) -> dict:
    """Return the content of a JSON file. Raises ValueError, naming the file, if this fails."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"missing or not JSON ({file}: {error}). fix: download all files of the model. A run "
            "or checkpoint of attend does not have to be imported"
        ) from None


def check_growth(content: dict) -> None:
    """Raise ValueError for a tokenizer.json whose replacements may multiply the text length."""
    changes = json.dumps([content.get("normalizer"), content.get("decoder")], ensure_ascii=False)
    growth = prod(map(len, REPLACEMENTS.findall(changes)))
    if growth > MOST_GROWTH:
        raise ValueError(f"replacements may make a text {growth} times as long (tokenizer.json)")


def with_special_ids(kind: type, files: dict[str, bytes], ids: dict) -> Tokenizer:
    """Return a tokenizer with these ids added to its generation_config.json."""
    content = json.loads(files.get("generation_config.json", "{}")) | ids
    return kind(files | {"generation_config.json": json.dumps(content).encode()})


def existing(ids: list) -> list[int]:
    """Drop null and -1, which some configs have for a token that does not exist."""
    return [token for token in ids if isinstance(token, int) and token >= 0]


def special_ids(settings: dict, kind: str, vocabulary: dict[str, int]) -> list[int]:
    """Return the ids of a special token (bos, eos or pad), given in `settings` by id or text."""
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
