"""An exported model gives the same results in transformers, and importing it again restores it."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.tokenizer import Tokenizer
from run import checkpoint
from run.checkpoint import load_model
from tests.conftest import VARIANTS, assert_greedy, close, continued, saved, tree_of
from tests.tools.families import NASTY, sentence_pieces
from tests.tools.test_parity import CLASSES
from tools.export_hf import describe_misreadings
from tools.formats import architectures
from tools.formats.hf_config import IMPORTED, choose_architecture, to_hf_config

EXPORT = "tools/export_hf.py"


@pytest.mark.parametrize(
    ("variant", "option"),
    [
        ("softcap", "attention.softcap=50.0"),
        ("shared_kv", "SharedAttention"),
        ("gqa model.softcap=30.0", "softcap=30"),
        ("llama4 attention.kinds.full.qk_norm=after_rope", "attention.qk_norm=after_rope"),
        ("sink", "attention.qk_norm=null"),
        ("local_global attention.kinds.full.rope_base=1e6", "layers with different rope_base"),
        ("gdn attention.pattern=[recurrent]", "models without softmax attention"),
        ("kda model.tied=true", "tied=True"),
        ("gqa ffn=none", "ffn=model.layers.no_feed_forward"),
        ("differential norm=layernorm", "norm=model.layers.LayerNorm"),
        ("llama attention.rope_scaling={_target_:model.rope.Scaling,factor:4}", "Scaling"),
    ],
)
def test_a_model_without_a_transformers_class_is_refused(variant, option):
    with pytest.raises(ValueError) as error:
        to_hf_config(tree_of(*variant.split()))
    assert option in str(error.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_preset_is_exported_or_refused_with_a_fix(variant):
    try:
        to_hf_config(tree_of(variant))
    except ValueError as error:
        assert variant not in CLASSES and str(error).count(". fix: ") == 1


def test_an_option_that_no_class_supports_is_refused_unless_it_is_off():
    gqa = tree_of("gqa")
    for off in (False, None):
        gqa["attention"]["v_norm"] = off
        assert choose_architecture(gqa, [gqa["attention"]]) == "Qwen3ForCausalLM"
    gqa["attention"]["v_norm"] = True
    with pytest.raises(ValueError, match=r"attention\.v_norm=True"):
        choose_architecture(gqa, [gqa["attention"]])


@pytest.mark.parametrize(
    "variant",
    [
        "llama model.tied=true attention.bias=true",
        "gdn",
        *[
            pytest.param(variant, marks=pytest.mark.long)
            for variant in ("gqa", "llama4", "kda", "mla", "gpt_oss")
        ],
    ],
)
def test_an_export_gives_the_same_results_in_transformers(variant, command, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = saved(tmp_path / "run", tree_of(*variant.split(), "model.depth=4"), tokenizer)
    command(EXPORT, "--run", "run", "--out", "there").succeeded()
    theirs = AutoModelForCausalLM.from_pretrained("there", dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(tokenizer.vocab_size, (2, 40), generator=draw)
    with torch.no_grad():
        close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    theirs.generation_config.eos_token_id = None
    greedy = theirs.generate(tokens[:1, :9], max_new_tokens=40, do_sample=False)[0, 9:].tolist()
    prompt = tokens[0, :9].tolist()
    assert_greedy(ours, prompt, continued(ours, [prompt], 40, rows=1)[0], greedy)
    fast = AutoTokenizer.from_pretrained("there")
    for text in NASTY:
        # A special token's text is encoded as the token in prompts, but as plain text in documents.
        assert fast(text)["input_ids"] == tokenizer.encode_prompt(text), text
        ids = [tokenizer.bos, *tokenizer.encode(text)]
        assert fast(text, split_special_tokens=True)["input_ids"] == ids, text
        assert fast.decode(ids, skip_special_tokens=True) == text
    # Fine-tuning programs append the text of EOS, and leave padding out of the loss.
    ids = theirs.config.eos_token_id
    assert fast("a ball" + fast.eos_token)["input_ids"][-1] == ids[0]
    assert fast.pad_token_id == theirs.config.pad_token_id == fast.unk_token_id not in ids

    # Importing the export restores the model and its tokenizer.
    if type(theirs).__name__ in IMPORTED:
        command("tools/import_hf.py", "there", "--out", "again").succeeded()
        place = checkpoint.find_model("again")
        close(load_model(place, "cpu").state_dict(), ours.state_dict(), atol=0, rtol=0)
        again = Tokenizer.load(place / "tokenizer.json")
        assert again.starts_with_bos and again.eos_ids == tokenizer.eos_ids
        for text in NASTY:
            assert again.encode_prompt(text) == tokenizer.encode_prompt(text), text


@pytest.mark.parametrize(
    ("variant", "programs"),
    [
        ("gqa", ""),
        ("sliding_window", "mlx-lm, llama.cpp and ctranslate2"),
        ("llama ffn=geglu", "mlx-lm, llama.cpp and ctranslate2"),
        ("gqa attention.bias=true", "vLLM"),
    ],
)
def test_programs_that_misread_an_export_are_named(variant, programs):
    """As measured in docs/formats.md."""
    config = to_hf_config(tree_of(*variant.split(), "model.depth=4"))
    named = " ".join(describe_misreadings(config, ["tokenizer.json"]))
    assert programs in named and bool(named) == bool(programs)


def test_an_export_checks_its_folder_and_uses_the_requested_dtype(command, tokenizer, tmp_path):
    tree = tree_of("sliding_window")
    model = saved(tmp_path / "run", tree, tokenizer)
    with torch.no_grad():
        model.norm.weight[3] = 1e5  # larger than any fp16 number
    trees = {"model": tree | {"vocab_size": tokenizer.vocab_size}}
    checkpoint.save(tmp_path / "large", 1, model.state_dict(), trees, tokenizer.files, {})
    words = (EXPORT, "--run", "large", "--out")
    Path("file").write_text("", encoding="utf-8")
    for where in ("run", "file", "file/there"):
        result = command(*words, where)
        assert result.code == 2 and result.err.count("\n") == 1 and where in result.err
    result = command(*words, "there", "--dtype", "f16")
    assert result.code == 2 and "norm.weight" in result.err and not Path("there").exists()
    with torch.no_grad():
        model.norm.weight[3] = 1.0
        model.embed.weight *= 1e-7  # smaller than most fp16 numbers
    checkpoint.save(tmp_path / "small", 1, model.state_dict(), trees, tokenizer.files, {})
    result = command(EXPORT, "--run", "small", "--out", "there", "--dtype", "f16")
    assert result.code == 2 and "embed.weight" in result.err and not Path("there").exists()

    Path("there").mkdir()  # an empty folder is accepted
    result = command(*words, "there", "--dtype", "bf16").succeeded()
    assert result.err.startswith("warning: ") and result.err.count("\n") == 1
    dtypes = {weight.dtype for weight in load_file("there/model.safetensors").values()}
    assert dtypes == {torch.bfloat16}


def test_a_full_disk_leaves_no_folder(drawn_run, command):
    run = str(drawn_run)
    command(EXPORT, "--run", run, "--out", "there").succeeded()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words in ((EXPORT, "--run", run), ("tools/import_hf.py", "there")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        try:
            result = command(*words, "--out", "full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert result.code == 74 and not Path("full").exists()


@pytest.mark.parametrize(
    ("options", "is_exported"),
    [
        ({"bos_id": -1}, True),
        ({"model_type": "unigram"}, False),
        ({"normalization_rule_name": "nmt_nfkc"}, False),
    ],
)
def test_a_tokenizer_is_exported_unchanged_or_refused(options, is_exported, command, tmp_path):
    from transformers import AutoTokenizer

    sentence = "Ann had a red ball. Bob said: may I have a red ball, Ann?"
    tokenizer = sentence_pieces([sentence] * 20, **{"vocab_size": 300} | options)
    saved(tmp_path / "run", tree_of("gqa"), tokenizer)
    result = command(EXPORT, "--run", "run", "--out", "there")
    assert (result.code, Path("there").exists()) == ((0, True) if is_exported else (2, False))
    if not is_exported:
        return
    theirs = AutoTokenizer.from_pretrained("there")
    for text in NASTY:
        assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text), text
    # EOS takes the place of BOS.
    config = json.loads(Path("there/tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["bos_token"], config["eos_token"]) == ("</s>", "</s>")


def test_an_export_that_transformers_computes_differently_is_removed(
    command, tokenizer, tmp_path, monkeypatch
):
    saved(tmp_path / "run", tree_of("llama4"), tokenizer)
    monkeypatch.setattr(architectures, "interleave", lambda weight, _: weight)
    result = command(EXPORT, "--run", "run", "--out", "there")
    assert result.code == 3 and not Path("there").exists(), result.err
