"""An exported model gives the same results in transformers, and importing it again restores it."""

import io
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceTrainer

from data.tokenizer import SentencePieceTokenizer, Tokenizer
from run import checkpoint
from run.checkpoint import load_model
from tests.conftest import VARIANTS, assert_greedy, close, continued, saved, tree_of
from tools.export_hf import describe_misreadings
from tools.formats import architectures
from tools.formats.architectures import ARCHITECTURES
from tools.formats.hf_config import IMPORTED, choose_architecture, to_hf_config

NASTY = (
    "", " ", " a", "  two  spaces  ", "\ttab\t\t", "\n\nlines\r\n", "emoji 😀👩‍👩‍👧", "NUL\0!", "Привет, мир", "</s>",
    "a<s> </s>b", "<unk><0x41>", "trailing  ", "0123 45", "e\u0301 \u00a0\u200b ﬁ½", "had a red ball. " * 9,
    "if x:\n    return '</s>'\n",
)  # fmt: skip
# One preset per exported class. The others are in tests/tools/test_parity.py.
EXPORTED = (
    "gqa",
    "llama model.tied=true attention.bias=true",
    "llama4",
    "gdn",
    "kda",
    "mla",
    "gpt_oss",
)
NONE = {
    "softcap": "attention.softcap=50.0",
    "shared_kv": "SharedAttention",
    "gqa model.softcap=30.0": "softcap=30",
    "llama4 attention.kinds.full.qk_norm=after_rope": "attention.qk_norm=after_rope",
    "sink attention.qk_norm=null attention.rope_base=null": "attention.sink=True",
    "sink": "attention.qk_norm=null",
    "nope": "attention.qk_norm=null",
    "chunked": "attention.qk_norm=after_rope",
    "fox": "attention.forgetting.ForgettingAttention",
    "gqa attention.rope_fraction=0.5": "attention.rope_fraction=0.5",
    "gdn attention.kinds.full.gated=false": "attention.gated=False",
    "local_global attention.kinds.full.rope_base=1000000.0": "layers with different rope_base",
    "gdn attention.pattern=[recurrent]": "models without softmax attention",
    "kda model.tied=true": "tied=True",
    "kda attention.kinds.recurrent.low_rank=false": "attention.low_rank=False",
    "mamba2": "attention.erase=False",
    "alibi": "attention.alibi.ALiBi",
    "mla ffn=relu2": "ffn=model.layers.FeedForward",
    "gqa ffn=none": "ffn=model.layers.no_feed_forward",
    "differential norm=layernorm": "norm=model.layers.LayerNorm",
}


