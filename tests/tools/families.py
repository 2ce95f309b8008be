"""Small random models in the layout of published models, and tokenizers of the same kinds.

Each config.json has the published entries, but small sizes. Each tokenizer.json is trained with the
pre-tokenizer and special tokens of its family.
"""

import io
import json
from pathlib import Path

import sentencepiece
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from data.tokenizer import SentencePieceTokenizer

# Texts that tokenizers treat differently.
NASTY = (
    "", " ", " a", "  two  spaces  ", "\ttab\t\t", "\n\nlines\r\n", "emoji 😀👩‍👩‍👧", "NUL\0!", "Привет, мир", "</s>",
    "a<s> </s>b", "<unk><0x41>", "trailing  ", "0123 45", "e\u0301 \u00a0\u200b ﬁ½", "had a red ball. " * 9,
    "if x:\n    return '</s>'\n",
)  # fmt: skip
# The pre-tokenizer pattern of Llama 3 and Qwen, which group digits differently.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Entries of all families, with small sizes.
SHARED = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 640,  # more than the tokenizer's vocabulary
}
LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
}
# The other published entries. BOS and EOS depend on the vocabulary, so they are set below.
CONFIGS = {
    "SmolLM2-135M": {
        **LLAMA,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
    },
    "Llama-3.2-1B": {
        **LLAMA,
        "head_dim": 32,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 512,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "max_window_layers": 24,
        "sliding_window": 32768,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 32,
        "max_window_layers": 28,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3",
        "attention_bias": False,
        "layer_types": ["full_attention"] * 2,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 0],
        "pad_token_id": 0,  # published: 128004
        "pretraining_tp": 2,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
SMOLLM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_2 = ["<unk>", "<s>", "</s>"]
# Special tokens in the order of their ids, BOS in config.json, and all EOS tokens.
SPECIAL = {
    "SmolLM2-135M": (SMOLLM, "<|endoftext|>", ["<|endoftext|>"]),
    "Llama-3.2-1B": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        ["<|end_of_text|>"],
    ),
    "Qwen2.5-0.5B": (SMOLLM, "<|endoftext|>", ["<|endoftext|>"]),
    "Qwen3-0.6B": (SMOLLM, "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
    "TinyLlama-1.1B": (LLAMA_2, "<s>", ["</s>"]),
    "Mistral-7B-v0.3": ([*LLAMA_2, "[INST]", "[/INST]"], "<s>", ["</s>"]),
    "SmolLM3-3B": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
        None,
        ["<|im_end|>", "<|end_of_text|>"],
    ),
}
# Families whose post-processor prepends BOS to a text.
TEMPLATES = ("Llama-3.2-1B", "TinyLlama-1.1B", "Mistral-7B-v0.3")


def make_folder(folder: Path, family: str, texts: list[str], **save: object) -> None:
    """Save a model of a family; `save` contains arguments of save_pretrained()."""
    import transformers

    folder.mkdir(parents=True)
    write_tokenizer(folder, family, texts)
    tokens, bos, eos = SPECIAL[family]
    ids = [tokens.index(token) for token in eos]
    config = SHARED | CONFIGS[family] | {"num_hidden_layers": 2}
    config["bos_token_id"] = None if bos is None else tokens.index(bos)
    config["eos_token_id"] = ids[0]
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder, **save)
    # Write the config as published, not as this version of transformers saves it.
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ids}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def write_tokenizer(folder: Path, family: str, texts: list[str]) -> None:
    """Train a tokenizer.json and write its tokenizer_config.json."""
    special, bos, eos = SPECIAL[family]
    if family in ("TinyLlama-1.1B", "Mistral-7B-v0.3"):
        tokenizer = sentencepiece_like(family)
        alphabet = []
        special = [*special, *[f"<0x{byte:02X}>" for byte in range(256)]]
    else:
        tokenizer = byte_level(family)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if family in TEMPLATES:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, special.index(bos))]
        )
        if family == "Llama-3.2-1B":
            template = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        tokenizer.post_processor = template
    content = json.loads(tokenizer.to_str())
    # Bytes are normal tokens of the model, not special tokens.
    content["added_tokens"] = [
        token for token in content["added_tokens"] if not token["content"].startswith("<0x")
    ]
    content["model"]["ignore_merges"] = family == "Llama-3.2-1B"
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos if family in (*TEMPLATES, "SmolLM2-135M") else None,
        "eos_token": eos[0],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def byte_level(family: str) -> Tokenizer:
    """Byte-level BPE, as in GPT-2 and later models."""
    tokenizer = Tokenizer(models.BPE())
    if family == "SmolLM2-135M":
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        digits = 1 if family.startswith("Qwen") else 3
        steps = [
            pre_tokenizers.Split(Regex(PATTERN % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if family.startswith("Qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_like(family: str) -> Tokenizer:
    """Character-level BPE with byte fallback, as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if family == "TinyLlama-1.1B":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def sentence_pieces(texts: list[str], **options: object) -> SentencePieceTokenizer:
    """Train a SentencePiece model that can be exported, unless `options` say otherwise."""
    model = io.BytesIO()
    defaults = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **defaults | options,
    )
    return SentencePieceTokenizer({"tokenizer.model": model.getvalue()})
