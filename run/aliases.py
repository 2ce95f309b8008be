"""Translate keys and values of nanoGPT, nanochat, litgpt and transformers into our overrides.

Other programs' keys are refused, because some have different units; the error names our override.
"""

import math
import re
from collections.abc import Collection
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from run.errors import as_typed, suggest

# Our overrides, and other programs' keys with the same meaning, given as the whole key or its last
# part. {value} is the user's value; the other fields are FORMULAS applied to it. The inputs of a
# formula (first the context, then the batch) are listed before it.
OVERRIDES = {
    # The network.
    "attention={value}": "variant variants attentions attn attn_type attention_type attention_variant "
    "attention_variants",
    "context={value}": "block_size max_seq_len max_seq_length seq_len seq_length sequence_len "
    "sequence_length max_length model_max_length context_length ctx_len n_ctx n_positions "
    "max_position_embeddings",
    "model.depth={value}": "n_layer n_layers num_layers num_hidden_layers layers layer",
    "model.dim={value}": "n_embd n_embed hidden_size d_model embed_dim emb_dim model_dim",
    "model.heads={value}": "n_head n_heads num_heads num_attention_heads nhead",
    "model.hidden={value}": "intermediate_size n_inner ffn_dim d_ff ffn_hidden_size "
    "mlp_hidden_size",
    "model.tied={value}": "tie_word_embeddings tie_embeddings tie_weights weight_tying",
    "model.norm_eps={value}": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_eps",
    "model.softcap={value}": "final_logit_softcapping logit_softcap",
    "attention.kv_heads={value}": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads "
    "n_query_groups",
    "attention.head_dim={value}": "head_size d_head",
    "attention.rope_base={value}": "rope_theta rope_freq_base",
    "attention.rope_fraction={value}": "partial_rotary_factor rotary_percentage rotary_pct",
    "attention.window={value}": "sliding_window sliding_window_size window_size",
    "attention.softcap={value}": "attn_logit_softcapping",
    "attention.dropout={value}": "dropout attention_dropout attn_dropout attn_pdrop",
    "attention.bias={value}": "bias attention_bias qkv_bias add_qkv_bias",
    "ffn.activation={value}": "hidden_act hidden_activation activation_function act_fn",
    # The batch size and the length of the run.
    "batch_tokens={value}": "total_batch_size tokens_per_batch tokens_per_step",
    "batch_tokens={batch_tokens}": "batch_size train_batch_size per_device_train_batch_size "
    "per_gpu_train_batch_size global_batch_size bsz",
    "micro_batch={value}": "device_batch_size micro_batch_size microbatch_size",
    "micro_batch={micro_batch}": "gradient_accumulation_steps gradient_accumulation_iters "
    "grad_accumulation_steps grad_accum_steps accumulate_grad_batches",
    "steps={value} max_minutes=null": "max_iters max_steps num_iterations num_steps train_steps "
    "num_train_steps total_steps n_steps iterations iters",
    "steps={steps} max_minutes=null": "max_tokens total_tokens num_tokens train_tokens "
    "token_budget",
    "max_epochs={value} max_minutes=null": "num_train_epochs num_epochs n_epochs epochs epoch",
    "tokens_per_parameter={value} max_minutes=null": "target_param_data_ratio param_data_ratio",
    # The optimizer. Other programs apply one unscaled rate to all parameters: docs/rates.md.
    "optimizer={value}": "optim optimizer_type optimizer_name",
    "optimizer=adamw optimizer.lr={rate} optimizer.reference=null": "lr learning_rate max_lr peak_lr "
    "base_lr",
    "optimizer.lr={matrix_rate}": "matrix_lr muon_lr",
    "optimizer.reference.embedding={multiple}": "embedding_lr",
    "optimizer.reference.head={multiple}": "unembedding_lr head_lr",
    "optimizer.reference.vectors={multiple}": "scalar_lr vector_lr",
    "optimizer.weight_decay={value}": "weight_decay wd",
    "optimizer.betas=[{value},{beta2}]": "beta1 adam_beta1",
    "optimizer.betas=[{beta1},{value}]": "beta2 adam_beta2",
    "clip={value}": "grad_clip max_grad_norm max_norm gradient_clip_val grad_clip_norm "
    "clip_grad_norm",
    "schedule={value}": "lr_scheduler_type lr_scheduler lr_schedule",
    "schedule.warmup={value}": "warmup_iters warmup_steps lr_warmup_steps lr_warmup_iters "
    "num_warmup_steps",
    "schedule.warmup={warmup}": "warmup_ratio",
    "schedule.cooldown={value}": "warmdown_ratio cooldown_fraction decay_fraction",
    "schedule.floor={value}": "final_lr_frac min_lr_ratio",
    "schedule.floor={floor}": "min_lr",
    # The machine.
    "precision={value}": "dtype torch_dtype mixed_precision",
    "precision=bf16": "bf16 bfloat16",
    "precision=fp16": "fp16 float16",
    "device={value}": "device_type accelerator device_map",
    "compile={value}": "torch_compile",
    "activation_checkpointing={value}": "gradient_checkpointing grad_checkpointing "
    "activation_checkpoint",
    "sharded=true": "fsdp",
    # Logs, evaluations and checkpoints, and their intervals.
    "eval_every={value}": "eval_interval eval_steps eval_freq val_interval val_check_interval",
    "eval_tokens={eval_tokens}": "eval_iters eval_batches",
    "log_every={value}": "log_interval logging_steps log_freq",
    "save_every={value}": "save_interval save_steps save_freq checkpoint_interval",
    "sample_every={value}": "sample_interval",
    "run_dir={value}": "out_dir output_dir save_dir",
    "run_dir={value} resume=true": "resume_from_checkpoint resume_from",
    "resume=true": "auto_resume",
    "name={value}": "run_name exp_name experiment_name job_name wandb_run_name",
    "wandb=online": "wandb_log use_wandb",
    "wandb={value}": "report_to",
    # The data and the weights.
    "data={value}": "dataset dataset_name",
    "data=text data.path={value}": "data_dir data_path train_file train_files train_data data_file "
    "data_files dataset_path dataset_dir text_file text_files glob files data.file data.dir "
    "data.folder data.paths",
    "data=tokens data.path={value}": "train_bin input_bin",
    "data.vocab_size={value}": "vocab_size padded_vocab_size",
    "data.tokenizer={value}": "tokenizer_path tokenizer_dir tokenizer_name tokenizer_name_or_path",
    "init_from={value}": "init_checkpoint model_name_or_path initial_checkpoint_dir load_from",
    "seed={value}": "random_seed rng_seed manual_seed",
    "seed={seeds}": "seeds num_seeds n_seeds",
}
FORMULAS = {
    "batch_tokens": "sequences x context x accumulation",
    "micro_batch": "batch_tokens / context / accumulation",
    "steps": "tokens / batch_tokens",
    "eval_tokens": "batches x batch_tokens",
    "warmup": "ratio x steps",
    "floor": "final rate / peak rate",
    "rate": "AdamW with this rate for all parameters, as in other programs; the default optimizer "
    "scales its rates to your run, and optimizer.lr is its rate at dim 128 (docs/rates.md)",
    "matrix_rate": "the rate at dim 128, which is scaled to your run (docs/rates.md)",
    "multiple": "its rate / optimizer.lr, scaled like optimizer.lr (docs/rates.md)",
    "seeds": "a list of seeds, one run each",
}

