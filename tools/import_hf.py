"""Convert a Hugging Face folder to a checkpoint:

python -m tools.import_hf my/SmolLM2-135M --out models/smollm2
"""

import argparse
import json
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from data.tokenizer import SPACE, JsonTokenizer, SentencePieceTokenizer
from model.build import build_model
from run import checkpoint, errors
from run.cli import Parser, user_path
from run.errors import IntegrityError
from run.progress import print0
from tools.export_hf import check_finite, new_folder
from tools.formats.hf_config import read_config, read_json
from tools.formats.verify import (
    LOCAL,
    TEXTS,
    example_row,
    import_transformers,
    load_theirs,
    logits_differ,
    malformed,
    tokenizers_differ,
)
from tools.formats.weights import our_weights


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.import_hf", __doc__)
    parser.add_argument(
        "folder", type=user_path, help="folder with config.json, safetensors and a tokenizer"
    )
    parser.add_argument(
        "--out", type=user_path, required=True, metavar="FOLDER", help="new or empty output folder"
    )
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    with new_folder(args.out):
        import_model(args)
    run = shlex.quote(str(args.out))
    print(f"written: {args.out}. To use it: python generate.py PROMPT --run {run}")


def import_model(args: argparse.Namespace) -> None:
    """Read a transformers model, compare it with ours, and write it as a checkpoint."""
    with errors.exit_on_invalid_input():
        import_transformers()
        architecture, tree = read_config(args.folder)
        tokenizer = import_tokenizer(args.folder)
        # An embedding may be padded beyond the vocabulary for speed.
        if tokenizer.vocab_size > tree["vocab_size"]:
            raise ValueError(
                f"the tokenizer does not fit the model ({args.folder}: {tokenizer.vocab_size} "
                f"token ids, {tree['vocab_size']} embeddings). fix: use the tokenizer that the "
                "model was trained with"
            )
        weights = import_weights(args.folder, architecture, tree)
    checkpoint.save(args.out, 0, weights, {"model": tree}, tokenizer.files, {})
    texts = [tokenizer.change(text, tokenizer.encode(text)) for text in TEXTS]
    changes = [change for change in texts if change is not None]
    if changes:
        print0(f"note: the tokenizer changes some texts, for example: {', '.join(changes[:4])}")


@torch.no_grad()
def import_weights(folder: Path, architecture: str, tree: dict) -> dict[str, Tensor]:
    """Return a folder's weights under our names, in the dtype of the config if nothing is lost.

    Raises IntegrityError for weights that are missing or cannot be read, and ValueError if the
    logits differ from the logits of transformers. Exits with code 4 if a weight is not finite.
    """
    # A forged config could describe a model larger than memory.
    shapes = build_model(tree, "meta")
    num_weights = sum(weight.numel() for weight in shapes.parameters())
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if num_bytes < num_weights:
        raise IntegrityError(
            f"the .safetensors files are too small for the config ({folder}: {num_weights} weights "
            f"in {num_bytes} bytes). fix: download the model again, as .safetensors (.bin files "
            "are pickles, which could run code)"
        )
    theirs = load_theirs(folder)
    weights = our_weights(theirs.state_dict(), shapes, architecture)
    check_finite(weights, folder)

    # Both models share their weights.
    tokens = example_row(tree)
    expected = theirs(tokens).logits
    ours = build_model(tree, seed=None).train(False)
    ours.load_state_dict(weights, assign=True)
    difference = logits_differ(ours(tokens), expected)
    if difference is not None:
        raise ValueError(
            f"attend and transformers compute different logits ({folder}: {architecture}, "
            f"{difference})"
        )
    config = import_transformers().AutoConfig.from_pretrained(folder, **LOCAL)
    return {name: narrowed(weight, config.dtype) for name, weight in weights.items()}


def narrowed(weight: Tensor, dtype: object) -> Tensor:
    """Return an fp32 weight in `dtype` if that is bf16 or fp16 and changes no value."""
    narrow = weight.to(dtype) if dtype in (torch.bfloat16, torch.float16) else weight
    return narrow if torch.equal(narrow.float(), weight) else weight


