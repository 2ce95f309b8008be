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
from sentencepiece.sentencepiece_model_pb2 import TrainerSpec
from torch import Tensor

from data.tokenizer import (
    IdTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    tokenizer_file,
)
from run import checkpoint, errors
from run.checkpoint import load_model
from run.cli import Parser, add_run_option, user_path
from run.errors import IntegrityError
from run.progress import print0
from tools.formats.hf_config import to_hf_config
from tools.formats.verify import (
    LOCAL,
    example_row,
    import_transformers,
    load_theirs,
    logits_differ,
    malformed,
    tokenizers_differ,
)
from tools.formats.weights import hf_weights

# Model types in which vLLM silently ignores some or all biases.
DROP_BIASES = ("qwen3", "deepseek_v3", "qwen3_5_text")
# Programs that silently ignore the windows of an export (docs/formats.md), by model type.
DROP_WINDOWS = {
    "qwen3": "mlx-lm, llama.cpp and ctranslate2",
    "mistral": "mlx-lm and llama.cpp",
    "smollm3": "llama.cpp",
}
READ_SWIGLU = "mlx-lm, llama.cpp and ctranslate2"  # read any feed-forward layer as SwiGLU
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.export_hf", __doc__)
    add_run_option(parser)
    add = parser.add_argument
    add("--out", type=user_path, required=True, metavar="FOLDER", help="new or empty output folder")
    add("--dtype", choices=DTYPES, default="f32", help="dtype of the weights")
    return parser.parse_args()


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Create the output folder, and remove it if the body of the `with` statement fails.

    Exits with code 2 if --out is a link, a file or a nonempty folder, or cannot be created.
    """
    with errors.exit_on_invalid_input():
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


def check_finite(weights: dict[str, Tensor], source: Path) -> None:
    """Exit with code 4 if a weight is not finite."""
    for name, weight in weights.items():
        if not weight.float().isfinite().all():
            errors.exit_with(errors.DIVERGED, f"weights contain NaN or infinity ({source}: {name})")


def main(args: argparse.Namespace) -> None:
    with new_folder(args.out):
        architecture, misreadings = export(args)
    if misreadings:
        print0(
            "warning: some programs silently misread this model: "
            f"{'; '.join(misreadings)}. fix: use a program, or an option of it, for which "
            "docs/formats.md reports the same outputs"
        )
    print(
        f"written: {architecture}, {args.dtype}: {args.out}. To use it: "
        f'transformers.AutoModelForCausalLM.from_pretrained("{args.out}")'
    )


@torch.no_grad()
def export(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Write a model's files; return the name of its class, and how some programs misread it.

    transformers loads the files to verify them. Raises IntegrityError if its logits differ from
    ours. Exits with code 2 if its tokenizer does, or if the model cannot be exported.
    """
    # Check the model and the arguments before a file is written.
    with errors.exit_on_invalid_input():
        library = import_transformers()
        path = checkpoint.find_model(args.run)
        tokenizer = Tokenizer.load(tokenizer_file(path))
        files = tokenizer_files(tokenizer, path)
        tree = checkpoint.load_model_config(path)
        config = to_hf_config(tree)
        model = load_model(path, "cpu")
        check_finite(model.state_dict(), path)

        # Round the weights, so that the written model can be compared with this one.
        dtype = DTYPES[args.dtype]
        for name, parameter in model.named_parameters():
            rounded = parameter.to(dtype).float()
            change = (rounded - parameter).double().norm(dim=-1)
            if not (change <= 0.01 * parameter.double().norm(dim=-1)).all():
                raise ValueError(
                    f"{args.dtype} cannot represent these weights ({name}). fix: --dtype f32"
                )
            parameter.data = rounded

    config |= {"torch_dtype": str(dtype).removeprefix("torch."), **special_ids(tokenizer)}
    (architecture,) = config["architectures"]
    weights = hf_weights(model, architecture)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    checkpoint.write_weights(args.out / "model.safetensors", weights)
    for name, content in files.items():
        (args.out / name).write_bytes(content)
    # This file is written last: without it, no library accepts the folder as a model.
    (args.out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    # Compare the folder with the model, one model in memory at a time.
    with errors.exit_on_invalid_input(), malformed("cannot export this tokenizer"):
        theirs = library.AutoTokenizer.from_pretrained(args.out, **LOCAL)
        difference = tokenizers_differ(tokenizer, theirs)
        if difference is not None:
            fix = "train with a tokenizer.json that tools.import_hf wrote"
            raise ValueError(f"the exported tokenizer differs ({difference}). fix: {fix}")
    tokens = example_row(tree)
    logits = model(tokens)
    del model, weights
    difference = logits_differ(logits, load_theirs(args.out)(tokens).logits)
    if difference is not None:
        raise IntegrityError(
            f"attend and transformers {library.__version__} compute different logits "
            f"({architecture}: {difference}). fix: pip install -r requirements-dev.txt"
        )
    return architecture, describe_misreadings(config, files)


def describe_misreadings(config: dict, files: Collection[str]) -> list[str]:
    """Describe how programs silently misread an export with this config.json and these files."""
    misreadings = []
    model_type = config["model_type"]
    has_window = "sliding_attention" in config.get("layer_types", []) or (
        model_type == "mistral" and config["sliding_window"] is not None
    )
    if has_window and model_type in DROP_WINDOWS:
        misreadings.append(f"its windows are ignored by {DROP_WINDOWS[model_type]}")
    if config["attention_bias"] and model_type in DROP_BIASES:
        misreadings.append("vLLM ignores some or all of its biases")
    if config["hidden_act"] != "silu":
        misreadings.append(f"{READ_SWIGLU} read its feed-forward layers as SwiGLU")
    if model_type == "qwen3" and "tokenizer.model" in files:
        misreadings.append("llama.cpp prepends a space to prompts without --override-kv")
    return misreadings


def special_ids(tokenizer: Tokenizer) -> dict[str, int | list[int] | None]:
    """Return the ids of BOS, EOS and padding for config.json.

    Padding is the imported tokenizer's padding token, if it has one, or <unk> of SentencePiece: our
    own tokenizers encode unknown characters as bytes instead. EOS cannot be used: training programs
    leave padding out of the loss, so the model would not learn to stop.
    """
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": list(tokenizer.eos_ids)}
    if isinstance(tokenizer, SentencePieceTokenizer):
        return ids | {"pad_token_id": tokenizer.processor.unk_id()}
    return ids | {"pad_token_id": generation_config_of(tokenizer).get("pad_token_id")}


def generation_config_of(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.files["generation_config.json"])


def tokenizer_files(tokenizer: Tokenizer, path: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer, by name, in the format that `transformers` reads.

    Raises ValueError for a model without a tokenizer, and for a SentencePiece model without BPE.
    """
    if isinstance(tokenizer, IdTokenizer):
        raise ValueError(
            f"this model has no tokenizer for its token ids ({path}). fix: train on text, or on "
            "tokens with data.tokenizer=FILE"
        )
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.files
    if tokenizer.model.trainer_spec.model_type != TrainerSpec.BPE:
        raise ValueError(
            "cannot export this tokenizer: transformers splits long texts differently "
            f"({path}: not a BPE model). fix: train with a BPE tokenizer, or a tokenizer.json "
            "that tools.import_hf wrote"
        )
    bos = tokenizer.processor.bos_id()
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": tokenizer.starts_with_bos,
        "add_prefix_space": tokenizer.model.normalizer_spec.add_dummy_prefix,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokenizer.piece(bos if bos >= 0 else tokenizer.bos),
        "eos_token": tokenizer.piece(tokenizer.eos),
        "unk_token": tokenizer.piece(tokenizer.processor.unk_id()),
        "pad_token": tokenizer.piece(tokenizer.processor.unk_id()),
    }
    return tokenizer.files | {"tokenizer_config.json": json.dumps(config, indent=1).encode()}


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