@pytest.mark.parametrize("variant", EXPORTED)
def test_an_export_can_be_loaded_by_transformers_and_imported_again(
    variant, command, tokenizer, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = saved(tmp_path / "run", tree_of(*variant.split(), "model.depth=4"), tokenizer)
    result = command("tools/export_hf.py", "--run", "run", "--out", "there").succeeded()
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

    # Import it again if the importer supports its class.
    result = command("tools/import_hf.py", "there", "--out", "again")
    if type(theirs).__name__ not in IMPORTED:
        assert result.code == 2 and "unknown architecture" in result.err
        return
    assert result.code == 0, result.err
    place = checkpoint.find_model("again")
    close(load_model(place, "cpu").state_dict(), ours.state_dict(), atol=0, rtol=0)
    again = Tokenizer.load(place / "tokenizer.json")
    assert again.starts_with_bos and again.eos_ids == tokenizer.eos_ids
    for text in NASTY:
        assert again.encode_prompt(text) == tokenizer.encode_prompt(text), text


def test_fine_tuning_programs_can_append_eos_and_pad(command, drawn_run):
    """trl appends the EOS text to each example. If it is not encoded as EOS, models never stop."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command("tools/export_hf.py", "--run", str(drawn_run), "--out", "there").succeeded()
    tokenizer = AutoTokenizer.from_pretrained("there")
    model = AutoModelForCausalLM.from_pretrained("there").eval()
    assert (
        tokenizer("a ball" + tokenizer.eos_token)["input_ids"][-1] == model.config.eos_token_id[0]
    )

    # Padding must not be EOS, because the loss ignores padding, and must not change batch results.
    assert tokenizer.pad_token_id == model.config.pad_token_id == tokenizer.unk_token_id
    alone = tokenizer(["Ann", "Ann had a red ball"], return_tensors=None)["input_ids"]
    batch = tokenizer(
        ["Ann", "Ann had a red ball"],
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_token_type_ids=False,
    )
    made = model.generate(**batch, max_new_tokens=9, do_sample=False, eos_token_id=-1)
    for row, prompt in zip(made, alone, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=-1
        )
        assert row[-9:].tolist() == expected[0, -9:].tolist()


@pytest.mark.parametrize("variant", NONE)
def test_a_model_without_a_transformers_class_is_refused(variant, command, tokenizer, tmp_path):
    saved(tmp_path / "run", tree_of(*variant.split()), tokenizer)
    result = command("tools/export_hf.py", "--run", "run", "--out", "there")
    assert result.code == 2 and result.err.count("\n") == result.err.count("fix: ") == 1
    assert NONE[variant] in result.err and not Path("there").exists()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_preset_is_exported_or_refused(variant):
    """This also applies to new presets."""
    try:
        config = to_hf_config(tree_of(variant))
    except ValueError as error:
        assert str(error).count(". fix: ") == 1
    else:
        assert config["architectures"][0] in ARCHITECTURES


MISREADINGS = {
    "llama": "",
    "gqa": "",
    "sliding_window": "mlx-lm, llama.cpp and ctranslate2 ignore its windows",
    "sliding_window attention.qk_norm=null": "mlx-lm and llama.cpp ignore its windows",
    "llama ffn=geglu": "read its feed-forward as SwiGLU",
    "llama attention.bias=true": "",
    "gqa attention.bias=true": "vLLM",
    "mla attention.bias=true": "vLLM",
    "gated attention.bias=true": "vLLM",
    "gpt_oss": "",
}


@pytest.mark.parametrize("variant", MISREADINGS)
def test_warnings_name_the_programs_that_misread_an_export(variant):
    """As measured in docs/formats.md."""
    config = to_hf_config(tree_of(*variant.split(), "model.depth=4"))
    named = " ".join(describe_misreadings(config, ["tokenizer.json"]))
    assert MISREADINGS[variant] in named and bool(named) == bool(MISREADINGS[variant])
    # If tokenizer.model is the only file, llama.cpp reads it differently.
    named = " ".join(describe_misreadings(config, ["tokenizer.model"]))
    assert ("llama.cpp prepends a space" in named) == (config["model_type"] == "qwen3")


def test_an_export_warns_about_programs_that_misread_it(command, tokenizer):
    for variant, words in (
        ("llama", []),
        ("sliding_window", ["llama.cpp", "its windows", "space"]),
    ):
        saved(Path(variant), tree_of(variant), tokenizer)
        result = command("tools/export_hf.py", "--run", variant, "--out", f"{variant}-out")
        lines = result.succeeded().err.splitlines()
        assert len(lines) == (len(words) > 0)
        assert all(word in lines[0] and "docs/formats.md" in lines[0] for word in words)


def test_an_option_that_no_class_supports_is_refused_unless_it_is_off():
    gqa = tree_of("gqa")
    for off in (False, None):
        gqa["attention"]["v_norm"] = off
        assert choose_architecture(gqa, [gqa["attention"]]) == "Qwen3ForCausalLM"
    gqa["attention"]["v_norm"] = True
    with pytest.raises(ValueError, match=r"attention\.v_norm=True"):
        choose_architecture(gqa, [gqa["attention"]])


def test_an_export_checks_its_folder_and_uses_the_requested_dtype(command, trained):
    words = ("tools/export_hf.py", "--run", str(trained), "--out")
    Path("file").write_text("", encoding="utf-8")
    for where in (str(trained), "file", "file/there"):
        result = command(*words, where)
        assert result.code == 2 and result.err.count("\n") == 1 and where in result.err
    assert command(*words, "there", "--dtype", "q8_0").code == 2
    Path("there").mkdir()
    assert command(*words, "there", "--dtype", "bf16").code == 0  # an empty folder is accepted
    dtypes = {weight.dtype for weight in load_file("there/model.safetensors").values()}
    assert dtypes == {torch.bfloat16}


def test_a_full_disk_leaves_no_folder(drawn_run, command):
    run = str(drawn_run)
    command("tools/export_hf.py", "--run", run, "--out", "there").succeeded()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words in (("tools/export_hf.py", "--run", run), ("tools/import_hf.py", "there")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        try:
            result = command(*words, "--out", "full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert (
            result.code == 74 and "fix: free disk space" in result.err and not Path("full").exists()
        )


def test_an_exported_tokenizer_without_bos_names_eos_in_its_place(command, tmp_path):
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["Ann had a red ball. Bob said: may I have a red ball, Ann?"] * 20),
        model_writer=written,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
        bos_id=-1,
    )
    saved(
        tmp_path / "run",
        tree_of("llama"),
        SentencePieceTokenizer({"tokenizer.model": written.getvalue()}),
    )
    command("tools/export_hf.py", "--run", "run", "--out", "there").succeeded()
    config = json.loads(Path("there/tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["bos_token"], config["eos_token"]) == ("</s>", "</s>")


@pytest.mark.parametrize(
    ("how", "is_exported"),
    [
        ({"model_type": "unigram"}, False),
        ({"byte_fallback": False}, False),
        ({"user_defined_symbols": ["<sep>"]}, True),
        ({"normalization_rule_name": "nmt_nfkc"}, False),
        ({"remove_extra_whitespaces": True}, False),
        ({"add_dummy_prefix": True}, False),
    ],
)
def test_a_tokenizer_is_exported_unchanged_or_refused(how, is_exported, command, tmp_path):
    from transformers import AutoTokenizer

    written = io.BytesIO()
    ours = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(["Ann had a red ball. Bob said: may I have a red ball, Ann?"] * 20),
        model_writer=written,
        vocab_size=300 if how.get("byte_fallback", True) else 30,
        hard_vocab_limit=False,
        minloglevel=2,
        **ours | how,
    )
    tokenizer = SentencePieceTokenizer({"tokenizer.model": written.getvalue()})
    saved(tmp_path / "run", tree_of("gqa"), tokenizer)
    result = command("tools/export_hf.py", "--run", "run", "--out", "there")
    assert (result.code, Path("there").exists()) == ((0, True) if is_exported else (2, False))
    if is_exported:
        theirs = AutoTokenizer.from_pretrained("there")
        for text in (*NASTY, "a<sep>b"):
            assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text), text


def test_weights_that_a_dtype_cannot_hold_are_refused(command, tokenizer, tmp_path):
    model = saved(tmp_path / "run", tree_of("llama"), tokenizer)
    with torch.no_grad():
        model.norm.weight[3] = 1e5
    place = checkpoint.find_model("run")
    state = model.state_dict()
    checkpoint.save(
        tmp_path / "large", 1, state, checkpoint.load_config(place), tokenizer.files, {}
    )
    result = command("tools/export_hf.py", "--run", "large", "--out", "there", "--dtype", "f16")
    assert result.code == 2 and "norm.weight" in result.err and not Path("there").exists()
    command("tools/export_hf.py", "--run", "large", "--out", "there", "--dtype", "bf16").succeeded()


@pytest.mark.parametrize("wrong", ["names", "interleave"])
def test_an_export_that_transformers_computes_differently_is_removed(
    wrong, command, tokenizer, tmp_path, monkeypatch
):
    saved(tmp_path / "run", tree_of("llama4"), tokenizer)
    if wrong == "names":
        names = architectures.Llama4.names | {"attention_norm": "input_norm"}
        monkeypatch.setattr(architectures.Llama4, "names", names)
    else:
        monkeypatch.setattr(architectures, "interleave", lambda weight, _: weight)
    result = command("tools/export_hf.py", "--run", "run", "--out", "there")
    assert result.code == 3 and not Path("there").exists(), result.err
