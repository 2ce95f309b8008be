"""What is taken away is the same model elsewhere, and what comes back is what went."""

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from data.tokenizer import Tokenizer
from run import checkpoint
from tests.conftest import (
    DATASETS,
    STORIES,
    VARIANTS,
    YARN,
    assert_greedy,
    close,
    continued,
    saved,
    stories,
    tree_of,
)

NASTY = (
    "", " ", " a", "  two  spaces  ", "\ttab\t\t", "\n\nlines\r\n", "emoji 😀👩‍👩‍👧", "NUL\0!", "Привет, мир", "</s>",
    "a<s> </s>b", "<unk><0x41>", "trailing  ", "0123 45", "e\u0301 \u00a0\u200b ﬁ½", "had a red ball. " * 9,
    "if x:\n    return '</s>'\n",
)  # fmt: skip
MORE = (
    "llama model.tied=true attention.bias=true", f"llama {YARN}", "sliding_window attention.qk_norm=null",
    "mla attention.query_rank=24 attention.bias=true", "gated attention.rope_fraction=0.5",
)  # fmt: skip
EXPORTED = (
    "chunked", "delta", "differential", "gated", "gqa", "l2norm", "llama", "local_global", "mha", "mla", "mqa", "nope",
    "sink", "sliding_window",
)  # fmt: skip
NONE = {
    "softcap": "(softcap=50.0; the nearest class is LlamaForCausalLM). fix: train anew with attention.softcap=null",
    "shared_kv": "with attention=gqa", "value_residual": "with attention=gqa", "gqa model.softcap=30.0": "softcap=null",
    "chunked attention.kinds.full.qk_norm=after_rope": "attention.qk_norm=null",
    "sink attention.rope_base=null": "attention.sink=False", "gqa attention.rope_fraction=0.5": ".rope_fraction=1.0",
    "delta attention.kinds.full.gated=false": "gated=True", "mla model.norm_eps=0.001": "norm_eps=1e-6",
    "local_global attention.kinds.full.rope_base=1000000.0": "layers of different rope_base",
    "local_global attention.kinds.full.rope_scaling={_target_:model.rope.Linear,factor:4}": "different rope_scaling",
    "delta attention.pattern=[delta]": "a layer of softmax",
    "alibi": "with attention=gqa", "retention": "with attention=gqa", "mla ffn=relu2": "with ffn=swiglu",
    "gqa ffn=relu2": "with attention.qk_norm=null", "differential norm=layernorm": "with norm=rmsnorm",
}  # fmt: skip


