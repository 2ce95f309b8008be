"""GGUF files hold the model, and llama.cpp makes the same text of it."""

import shutil
from pathlib import Path

import pytest
import torch

from data.tokenizer import Tokenizer
from tests.conftest import YARN, assert_greedy, close, continued, saved, tree_of
from tests.tools.test_export import NASTY

RUN = (
    "llama", "llama model.tied=true attention.bias=true", "gqa", "mqa", "mla", "mla attention.query_rank=24",
    "nope model.depth=4", "sink", "sink attention.window=5", "delta", f"llama {YARN}", f"gqa {YARN}",
    "llama attention.rope_scaling={_target_:model.rope.Linear,factor:4}",
    "llama attention.rope_scaling={_target_:model.rope.Llama3,factor:8,low:1,high:4,context:16}",
)  # fmt: skip
REFUSED = (
    "local_global",
    "chunked",
    "differential",
    "gated",
    "nope model.depth=5",
    "gqa attention.bias=true",
    "sink attention.bias=true",
    "llama ffn=geglu",
    "llama ffn=relu2",
    "llama norm=layernorm",
)


@pytest.fixture
def exported(command, tokenizer, tmp_path):
    """Makes a model and its file -> the model, and where the file is."""

    def make(variant: str, dtype: str = "f32") -> tuple[torch.nn.Module, Path]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.rmtree("there", ignore_errors=True)
        model = saved(tmp_path / "run", tree_of(*variant.split()), tokenizer)
        result = command(
            "tools/export_hf.py",
            "--run",
            "run",
            "--format",
            "gguf",
            "--dtype",
            dtype,
            "--out",
            "there",
        )
        assert result.code == 0, result.err
        return model, Path("there", f"model-{dtype}.gguf")

    return make


@pytest.mark.parametrize("variant", RUN)
def test_llama_cpp_makes_the_same_text(variant, exported, tokenizer: Tokenizer):
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="to see it: pip install llama-cpp-python (it is compiled)"
    )
    model, file = exported(variant)
    prompt = [tokenizer.bos, *tokenizer.encode("Ann had a red")]
    theirs = llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, verbose=False)
    steps = theirs.generate(prompt, temp=0.0, repeat_penalty=1.0)
    assert_greedy(
        model, prompt, continued(model, [prompt], 40, rows=1)[0], [next(steps) for _ in range(40)]
    )
    for text in NASTY[1:]:  # it has no tokens for no text
        assert theirs.tokenize(text.encode(), add_bos=True) == [
            tokenizer.bos,
            *tokenizer.encode(text),
        ]
    theirs.close()


@pytest.mark.parametrize(
    ("dtype", "error"), [("f32", 0), ("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 2e-2)]
)
def test_a_file_holds_the_weights(dtype, error, exported):
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    model, file = exported("gqa", dtype)
    held = {each.name: each for each in GGUFReader(file).tensors}
    names = {
        "embed.weight": "token_embd.weight",
        "head.weight": "output.weight",
        "norm.weight": "output_norm.weight",
    }
    names |= {"blocks.1.attention.k_norm.weight": "blk.1.attn_k_norm.weight"}
    names |= {"blocks.1.ffn.down_proj.weight": "blk.1.ffn_down.weight"}
    weights = model.state_dict()
    assert len(held) == len(weights)
    for ours, theirs in names.items():
        kind = "F32" if weights[ours].ndim == 1 else dtype.upper()
        assert held[theirs].tensor_type == GGMLQuantizationType[kind]
        found = torch.from_numpy(dequantize(held[theirs].data, held[theirs].tensor_type).copy())
        close(found, weights[ours], atol=error, rtol=error)


def test_rows_that_turn_together_lie_together(exported):
    """In llama's queries and keys, and in the rotary parts of MLA's; as the loops of llama.cpp turn them."""
    from gguf import GGUFReader

    def tensors(file: Path) -> dict[str, torch.Tensor]:
        reader = GGUFReader(file)
        assert reader.fields["tokenizer.ggml.add_bos_token"].contents() is True
        return {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}

    model, file = exported("llama")
    theirs, ours = tensors(file)["blk.1.attn_k.weight"], model.blocks[1].attention.k_proj.weight
    for head in (0, 16):
        for pair in range(8):
            assert torch.equal(theirs[head + 2 * pair], ours[head + pair])
            assert torch.equal(theirs[head + 2 * pair + 1], ours[head + pair + 8])
    model, file = exported("mla")
    theirs, attention = tensors(file), model.blocks[1].attention
    for pair in range(4):
        for place, row in ((2 * pair, pair), (2 * pair + 1, pair + 4)):
            assert torch.equal(
                theirs["blk.1.attn_kv_a_mqa.weight"][32 + place], attention.rope_proj.weight[row]
            )
            assert torch.equal(
                theirs["blk.1.attn_q.weight"][24 + 16 + place],
                attention.q_proj.weight[24 + 16 + row],
            )
    both = attention.kv_proj.weight.view(4, 16 + 24, 32)
    assert torch.equal(theirs["blk.1.attn_k_b.weight"], both[:, :16].transpose(1, 2))
    assert torch.equal(theirs["blk.1.attn_v_b.weight"], both[:, 16:])


def test_scaling_of_llama3_is_a_divisor_for_each_frequency(exported):
    from gguf import GGUFReader
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = "{_target_:model.rope.Llama3,factor:8,low:1,high:4,context:16}"
    _, file = exported(f"llama attention.rope_scaling={scaling}")
    (divisors,) = [each for each in GGUFReader(file).tensors if each.name == "rope_freqs.weight"]
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    frequency, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    close(10000.0 ** -(torch.arange(8) / 8) / frequency, torch.from_numpy(divisors.data.copy()))


@pytest.mark.parametrize("variant", REFUSED)
def test_what_llama_cpp_cannot_run_is_refused(variant, command, tokenizer, tmp_path):
    saved(tmp_path / "run", tree_of(*variant.split()), tokenizer)
    result = command("tools/export_hf.py", "--run", "run", "--format", "gguf", "--out", "there")
    assert (
        result.code == 2
        and "GGUF files are not written" in result.err
        and result.err.count("\n") == 1
    )
    assert not Path("there").exists()
