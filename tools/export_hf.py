"""Convert a trained model for transformers, vLLM or llama.cpp:

python -m tools.export_hf --run runs/NAME --format hf --out FOLDER
python -m tools.export_hf --run runs/NAME --format gguf --dtype q8_0 --out FOLDER
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from data.tokenizer import IdTokenizer, JsonTokenizer, Tokenizer
from run import checkpoint, errors
from run.cli import Parser
from tools.formats import gguf, hf_config, hf_folder
from tools.formats.weights import Weights, is_own_checkpoint, weight_map

MODEL_CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A {architecture} of {millions:.1f} million parameters, trained with attend.

{figures}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0]))
```
"""
FIGURES = ("step", "tokens", "seconds", "train_loss", "val_loss", "val_bpb")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python -m tools.export_hf",
        description=__doc__.partition(":")[0],
        epilog="such as --run runs/NAME --format hf --out FOLDER",
    )
    add = parser.add_argument
    add(
        "--run",
        type=Path,
        help="a run, or a folder in Hugging Face layout (default: the newest run)",
    )
    add("--format", choices=("hf", "gguf"), required=True)
    add("--out", type=Path, required=True, help="a new folder")
    add(
        "--dtype",
        choices=(*hf_folder.DTYPES, "q8_0"),
        default="f32",
        help="of weights; q8_0 is for gguf alone",
    )
    args = parser.parse_args()
    if args.format == "hf" and args.dtype not in hf_folder.DTYPES:
        parser.error(f"--dtype {args.dtype} is for --format gguf")
    return args


def main(args: argparse.Namespace) -> None:
    # All that can be wrong with the model or the arguments is found before anything is written.
    with errors.user_input():
        path = checkpoint.find_model(args.run)
        check_is_new(args.out)
        tree = checkpoint.load_config(path)["model"]
        tokenizer = Tokenizer.load(checkpoint.tokenizer_path(path))
        config = hf_config.to_hf_config(tree)
        config |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        files = tokenizer.files
        if isinstance(tokenizer, JsonTokenizer):
            if args.format == "gguf":
                raise ValueError(
                    f"a tokenizer.json is not written as GGUF ({path}). fix: --format hf"
                )
            config["eos_token_id"] = list(tokenizer.eos_ids)
        else:
            vocabulary = load_vocabulary(tokenizer, path)
            files = hf_folder.sentencepiece_files(tokenizer.proto, vocabulary, config)
        if args.format == "gguf":
            gguf.check_exportable(config)
        model = checkpoint.load_model(path, "cpu")
        staging = args.out.with_name(f".tmp-{args.out.name}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    # The folder gets its name once it is complete.
    architecture = config["architectures"][0]
    weights = hf_weights(model, architecture)
    if args.format == "gguf":
        gguf.write(staging, config, weights, vocabulary, args.dtype)
    else:
        hf_folder.write(staging, config, weights, files, args.dtype)
        (staging / "README.md").write_text(model_card(args.out, path, architecture, model))
    staging.replace(args.out)
    print(f"{architecture}, {args.dtype}: {args.out}")


def check_is_new(out: Path) -> None:
    """Raises ValueError for a path that is there; an empty folder may be."""
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out.is_symlink() or (out.exists() and not is_empty_folder):
        raise ValueError(f"there is something already (--out {out}). fix: --out FOLDER, a new one")


def load_vocabulary(tokenizer: Tokenizer, path: Path) -> ModelProto:
    """The SentencePiece model of a tokenizer.

    Raises ValueError for one that other formats cannot express.
    """
    if isinstance(tokenizer, IdTokenizer):
        raise ValueError(f"its tokens have no text ({path}). fix: train with data.tokenizer=FILE")
    vocabulary = ModelProto.FromString(tokenizer.proto)
    spec = vocabulary.trainer_spec
    kinds = {piece.type for piece in vocabulary.pieces}
    has_symbols = ModelProto.SentencePiece.USER_DEFINED in kinds
    if spec.model_type != spec.BPE or not spec.byte_fallback or has_symbols:
        raise ValueError(
            f"only byte pairs, and bytes, are exported ({path}). fix: a tokenizer without symbols"
        )
    return vocabulary


def hf_weights(model: torch.nn.Module, architecture: str) -> Weights:
    """The weights of a model under the names and in the layouts of a class of `transformers`."""
    parameters = model.state_dict()
    stored = weight_map(model, architecture)
    return {name: tensor.to_file(parameters) for name, tensor in stored.items()}


def model_card(out: Path, path: Path, architecture: str, model: torch.nn.Module) -> str:
    """What the model is, the figures of its training, and how to use it."""
    source = path.resolve()
    if is_own_checkpoint(path):
        source = source.parents[1]
    return MODEL_CARD.format(
        name=source.name,
        architecture=architecture,
        millions=model.num_parameters() / 1e6,
        figures=training_figures(source),
        folder=out.name,
    )


def training_figures(run: Path) -> str:
    """A table with the last value of each figure in metrics.jsonl."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return "Its training is not known."
    metrics = {}
    for line in file.read_text().splitlines():
        metrics |= json.loads(line)
    rows = [f"| {key} | {metrics[key]:,.6g} |" for key in FIGURES if metrics.get(key) is not None]
    return "\n".join(["| | |", "|---|---|", *rows])


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
