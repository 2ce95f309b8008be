"""Export a trained model in the format of transformers and vLLM:

python -m tools.export_hf --run runs/NAME --out FOLDER
python -m tools.export_hf --out FOLDER --dtype bf16
"""

import argparse
import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch import Tensor

from data.tokenizer import IdTokenizer, JsonTokenizer, Tokenizer, tokenizer_file
from run import checkpoint, errors
from run.checkpoint import load_model
from run.cli import Parser, add_run_option, user_path
from run.progress import say
from tools.formats.hf_config import to_hf_config
from tools.formats.special_tokens import ID_ENTRIES, IMPORTED_IDS, TEMPLATES
from tools.formats.weights import hf_weights

# Programs that silently misread an export, as measured in docs/formats.md.
DROP_WINDOWS = {
    "qwen3": "mlx-lm, llama.cpp and ctranslate2",
    "mistral": "mlx-lm and llama.cpp",
    "smollm3": "llama.cpp",
}
READ_SWIGLU = "mlx-lm, llama.cpp and ctranslate2"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.export_hf", __doc__)
    add_run_option(parser)
    add = parser.add_argument
    add("--out", type=user_path, required=True, metavar="FOLDER", help="new folder to write")
    add("--dtype", choices=DTYPES, default="f32", help="dtype of the weights")
    return parser.parse_args()


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Create the output folder, and remove it if the body of the `with` statement fails.

    Exits with code 2 if --out is a link, a file or a nonempty folder.
    """
    with errors.user_input():
        is_empty_folder = out.is_dir() and not any(out.iterdir())
        if out.is_symlink() or (out.exists() and not is_empty_folder):
            raise ValueError(
                f"--out must be a new or empty folder (got {out}). fix: choose a new folder"
            )
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def save_checkpoint(
    out: Path, weights: dict[str, Tensor], tree: dict, tokenizer: Tokenizer, source: Path
) -> None:
    """Write a model and its config as a checkpoint. Exits with code 4 if a weight is not finite."""
    for name, weight in weights.items():
        if not weight.float().isfinite().all():
            errors.exit_with(
                errors.DIVERGED,
                f"weights contain NaN or infinity ({source}: {name}). fix: download the model "
                "again, or use an older checkpoint",
            )
    checkpoint.save(out, 0, weights, {"model": tree}, tokenizer.files, {})


def main(args: argparse.Namespace) -> None:
    with new_folder(args.out):
        architecture, misreadings = export(args)
    if misreadings:
        say(
            "warning: some programs misread this model without an error: "
            f"{'; '.join(misreadings)}. fix: use a program that "
            "docs/formats.md lists as giving the same outputs"
        )
    print(
        f"written: {architecture}, {args.dtype}: {args.out}. To use it: "
        f'transformers.AutoModelForCausalLM.from_pretrained("{args.out}")'
    )


def export(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Write a model's files; return the name of its class and the ways programs misread it."""
    # Find all errors in the model and the arguments before a file is written.
    with errors.user_input():
        path = checkpoint.find_model(args.run)
        tokenizer = Tokenizer.load(tokenizer_file(path))
        files = tokenizer_files(tokenizer, path)
        config = to_hf_config(checkpoint.load_model_config(path))
        model = load_model(path, "cpu")

    dtype = DTYPES[args.dtype]
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), **special_ids(tokenizer)}
    (architecture,) = config["architectures"]
    weights = hf_weights(model, architecture)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    checkpoint.write_weights(args.out / "model.safetensors", weights)
    for name, content in files.items():
        (args.out / name).parent.mkdir(exist_ok=True)
        (args.out / name).write_bytes(content)
    # This file is written last: without it, no library accepts the folder as a model.
    (args.out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return architecture, describe_misreadings(config, files)


def describe_misreadings(config: dict, files: Collection[str]) -> list[str]:
    """Describe how programs silently misread an export with this config.json."""
    misreadings = []
    model_type = config["model_type"]
    has_window = "sliding_attention" in config.get("layer_types", []) or (
        model_type == "mistral" and config["sliding_window"] is not None
    )
    if has_window and model_type in DROP_WINDOWS:
        misreadings.append(f"{DROP_WINDOWS[model_type]} ignore its windows")
    if config["hidden_act"] != "silu":
        misreadings.append(f"{READ_SWIGLU} read its feed-forward as SwiGLU")
    if model_type == "qwen3" and "tokenizer.model" in files:
        misreadings.append("llama.cpp prepends a space to prompts unless overridden")
    return misreadings


def special_ids(tokenizer: Tokenizer) -> dict[str, int | list[int] | None]:
    """Return BOS and EOS ids for config.json, from the imported config.json or our tokenizer."""
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": list(tokenizer.eos_ids)}
    imported = stored_generation_config(tokenizer).get(IMPORTED_IDS)
    if imported is not None:
        # Without an EOS in its configs, the model would not stop generating in transformers.
        config_ids = imported.get("config.json", {})
        generation_ids = imported.get("generation_config.json", {})
        has_eos = {**config_ids, **generation_ids}.get("eos_token_id") is not None
        ids = {"bos_token_id": None, "eos_token_id": None if has_eos else ids["eos_token_id"]}
        ids |= {key: value for key, value in config_ids.items() if value is not None}
    return ids | {"pad_token_id": pad_token_id(tokenizer)}


def stored_generation_config(tokenizer: Tokenizer) -> dict:
    """Return the generation_config.json of a checkpoint."""
    return json.loads(tokenizer.files.get("generation_config.json", "{}"))


def pad_token_id(tokenizer: Tokenizer) -> int | None:
    """Return the padding token: the imported model's padding token, or else SentencePiece's <unk>.

    No text is encoded to <unk>, because unknown characters become bytes. EOS cannot be used:
    training programs leave padding out of the loss, so the model would not learn to stop.
    """
    stored = stored_generation_config(tokenizer)
    if "pad_token_id" in stored or isinstance(tokenizer, JsonTokenizer):
        return stored.get("pad_token_id")
    return tokenizer.processor.unk_id()


def tokenizer_files(tokenizer: Tokenizer, path: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer as `transformers` reads them.

    Raises ValueError for a tokenizer that `transformers` cannot express.
    """
    stored_config = json.loads(tokenizer.files.get("tokenizer_config.json", "{}"))
    if isinstance(tokenizer, JsonTokenizer):
        # Other classes of transformers 5 replace the pre-tokenizer with their own.
        tokenizer_config = stored_config | {"tokenizer_class": "PreTrainedTokenizerFast"}
        return kept_files(tokenizer) | {"tokenizer_config.json": to_bytes(tokenizer_config)}
    if isinstance(tokenizer, IdTokenizer):
        raise ValueError(
            f"this model has no tokenizer for its token ids ({path}). fix: train on text, or on "
            "tokens with data.tokenizer=FILE"
        )
    vocabulary = ModelProto.FromString(tokenizer.files["tokenizer.model"])
    trainer = vocabulary.trainer_spec
    normalizer = vocabulary.normalizer_spec
    is_changing = (
        normalizer.precompiled_charsmap
        or normalizer.remove_extra_whitespaces
        or normalizer.add_dummy_prefix
        or any(piece.type == piece.USER_DEFINED for piece in vocabulary.pieces)
    )
    if trainer.model_type != trainer.BPE or not trainer.byte_fallback or is_changing:
        raise ValueError(
            "cannot export this tokenizer: only byte-fallback BPE that leaves the text unchanged "
            f"can be exported ({path}). fix: use tools.import_hf on a folder that has a "
            "tokenizer.json"
        )
    pieces = vocabulary.pieces
    tokenizer_config = stored_config | {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": tokenizer.starts_with_bos,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    # An imported tokenizer keeps its own names for the special tokens.
    bos = tokenizer.processor.bos_id()
    special_tokens = {
        "bos_token": bos if bos >= 0 else tokenizer.bos,
        "eos_token": tokenizer.processor.eos_id(),
        "unk_token": tokenizer.processor.unk_id(),
        "pad_token": pad_token_id(tokenizer),
    }
    for name, token in special_tokens.items():
        if tokenizer_config.get(name) is None:
            tokenizer_config[name] = pieces[token].piece
    return kept_files(tokenizer) | {"tokenizer_config.json": to_bytes(tokenizer_config)}


def kept_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a tokenizer with the names and entries that transformers knows.

    Raises ValueError for a chat template whose name is not a valid file name.
    """
    files = dict(tokenizer.files)

    # The imported folder may have had no generation_config.json.
    generation_config = stored_generation_config(tokenizer)
    imported = generation_config.pop(IMPORTED_IDS, None)
    if imported is not None:
        del files["generation_config.json"]
        if "generation_config.json" in imported:
            del generation_config["add_bos_token"]
            for key in ID_ENTRIES:
                generation_config.pop(key, None)
            generation_config |= imported["generation_config.json"]
            files["generation_config.json"] = to_bytes(generation_config)

    # transformers keeps additional chat templates in a folder.
    templates = json.loads(files.pop(f"{TEMPLATES}.json", "{}"))
    for name, text in templates.items():
        if Path(name).name != name:
            raise ValueError(
                f"a chat template's name must not be a path ({name}). fix: import the model again"
            )
        files[f"{TEMPLATES}/{name}.jinja"] = text.encode()
    return files


def to_bytes(content: dict) -> bytes:
    return json.dumps(content, indent=1).encode()


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