# Other programs' keys that have no equivalent here, grouped by the reason.
LEFT_OUT = {
    "the last two checkpoints are kept": "always_save_checkpoint save_total_limit save_strategy",
    "evaluation runs every eval_every steps": "eval_strategy evaluation_strategy do_eval",
    "the rate decays until the last step": "decay_lr lr_decay_iters lr_decay_steps",
    "chosen automatically for the machine": "backend ddp_backend attn_implementation "
    "use_flash_attention flash_attention num_workers dataloader_num_workers pin_memory fused "
    "local_rank",
    "the wandb project is always named attend": "wandb_project",
    "python -m tools.evaluate evaluates a run": "eval_only",
    "a new run never overwrites another": "overwrite_output_dir",
    "train.py always trains": "do_train",
}

# Other programs' spellings of values of our keys.
PLAIN = {
    "yes": "true",
    "y": "true",
    "on": "true",
    "1": "true",
    "no": "false",
    "n": "false",
    "off": "false",
    "0": "false",
    "none": "null",
}
OFF = ("0", "0.0", "-1", "false", "no", "off")
VALUES = {
    "precision": {
        "bfloat16": "bf16",
        "torch.bfloat16": "bf16",
        "bf16-true": "bf16",
        "bf16-mixed": "bf16",
        "float16": "fp16",
        "torch.float16": "fp16",
        "half": "fp16",
        "16": "fp16",
        "16-true": "fp16",
        "16-mixed": "fp16",
        "float32": "fp32",
        "torch.float32": "fp32",
        "float": "fp32",
        "32": "fp32",
        "32-true": "fp32",
        "no": "fp32",
    },
    "device": {"gpu": "auto"},
    "clip": {"0": "null", "0.0": "null"},
    "steps": {"-1": "null"},
    "wandb": {"true": "online", "false": "disabled", "null": "disabled", "wandb": "online"},
    "ffn.activation": {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "swish": "silu"},
    "optimizer": {"adam": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    "schedule": {"linear": "wsd", "constant": "wsd", "warmup_stable_decay": "wsd"},
    "data": {
        "shakespeare": "tinyshakespeare",
        "shakespeare_char": "tinyshakespeare",
        "tiny_shakespeare": "tinyshakespeare",
        "wikitext-103": "wikitext",
        "roneneldan/tinystories": "tinystories",
    },
    "run_dir": {"true": "null"},
}

# Our keys that limit the length of a run; max_minutes=5 would end it earlier.
LENGTHS = ("steps", "max_epochs", "tokens_per_parameter")
# Suffixes of numbers, and the number of minutes in each unit of time.
MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
POWERS_OF_TWO = {"k": 2**10, "m": 2**20}  # for a context of 4k and a batch of 0.5M
MINUTES = {"s": 1 / 60, "sec": 1 / 60, "m": 1, "min": 1, "h": 60, "d": 1440}

TEMPLATES = {key: template for template, keys in OVERRIDES.items() for key in keys.split()}
REASONS = {key: reason for reason, keys in LEFT_OUT.items() for key in keys.split()}


def last_part(key: str) -> str:
    """Return the part of a key after its last dot, such as max_steps of train.max_steps."""
    return key.rpartition(".")[2]


def translate(
    foreign: dict[str, str], given: dict[str, str], typed: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Translate keys of other programs into our overrides; return these as a dict, and remarks.

    `foreign` maps keys in TEMPLATES or REASONS to their values. `given` maps our own keys, which
    the formulas need, to their values; `typed` contains the keys that the user has set.
    """
    values = {word_of(key): value for key, value in foreign.items()}
    given = given | values
    fixes = {}
    remarks = []
    for word in [word for word in TEMPLATES if word in values]:
        template = TEMPLATES[word]
        # With Muon, the user's rate does not apply to all parameters.
        if "{rate}" in template and given.get("optimizer") == "muon":
            template = "optimizer.lr={matrix_rate}"
        value = our_value("", values[word])
        # A key whose template does not use the value is a switch.
        if "{" not in template and value in ("false", "0", "null"):
            remarks.append(f"leave {word} out")
            continue
        if "{multiple}" in template and given.get("optimizer.reference") == "null":
            remarks.append(f"leave {word} out: optimizer.reference=null sets one rate for all")
            continue
        fields = {"value": value, "beta1": beta(given, 0), "beta2": beta(given, 1)}
        formula = formula_of(template)
        if formula is not None:
            fields[formula] = convert(formula, value, given)
            if fields[formula] is None:
                key = next(text for text in template.split() if f"{{{formula}}}" in text)
                key = key.partition("=")[0]
                remarks.append(f"replace {word} with {key}, which is {FORMULAS[formula]}")
                continue
            remark = FORMULAS[formula].format(value=values[word])
            remarks.append(f"{word}: {remark}")
        for override in template.split():
            key, _, text = override.partition("=")
            # Keep the optimizer and the time limit that the user has set.
            if key in typed and key in ("optimizer", "max_minutes") and "{" not in text:
                continue
            fixes[key] = our_value(key, text.format_map(fields))
            given[key] = fixes[key]
    for word in [word for word in REASONS if word in values]:
        remarks.append(f"leave {word} out: {REASONS[word]}")
    return fixes, remarks


def formula_of(template: str) -> str | None:
    """Return the formula in FORMULAS that a template uses; None if no conversion is needed."""
    for formula in FORMULAS:
        if f"{{{formula}}}" in template:
            return formula
    return None


def convert(formula: str, value: str, given: dict[str, str]) -> str | None:
    """Apply one of FORMULAS to a value or to each value of a sweep; None if one is not a number."""
    if formula in ("rate", "matrix_rate"):
        return value
    if formula == "seeds":
        if value.isdecimal() and int(value) > 1:  # the number of seeds
            return ",".join(str(seed) for seed in range(int(value)))
        return value.strip("[]")
    results = []
    for part in value.split(","):
        try:
            results.append(compute(formula, float(part), given))
        except (ArithmeticError, KeyError, ValueError):
            return None
    return ",".join(results)


def compute(formula: str, number: float, given: dict[str, str]) -> str:
    """Apply a formula to the user's number. Raises ValueError if a key that it needs is null."""
    if formula == "warmup":
        return f"{number * float(given['steps']):.0f}"
    if formula in ("floor", "multiple"):
        return f"{number / float(given['optimizer.lr']):.3g}"
    if formula == "batch_tokens":
        accumulation = 1.0
        for word in OVERRIDES["micro_batch={micro_batch}"].split():
            accumulation = float(given.get(word, accumulation))
        return f"{number * accumulation * float(given['context']):.0f}"
    batch_tokens = float(given["batch_tokens"])
    if formula == "micro_batch":
        sequences = batch_tokens / float(given["context"])
        return f"{max(1, sequences // number):.0f}"
    if formula == "eval_tokens":
        return f"{number * batch_tokens:.0f}"
    assert formula == "steps"
    return f"{math.ceil(number / batch_tokens)}"


def beta(given: dict[str, str], index: int) -> str:
    """Return the first or second beta, from another program's key or from optimizer.betas."""
    for name in (f"beta{index + 1}", f"adam_beta{index + 1}"):
        if name in given:
            return given[name]
    return given.get("optimizer.betas", "[0.9,0.95]").strip("[]").split(",")[index].strip()


def our_value(key: str, value: str) -> str:
    """Return our spelling of a value for one of our keys."""
    lowered = value.lower()
    if lowered in ("true", "false", "none"):
        value = PLAIN.get(lowered, lowered)
    return VALUES.get(key, {}).get(value.lower(), value)


def meant_number(key: str, value: Any) -> str | None:
    """Expand a number's suffix, as in 10k, or 2h for a key in minutes; None for other values."""
    match = re.fullmatch(r"(\d+\.?\d*) *([a-z]+)", str(value).lower())
    units = {"max_minutes": MINUTES, "context": POWERS_OF_TWO, "batch_tokens": POWERS_OF_TWO}
    units = units.get(key, MULTIPLES)
    if match is None or match[2] not in units:
        return None
    return f"{float(match[1]) * units[match[2]]:.10g}"


def nearest_value(key: str, value: Any, annotation: Any) -> str | None:
    """Return the named value of a type that the user probably meant; None if none is close."""
    known = named_values(annotation)
    typed = as_typed(value).lower()
    if "null" in known and typed in OFF:
        return "null"
    for meaning in (VALUES.get(key, {}).get(typed), PLAIN.get(typed), typed.partition(":")[0]):
        if meaning in known:
            return meaning
    return suggest(typed, known)


def named_values(annotation: Any) -> list[str]:
    """Return the named values of a type: true and false, null, and the values of a Literal."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is NoneType:
        return ["null"]
    if get_origin(annotation) is Literal:
        return [as_typed(value) for value in get_args(annotation)]
    values = []
    for part in get_args(annotation):
        values += named_values(part)
    return values


def word_of(key: str) -> str:
    """Return the key, or its last part, whichever TEMPLATES or REASONS lists."""
    return key if key in TEMPLATES else last_part(key)


def is_foreign(key: str) -> bool:
    return word_of(key) in TEMPLATES or word_of(key) in REASONS
