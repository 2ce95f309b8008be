"""A model as a folder that `transformers` and vLLM load."""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from tools.formats.tokenizer_json import tokenizer_json
from tools.formats.weights import Weights

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def write(
    folder: Path, config: dict, weights: Weights, tokenizer_files: dict[str, bytes], dtype: str
) -> None:
    """Write weights, config.json and the tokenizer's files."""
    converted = {name: weight.to(DTYPES[dtype]) for name, weight in weights.items()}
    save_torch_state_dict(converted, folder, metadata={"format": "pt"})
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # the library lets only the owner read them

    config |= {"torch_dtype": str(DTYPES[dtype]).removeprefix("torch."), "pad_token_id": None}
    files = tokenizer_files | {"config.json": as_json(config)}
    for name, content in files.items():
        (folder / name).write_bytes(content)


def sentencepiece_files(proto: bytes, vocabulary: ModelProto, config: dict) -> dict[str, bytes]:
    """A SentencePiece tokenizer as files of `transformers`; `config` has the BOS and EOS ids."""
    bos = config["bos_token_id"]
    eos = config["eos_token_id"]
    special = {
        "bos_token": vocabulary.pieces[bos].piece,
        "eos_token": vocabulary.pieces[eos].piece,
        "unk_token": vocabulary.pieces[vocabulary.trainer_spec.unk_id].piece,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "split_special_tokens": True,  # </s> in a text is text
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    return {
        "tokenizer.model": proto,
        "tokenizer.json": as_json(tokenizer_json(vocabulary, special)),
        "tokenizer_config.json": as_json(tokenizer_config),
        "generation_config.json": as_json({"bos_token_id": bos, "eos_token_id": eos}),
    }


def as_json(content: dict) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode()