@pytest.mark.parametrize("variant", [*EXPORTED, *MORE])
def test_transformers_and_we_again_read_what_is_exported(variant, command, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = saved(tmp_path / "run", tree_of(*variant.split(), "model.depth=4"), tokenizer)
    for source, out in (("run", "there"), ("there", "again")):
        result = command("tools/export_hf.py", "--run", source, "--format", "hf", "--out", out)
        assert result.code == 0, result.err
    theirs = AutoModelForCausalLM.from_pretrained("there", dtype=torch.float32).eval()
    tokens = torch.randint(
        tokenizer.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    theirs.generation_config.eos_token_id = None
    greedy = theirs.generate(tokens[:1, :9], max_new_tokens=40, do_sample=False)[0, 9:].tolist()
    prompt = tokens[0, :9].tolist()
    assert_greedy(ours, prompt, continued(ours, [prompt], 40, rows=1)[0], greedy)
    fast = AutoTokenizer.from_pretrained("there")
    for text in NASTY:
        ids = [tokenizer.bos, *tokenizer.encode(text)]
        assert fast(text)["input_ids"] == ids, text
        assert fast.decode(ids, skip_special_tokens=True) == text
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer.model"):
        assert Path("there", name).read_bytes() == Path("again", name).read_bytes()
    back = checkpoint.load_model(Path("again"), "cpu").state_dict()
    for (
        name,
        weight,
    ) in ours.state_dict().items():  # of norms that are stored less 1, the last bit may go
        close(back[name], weight, atol=1e-7 if "norm" in name else 0, rtol=0)


OTHERS = [variant for variant in VARIANTS if variant not in (*EXPORTED, *NONE)]


@pytest.mark.parametrize("variant", OTHERS)
def test_another_attention_is_exported_as_it_is_or_refused(variant, command, tokenizer, tmp_path):
    ours = saved(tmp_path / "run", tree_of(variant), tokenizer)
    for kind in ("hf", "gguf"):
        result = command("tools/export_hf.py", "--run", "run", "--format", kind, "--out", kind)
        if result.code != 0:
            assert result.code == 2 and result.err.count("\n") == 1
            assert result.err.startswith("error: ") and result.err.count("fix: ") == 1
            assert not list(tmp_path.glob(f"*{kind}*"))
        elif kind == "hf":
            from transformers import AutoModelForCausalLM

            theirs = AutoModelForCausalLM.from_pretrained(kind, dtype=torch.float32).eval()
            tokens = torch.randint(tokenizer.vocab_size, (2, 40))
            with torch.no_grad():
                close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)

    # what needs no class works
    Path("text.txt").write_text("Ann had a red ball.")
    assert command("tools/evaluate.py", "--run", "run", "--text", "text.txt").code == 0
    words = ("Ann", "--run", "run", "--max-new-tokens", "3", "--compile", "false")
    assert command("generate.py", *words).code == 0


@pytest.mark.parametrize("variant", NONE)
def test_a_model_without_a_class_is_refused_with_the_nearest(variant, command, tokenizer, tmp_path):
    saved(tmp_path / "run", tree_of(*variant.split()), tokenizer)
    result = command("tools/export_hf.py", "--run", "run", "--format", "hf", "--out", "there")
    assert result.code == 2 and result.err.count("\n") == 1
    assert NONE[variant] in result.err and result.err.count("fix: ") == 1
    assert not list(tmp_path.glob("*there*"))


def sentencepiece(**how) -> Tokenizer:
    """As SentencePiece trains by default, with bytes: it normalizes, joins spaces and puts one before a text."""
    written, texts = (
        io.BytesIO(),
        ["Ann had a red ball. Bob said: may I have a red ball, Ann?", "Тест e\u0301"] * 20,
    )
    usual = {
        "model_type": "bpe",
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    how = (
        {"sentence_iterator": iter(texts), "model_writer": written, "vocab_size": 350} | usual | how
    )
    SentencePieceTrainer.train(**how)
    return Tokenizer(written.getvalue())


@pytest.mark.parametrize("source", ["trained", "signs", pytest.param("llama2c", marks=stories)])
def test_a_tokenizer_that_changes_its_text_is_the_same_elsewhere(source, command, tmp_path):
    from transformers import AutoTokenizer

    place, texts = STORIES, [*NASTY]
    if source != "llama2c":
        made, place = ModelProto.FromString(sentencepiece().proto), tmp_path / "run"
        for piece in (
            ("<", "/", ">", "</", "s>") if source == "signs" else ()
        ):  # which make </s> of a text
            made.pieces.add(piece=piece, score=-float(len(made.pieces)))
        saved(place, tree_of("gqa"), Tokenizer(made.SerializeToString()))
    else:
        texts += (DATASETS / "wikitext-2" / "wiki.valid.raw").read_text().splitlines()[:300]
    assert (
        command("tools/export_hf.py", "--run", str(place), "--format", "hf", "--out", "there").code
        == 0
    )
    fast, ours = AutoTokenizer.from_pretrained("there"), Tokenizer.load("there/tokenizer.model")
    for text in texts:
        assert fast(text)["input_ids"] == [ours.bos, *ours.encode(text)], text
        assert fast.decode(fast(text)["input_ids"], skip_special_tokens=True) == ours.decode(
            ours.encode(text)
        )


def test_what_cannot_be_written_or_told_is_refused(command, trained):
    words = ("tools/export_hf.py", "--run", str(trained), "--format", "hf", "--out")
    Path("file").write_text("")
    for where in (str(trained), "file", "file/there"):
        result = command(*words, where)
        assert result.code == 2 and result.err.count("\n") == 1 and "fix: " in result.err, (
            result.err
        )
    assert command(*words, "there", "--dtype", "q8_0").code == 2
    Path("there").mkdir()
    assert command(*words, "there", "--dtype", "bf16").code == 0  # an empty folder will do
    assert {weight.dtype for weight in load_file("there/model.safetensors").values()} == {
        torch.bfloat16
    }
    card = Path("there/README.md").read_text()
    assert "| val_bpb | " in card and "Qwen3ForCausalLM" in card


@pytest.mark.parametrize(
    "how",
    [{"model_type": "unigram"}, {"byte_fallback": False}, {"user_defined_symbols": ["<sep>"]}],
)
def test_a_tokenizer_that_would_be_another_is_refused(how, command, tmp_path):
    saved(tmp_path / "run", tree_of("gqa"), sentencepiece(**how))
    for kind in ("hf", "gguf"):
        result = command("tools/export_hf.py", "--run", "run", "--format", kind, "--out", "there")
        assert result.code == 2 and "only byte pairs" in result.err and not Path("there").exists()