def import_tokenizer(folder: Path) -> JsonTokenizer:
    """Return our tokenizer for a folder, from the tokenizer.json that transformers saves.

    Raises ValueError for a tokenizer that transformers cannot read or that lacks EOS, and if ours
    encodes or decodes texts differently.
    """
    library = import_transformers()
    with malformed(f"cannot import this tokenizer ({folder})"):
        config = read_optional(folder / "tokenizer_config.json")
        is_described = {"tokenizer_class", "add_prefix_space"} & config.keys()
        if (folder / "tokenizer.json").exists() or is_described:
            theirs = library.AutoTokenizer.from_pretrained(folder, **LOCAL)
        else:
            theirs = read_sentencepiece(folder, config)
        if not theirs.is_fast:
            raise ValueError(f"{type(theirs).__name__} cannot be saved as tokenizer.json")
        files = {}
        with TemporaryDirectory() as saved:
            # Chat templates are saved in tokenizer_config.json.
            theirs.save_pretrained(saved, save_jinja_files=False)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                files[name] = Path(saved, name).read_bytes()
        # With this class and entry, transformers 4 and 5 read tokenizer.json as it is.
        config = json.loads(files["tokenizer_config.json"])
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
        for entry in ("backend", *LOCAL, "is_local"):
            config.pop(entry, None)
        files["tokenizer_config.json"] = json.dumps(config, indent=1).encode()
        generation_config = special_ids(folder, theirs)
        files["generation_config.json"] = json.dumps(generation_config, indent=1).encode()
        ours = JsonTokenizer(files)
        # Without files, transformers returns a tokenizer that encodes every text to nothing.
        if not ours.encode("a"):
            raise ValueError("no vocabulary")
        difference = tokenizers_differ(ours, theirs)
    if difference is not None:
        raise ValueError(f"this tokenizer is not supported ({folder}: {difference})")
    return ours


def read_sentencepiece(folder: Path, config: dict):
    """Read a tokenizer.model whose class is unknown. By default, it prepends BOS.

    Raises ValueError if transformers encodes a text differently from SentencePiece, unless
    SentencePiece changes the text, or the text contains SPACE or begins with a space.
    """
    options = {"add_bos_token": True} | config | LOCAL
    theirs = import_transformers().LlamaTokenizer.from_pretrained(folder, **options)
    own = SentencePieceTokenizer({"tokenizer.model": (folder / "tokenizer.model").read_bytes()})
    for text in TEXTS:
        tokens = own.encode(text)
        ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        # Some models trim spaces. transformers keeps spaces; a leading space is one token there.
        is_lossless = own.change(text, tokens) is None and not text.startswith(" ")
        if ids != tokens and is_lossless and SPACE not in text:
            raise ValueError(
                f"SentencePiece and transformers encode a text differently ({folder}: {text!a} "
                f"gives {tokens} and {ids}). fix: set tokenizer_class, add_bos_token and "
                "add_prefix_space in tokenizer_config.json"
            )
    return theirs


def special_ids(folder: Path, tokenizer) -> dict:
    """Return a folder's generation_config.json with the ids of BOS, EOS and padding that we use.

    EOS is read from generation_config.json or else config.json, as in generate() of transformers,
    or else from the tokenizer. BOS is the token that the tokenizer prepends, or else an EOS.
    Padding is read from the tokenizer, or else from the same files. Raises ValueError if EOS is
    missing or not in the vocabulary.
    """
    generation_config = read_optional(folder / "generation_config.json")
    configs = (generation_config, read_optional(folder / "config.json"))
    num_tokens = 1 + max(tokenizer.get_vocab().values(), default=-1)
    eos_ids = first_ids(configs, "eos_token_id") or existing(tokenizer.eos_token_id)
    if not eos_ids or max(eos_ids) >= num_tokens:
        raise ValueError(
            f"no EOS in the vocabulary (EOS {eos_ids}, {num_tokens} tokens). fix: set eos_token_id "
            f"in {folder / 'generation_config.json'} to the id of the token that ends a text"
        )
    # Without a BOS that is prepended, an EOS separates documents: the model's BOS if it is an EOS.
    model_bos = first_ids(configs, "bos_token_id") or existing(tokenizer.bos_token_id)
    separators = [token for token in model_bos if token in eos_ids]
    pad = existing(tokenizer.pad_token_id) or first_ids(configs, "pad_token_id")
    return generation_config | {
        "bos_token_id": [*tokenizer("")["input_ids"], *separators, *eos_ids][0],
        "eos_token_id": eos_ids,
        "pad_token_id": pad[0] if pad and pad[0] < num_tokens else None,
    }


def read_optional(file: Path) -> dict:
    return read_json(file) if file.exists() else {}


def first_ids(configs: tuple[dict, ...], key: str) -> list[int]:
    """Return the ids under a key of the first config that has any."""
    for config in configs:
        ids = existing(config.get(key))
        if ids:
            return ids
    return []


def existing(ids: int | list[int] | None) -> list[int]:
    """Return ids as a list, without null and -1, which stand for a token that does not exist."""
    if not isinstance(ids, list):
        ids = [ids]
    return [token for token in ids if token is not None and token >= 0]


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
