"""Take a model away, to transformers, vLLM or llama.cpp:

python -m tools.export --run runs/NAME --format hf --out FOLDER
python -m tools.export --run runs/NAME --format gguf --dtype q8_0 --out FOLDER
"""

import argparse
import base64
import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch import Tensor

from data.tokenizer import SPACE
from generate import Parser
from training import checkpoint, errors, folder, huggingface
from training.weights import layout

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A {kind} of {millions:.1f} million parameters ({shape}), trained with attend.

{figures}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
start = tokenizer("Once", return_tensors="pt")
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
    parser.add_argument("--run", type=Path, help="a run, or a folder in Hugging Face layout (default: the newest run)")
    parser.add_argument("--format", choices=("hf", "gguf"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--dtype", choices=(*DTYPES, "q8_0"), default="f32", help="of weights; q8_0 is gguf's alone")
    given = parser.parse_args()
    if given.format == "hf" and given.dtype not in DTYPES:
        parser.error(f"--dtype {given.dtype} is for --format gguf")
    return given


def main(given: argparse.Namespace) -> None:
    with errors.input_problems():
        place = checkpoint.newest(given.run or folder.newest_run(Path("runs")))
        if place is None:
            raise ValueError(
                f"no model (--run {given.run}). fix: a folder with checkpoints/step-*, or with config.json"
            )
        if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
            raise ValueError(f"there is something already (--out {given.out}). fix: a new folder")
        settings, vocabulary = checkpoint.config_of(place), ModelProto()
        vocabulary.ParseFromString(checkpoint.tokenizer_of(place).read_bytes())
        config = huggingface.config_of(settings["model"]) | ids_of(vocabulary)
        if given.format == "gguf":
            from tools import to_gguf

            to_gguf.check(config)
        model = checkpoint.load_model(place, "cpu")
        weights = tensors(model, huggingface.class_of(settings["model"]))
        made = given.out.with_name(f".tmp-{given.out.name}")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        if given.format == "gguf":
            to_gguf.write(made / f"model-{given.dtype}.gguf", config, weights, vocabulary, given.dtype)
        else:
            write(made, config, {name: w.to(DTYPES[given.dtype]) for name, w in weights.items()}, vocabulary)
            shutil.copy(checkpoint.tokenizer_of(place), made / "tokenizer.model")
            (made / "README.md").write_text(card(place, settings, config, model, vocabulary))
        if given.out.exists():
            given.out.rmdir()
        made.rename(given.out)
    print(f"{config['architectures'][0]}, {given.dtype}: {given.out}")


def ids_of(vocabulary: ModelProto) -> dict[str, int]:
    return {"bos_token_id": vocabulary.trainer_spec.bos_id, "eos_token_id": vocabulary.trainer_spec.eos_id}


def tensors(model: torch.nn.Module, name: str) -> dict[str, Tensor]:
    """The weights of a model under the names and in the layouts of a class of `transformers`."""
    ours, names = model.state_dict(), layout(model, name)
    return {theirs: stored.join([ours[each] for each in stored.names]) for theirs, stored in names.items()}


def write(place: Path, config: dict, weights: dict[str, Tensor], vocabulary: ModelProto) -> None:
    """What `from_pretrained` reads."""
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    save_torch_state_dict(weights, place, metadata={"format": "pt"})
    for file in place.glob("*.safetensors"):
        file.chmod(0o644)  # others may read it, as all else here
    pieces = [piece.piece for piece in vocabulary.pieces]
    bos, eos = config["bos_token_id"], config["eos_token_id"]
    special = {"bos_token": pieces[bos], "eos_token": pieces[eos], "unk_token": pieces[vocabulary.trainer_spec.unk_id]}
    reading = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}  # signs in a text are text
    files = {
        "config.json": config | {"torch_dtype": dtype, "pad_token_id": None},
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **special, **reading},
        "tokenizer.json": fast(vocabulary, special),
    }
    files["tokenizer_config.json"]["model_max_length"] = config["max_position_embeddings"]
    for name, content in files.items():
        (place / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))


def fast(vocabulary: ModelProto, special: dict[str, str]) -> dict:
    """A byte-pair SentencePiece model as tokenizer.json (huggingface.co/docs/tokenizers). Raises ValueError for others.

    Pieces that merge into the same one are merged in the order of their ids.
    """
    normal, how = vocabulary.trainer_spec, vocabulary.normalizer_spec
    if normal.model_type != normal.BPE or normal.treat_whitespace_as_suffix or not normal.byte_fallback:
        raise ValueError("only byte-pair tokenizers with bytes are exported (tokenizer.model). fix: --format gguf")
    ids = {piece.piece: number for number, piece in enumerate(vocabulary.pieces)}
    merged = {piece.piece for piece in vocabulary.pieces if piece.type == piece.NORMAL}
    merges = []
    for piece in sorted(merged, key=lambda piece: (-vocabulary.pieces[ids[piece]].score, ids[piece])):
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        cuts = [cut for cut in cuts if merged.issuperset(cut)]
        merges += sorted(cuts, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    steps = []
    if how.precompiled_charsmap:
        charsmap = base64.b64encode(how.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if how.remove_extra_whitespaces:
        for spaces, content in (("^ +| +$", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": spaces}, "content": content})
    if how.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": " "})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    back = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    back += [{"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if how.add_dummy_prefix else []
    bos, text = {"SpecialToken": {"id": special["bos_token"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    other = [{"Sequence": {"id": "B", "type_id": 1}}]
    known = {"id": special["bos_token"], "ids": [ids[special["bos_token"]]], "tokens": [special["bos_token"]]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": ids[sign], "content": sign, **flags} for sign in sorted(special.values(), key=ids.get)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, *other],
            "special_tokens": {special["bos_token"]: known},
        },
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "BPE",
            "unk_token": special["unk_token"],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [list(cut) for cut in merges],
        },
    }


def card(place: Path, settings: dict, config: dict, model: torch.nn.Module, vocabulary: ModelProto) -> str:
    figures, run = "Its training is not known: it came from elsewhere.", place.resolve().parents[1]
    is_run, metrics = (place / "manifest.json").exists(), run / "metrics.jsonl"
    if is_run and metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        last = {key: value for line in lines for key, value in line.items()}
        names = ("step", "tokens", "seconds", "train_loss", "val_loss", "val_bpb")
        rows = [f"| {name} | {last[name]:,.6g} |" for name in names if last.get(name) is not None]
        figures = "\n".join(["| | |", "|---|---|", *rows])
    shape = ", ".join(f"{key} {settings['model'][key]}" for key in ("dim", "depth", "heads", "hidden", "context"))
    return CARD.format(
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
    with errors.one_line():
        main(arguments())
