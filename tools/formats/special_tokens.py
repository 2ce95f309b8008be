"""BOS and EOS of a Hugging Face tokenizer, which the configs of a folder name in several ways."""

import json
from pathlib import Path

from data.tokenizer import JsonTokenizer

# An entry of a later file replaces one of an earlier file.
CONFIGS = ("tokenizer_config.json", "config.json", "generation_config.json")


def import_json_tokenizer(folder: Path) -> JsonTokenizer:
    """The tokenizer.json of a folder, with the ids of BOS and EOS as our checkpoints have them.

    Raises ValueError where it has no EOS, or puts more than BOS in front of a text.
    """
    files = {}
    settings = {}
    for name in CONFIGS:
        if (folder / name).exists():
            files[name] = (folder / name).read_bytes()
            content = json.loads(files[name])
            settings |= {key: value for key, value in content.items() if value is not None}
    del files["config.json"]  # of the model
    files["tokenizer.json"] = (folder / "tokenizer.json").read_bytes()
    settings["added_tokens"] = json.loads(files["tokenizer.json"]).get("added_tokens", [])

    # Its post-processor says what it adds to a prompt: BOS in front, or nothing.
    eos_ids = special_ids(settings, "eos")
    tokenizer = with_special_ids(files, {"eos_token_id": eos_ids or [0]})
    prefix = tokenizer.processor.encode("").ids
    is_in_front = tokenizer.processor.encode("a").ids[: len(prefix)] == prefix
    # Without a BOS, an EOS stands between documents: the one that a model calls BOS, if any.
    separators = [token for token in special_ids(settings, "bos") if token in eos_ids]
    bos = [*prefix, *separators, *eos_ids]
    if not eos_ids or max(bos) >= tokenizer.vocab_size or len(prefix) > 1 or not is_in_front:
        raise ValueError(
            f"a tokenizer needs EOS, and may add only BOS, in front (EOS {eos_ids}, adds {prefix}, "
            f"{tokenizer.vocab_size} tokens). fix: eos_token in tokenizer_config.json"
        )
    return with_special_ids(files, {"bos_token_id": bos[0], "eos_token_id": eos_ids})


def with_special_ids(files: dict[str, bytes], ids: dict) -> JsonTokenizer:
    return JsonTokenizer(files | {"generation_config.json": json.dumps(ids).encode()})


def special_ids(settings: dict, kind: str) -> list[int]:
    """The ids of BOS or EOS: `eos_token_id`, which may be a list, or that of `eos_token`."""
    ids = settings.get(f"{kind}_token_id", [])
    token = settings.get(f"{kind}_token")
    if ids == [] and token is not None:
        # A token may be a dict of its content and options.
        content = token["content"] if isinstance(token, dict) else token
        ids = [each["id"] for each in settings["added_tokens"] if each["content"] == content]
    return ids if isinstance(ids, list) else [ids]
