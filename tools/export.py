"""Take a model away, to transformers, vLLM or llama.cpp:

python -m tools.export --run runs/NAME --format hf --out FOLDER
python -m tools.export --run runs/NAME --format gguf --dtype q8_0 --out FOLDER
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch import Tensor

from checkpoints import checkpoint, gguf
from checkpoints.huggingface import folder, mapping
from checkpoints.weights import weight_map
from common import errors
from common.cli import Parser
from data.tokenizer import IdTokenizer, Tokenizer

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A {kind} of {millions:.1f} million parameters ({shape}), trained with attend.

{figures}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{folder}"), AutoTokenizer.from_pretrained("{folder}")
start = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**start, max_new_tokens=100)[0]))
```

A text begins with {bos} and ends with {eos}. The settings it was trained with:

```json
{settings}
```
"""


def arguments() -> argparse.Namespace:
    hint = "the class is chosen from what the model is"
    parser = Parser("python -m tools.export", description=__doc__.partition(":")[0], epilog=hint)
    parser.add_argument(
        "--run",
        type=Path,
        help="a run, or a folder in Hugging Face layout (default: the newest run)",
    )
    parser.add_argument("--format", choices=("hf", "gguf"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=(*folder.DTYPES, "q8_0"),
        default="f32",
        help="of weights; q8_0 is gguf's alone",
    )
    given = parser.parse_args()
    if given.format == "hf" and given.dtype not in folder.DTYPES:
        parser.error(f"--dtype {given.dtype} is for --format gguf")
    return given


def main(given: argparse.Namespace) -> None:
    with errors.user_input():
        place = checkpoint.find_model(given.run)
        if given.out.is_symlink() or (
            given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir()))
        ):
            raise ValueError(f"there is something already (--out {given.out}). fix: a new folder")
        settings, tokenizer = (
            checkpoint.load_config(place),
            Tokenizer.load(checkpoint.tokenizer_path(place)),
        )
        if isinstance(tokenizer, IdTokenizer):
            raise ValueError(
                f"its tokens have no text ({place}). fix: train with data.tokenizer=FILE"
            )
        config = mapping.to_hf_config(settings["model"])
        config |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        vocabulary = ModelProto.FromString(tokenizer.proto)
        spec, kinds = vocabulary.trainer_spec, {piece.type for piece in vocabulary.pieces}
        if (
            spec.model_type != spec.BPE
            or not spec.byte_fallback
            or ModelProto.SentencePiece.USER_DEFINED in kinds
        ):
            raise ValueError(
                f"only byte pairs, and bytes, are exported ({place}). fix: a tokenizer without symbols"
            )
        if given.format == "gguf":
            gguf.check_exportable(config)
        model = checkpoint.load_model(place, "cpu")
        made = given.out.with_name(f".tmp-{given.out.name}")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    weights = tensors(model, config["architectures"][0].removesuffix("ForCausalLM"))
    to = gguf if given.format == "gguf" else folder
    to.write(made, config, weights, vocabulary, given.dtype)
    if given.format == "hf":
        (made / "tokenizer.model").write_bytes(tokenizer.proto)
        (made / "README.md").write_text(card(given.out, place, settings, config, model, vocabulary))
    made.replace(given.out)
    print(f"{config['architectures'][0]}, {given.dtype}: {given.out}")


def tensors(model: torch.nn.Module, name: str) -> dict[str, Tensor]:
    """The weights of a model under the names and in the layouts of a class of `transformers`."""
    ours, names = model.state_dict(), weight_map(model, name)
    return {
        theirs: stored.join([ours[each] for each in stored.names])
        for theirs, stored in names.items()
    }


def card(
    out: Path,
    place: Path,
    settings: dict,
    config: dict,
    model: torch.nn.Module,
    vocabulary: ModelProto,
) -> str:
    figures, run = "Its training is not known: it came from elsewhere.", place.resolve().parents[1]
    is_run, metrics = (place / "manifest.json").exists(), run / "metrics.jsonl"
    if is_run and metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        last = {key: value for line in lines for key, value in line.items()}
        names = ("step", "tokens", "seconds", "train_loss", "val_loss", "val_bpb")
        rows = [f"| {name} | {last[name]:,.6g} |" for name in names if last.get(name) is not None]
        figures = "\n".join(["| | |", "|---|---|", *rows])
    shape = ", ".join(
        f"{key} {settings['model'][key]}" for key in ("dim", "depth", "heads", "hidden", "context")
    )
    return CARD.format(
        folder=out.name,
        name=run.name if is_run else place.resolve().name,
        kind=config["architectures"][0],
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        shape=shape,
        figures=figures,
        bos=vocabulary.pieces[config["bos_token_id"]].piece,
        eos=vocabulary.pieces[config["eos_token_id"]].piece,
        settings=json.dumps(settings, indent=1),
    )


if __name__ == "__main__":
    with errors.report_errors():
        main(arguments())
