"""A model as a folder that `transformers` and vLLM load."""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch import Tensor

from checkpoints.tokenizer_json import tokenizer_json

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def write(
    place: Path, config: dict, weights: dict[str, Tensor], vocabulary: ModelProto, dtype: str
) -> None:
    save_torch_state_dict(
        {name: w.to(DTYPES[dtype]) for name, w in weights.items()}, place, metadata={"format": "pt"}
    )
    for file in place.glob("*.safetensors"):
        file.chmod(0o644)  # others may read it, as all else here
    pieces, (bos, eos) = (
        [piece.piece for piece in vocabulary.pieces],
        (config["bos_token_id"], config["eos_token_id"]),
    )
    special = {
        "bos_token": pieces[bos],
        "eos_token": pieces[eos],
        "unk_token": pieces[vocabulary.trainer_spec.unk_id],
    }
    reading = {
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }  # signs in a text are text
    reading["model_max_length"] = config["max_position_embeddings"]
    of_torch = str(DTYPES[dtype]).removeprefix("torch.")
    files = {
        "config.json": config | {"torch_dtype": of_torch, "pad_token_id": None},
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            **reading,
        },
        "tokenizer.json": tokenizer_json(vocabulary, special),
    }
    for name, content in files.items():
        (place / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))
