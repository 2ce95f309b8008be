"""Models from elsewhere: read as they are, refused where they are not ours."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from run import checkpoint
from run.instantiate import instantiate
from tests.conftest import (
    DATASETS,
    PRECISION,
    STORIES,
    TINY,
    close,
    redraw,
    saved,
    stories,
    tree_of,
)


@pytest.fixture
def there(command, tokenizer, tmp_path) -> Path:
    """A folder in Hugging Face layout."""
    saved(tmp_path / "run", tree_of("llama"), tokenizer)
    assert (
        command("tools/export_hf.py", "--run", "run", "--format", "hf", "--out", "there").code == 0
    )
    return tmp_path / "there"


@stories
@pytest.mark.parametrize("source", ["", "stories260K.bin"])
def test_a_model_of_llama2c_tells_its_reference_story(source, command):
    told = json.loads((STORIES / "reference.json").read_text())
    assert len(told["greedy_ids_from_bos"]) == 200
    result = command(
        "generate.py",
        "",
        "--run",
        str(STORIES / source),
        "--temperature",
        "0",
        "--max-new-tokens",
        "199",
    )
    assert result.code == 0, result.err
    # The two largest logits lie 0.004 apart or more; in fp32 they are off by 0.00002.
    assert result.out == told["greedy_text"] + "\n"


@pytest.mark.parametrize("tied", [True, False])
def test_a_bin_of_llama2c_is_read_as_its_export_writes_it(tied, tokenizer, tmp_path):
    """Seven sizes, then tensor after tensor of all layers; rotary pairs lie side by side."""
    size = tokenizer.vocab_size
    ours = redraw(
        instantiate(tree_of("llama", f"model.tied={tied}") | {"vocab_size": size, "norm_eps": 1e-5})
    ).eval()

    def side_by_side(w: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [
                w[head : head + 16][[i // 2 + 8 * (i % 2) for i in range(16)]]
                for head in range(0, len(w), 16)
            ]
        )

    parts = [ours.embed.weight, *(block.attention_norm.weight for block in ours.blocks)]
    parts += [side_by_side(block.attention.q_proj.weight) for block in ours.blocks]
    parts += [side_by_side(block.attention.k_proj.weight) for block in ours.blocks]
    for name in (
        "attention.v_proj",
        "attention.o_proj",
        "ffn_norm",
        "ffn.gate_proj",
        "ffn.down_proj",
        "ffn.up_proj",
    ):
        parts += [block.get_submodule(name).weight for block in ours.blocks]
    parts += [ours.norm.weight, torch.zeros(64, 16)] + ([] if tied else [ours.head.weight])
    sizes = struct.pack("<7i", 64, 128, 2, 4, 2, size if tied else -size, 64)
    (tmp_path / "model.bin").write_bytes(
        sizes + b"".join(part.detach().numpy().tobytes() for part in parts)
    )
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.proto)
    theirs = checkpoint.load_model(tmp_path / "model.bin", "cpu").state_dict()
    for name, weight in ours.state_dict().items():
        assert torch.equal(theirs[name], weight), name


def test_weights_that_are_not_numbers_go_nowhere(command, there):
    weights = load_file(there / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": torch.full((64,), torch.nan)}, there / "model.safetensors"
    )
    words = ("--run", str(there))
    for result in (
        command("generate.py", "Ann", *words), command("tools/export_hf.py", *words, "--format", "hf", "--out", "x"),
    ):  # fmt: skip
        assert result.code == 4 and "NaN" in result.err and result.err.count("\n") == 1
    assert not Path(".tmp-x").exists()
    assert "no model (absent)" in command("train.py", *TINY[1:], "init_from=absent").err


@stories
def test_training_goes_on_from_a_model_of_llama2c(command):
    Path("part.txt").write_text((DATASETS / "tinystories" / "valid.txt").read_text()[:300_000])
    words = (
        "data=text",
        "data.path=part.txt",
        "context=256",
        "batch_tokens=2048",
        "eval_every=6",
        "steps=12",
    )
    how = (
        "max_minutes=null",
        "optimizer=adamw",
        "optimizer.lr=1e-4",
        "compile=false",
        f"precision={PRECISION}",
    )
    result = command("train.py", f"init_from={STORIES}", "device=cpu", *how, *words, "run_dir=run")
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    # Over 5 seeds, in fp32 and in bf16: 1.602 to 1.603 at first, 1.574 to 1.577 at last.
    assert [step for step, _ in losses] == [0, 6, 12] and losses[2][1] < losses[0][1] < 2
    assert command("generate.py", "Once", "--run", "run").code == 0


def test_a_run_takes_the_model_that_it_begins_with(command, there, story):
    how = (
        *TINY[1:],
        "data=text",
        f"data.path={story}",
        f"init_from={there}",
        "run_dir=begun",
        "optimizer=adamw",
        "optimizer.lr=1e-9",
    )
    result = command("train.py", *how, "steps=1")
    assert result.code == 0, result.err
    begun, now = (
        checkpoint.load_model(place, "cpu").state_dict()
        for place in (there, checkpoint.newest_checkpoint(Path("begun")))
    )
    for name, weight in begun.items():
        close(now[name], weight, atol=1e-5, rtol=0)
    assert command("train.py", *how, "steps=2", "resume=true").code == 0
    result = command(
        "train.py", *how, "++attention.window=3", "attention=mqa", "steps=1", "run_dir=other"
    )
    assert result.code == 2 and "(++attention.window=3). fix: leave" in result.err


def test_what_can_be_computed_need_not_be_there(there):
    """Old folders hold the frequencies of RoPE."""
    weights = load_file(there / "model.safetensors")
    save_file(
        weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        there / "model.safetensors",
    )
    assert checkpoint.load_model(there, "cpu").head is not None


def test_shards_and_half_precision_are_read(there):
    weights = {
        name: weight.bfloat16() for name, weight in load_file(there / "model.safetensors").items()
    }
    (there / "model.safetensors").unlink()
    save_torch_state_dict(weights, there, max_shard_size=50_000)
    assert len(list(there.glob("*.safetensors"))) > 2
    model = checkpoint.load_model(there, "cpu")
    assert torch.equal(model.head.weight, weights["lm_head.weight"].float())


def test_an_index_leads_nowhere(there):
    """It is not read: what the folder holds is what is loaded."""
    expected = checkpoint.load_model(there, "cpu").state_dict()
    for index in ({"weight_map": {"model.norm.weight": "../absent.safetensors"}}, []):
        (there / "model.safetensors.index.json").write_text(json.dumps(index))
        close(checkpoint.load_model(there, "cpu").state_dict(), expected, rtol=0, atol=0)


def change(there: Path, **keys) -> None:
    file = there / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def pickled(there: Path) -> None:
    torch.save(load_file(there / "model.safetensors"), there / "pytorch_model.bin")
    (there / "model.safetensors").unlink()


def misshapen(there: Path) -> None:
    weights = load_file(there / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(63)}, there / "model.safetensors")


def without_a_shard(there: Path) -> None:
    save_torch_state_dict(load_file(there / "model.safetensors"), there, max_shard_size=50_000)
    next(there.glob("model-00002-*")).unlink()


def with_a_stale_shard(there: Path) -> None:
    save_torch_state_dict(load_file(there / "model.safetensors"), there, max_shard_size=50_000)
    shard = min(there.glob("model-*-of-*.safetensors"))
    shutil.copy(shard, there / "model-00009-of-00009.safetensors")


def without_a_tensor(there: Path) -> None:
    weights = load_file(there / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, there / "model.safetensors")


def quantized(there: Path) -> None:
    weights = load_file(there / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": torch.ones(64, dtype=torch.int8)},
        there / "model.safetensors",
    )


def with_another(there: Path) -> None:
    weights = load_file(there / "model.safetensors")
    save_file(
        weights | {"model.layers.0.mlp.gate_proj.bias": torch.ones(128)},
        there / "model.safetensors",
    )


DAMAGES = {
    "quantized": (quantized, "quantized weights"),
    "another tensor": (with_another, "gate_proj.bias"),
    "pickle": (pickled, "a pickle"),
    "shape": (misshapen, "model.norm.weight"),
    "shard": (without_a_shard, "not the model's weights"),
    "stale shard": (with_a_stale_shard, "two files hold one tensor"),
    "tensor": (without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
    "cut": (lambda there: (there / "model.safetensors").write_bytes(b"\0" * 100), "not weights"),
    "tied, and a head": (lambda there: change(there, tie_word_embeddings=True), "lm_head.weight"),
    "architecture is text": (lambda there: change(there, architectures="LlamaForCausalLM"), "unknown architecture"),
    "size": (lambda there: change(there, intermediate_size=-128), "not the sizes"),
    "large": (lambda there: change(there, hidden_size=2**40), "not the sizes"),
    "no context": (lambda there: change(there, max_position_embeddings=0), "not the sizes"),
    "layers": (lambda there: change(there, layer_types=["sliding_attention"] * 2, sliding_window=5), "no such layers"),
    "epsilon": (lambda there: change(there, rms_norm_eps=-1.0), "norm_eps"),
    "base": (lambda there: change(there, rope_parameters={"rope_theta": float("inf")}), "rope_base"),
    "deep": (lambda there: (there / "config.json").write_text("[" * 100_000), "config.json"),
    "architecture": (lambda there: change(there, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "no architecture": (lambda there: change(there, architectures=None), "unknown architecture"),
    "activation": (lambda there: change(there, hidden_act="mish"), "mish"),
    "head_dim": (lambda there: change(there, head_dim=32), "self_attn.q_proj"),
    "positions": (lambda there: change(there, rope_parameters={"rope_type": "longrope", "factor": 2.0}), "longrope"),
    "sizes": (lambda there: change(there, hidden_size="64"), "config.json"),
    "more than a factor": (
        lambda there: change(there, rope_parameters={"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}), "mscale",
    ),
    "json": (lambda there: (there / "config.json").write_text("{"), "config.json"),
    "vocabulary": (lambda there: change(there, vocab_size=300), "another vocabulary"),
    "no tokenizer": (
        lambda there: [file.unlink() for file in there.glob("tokenizer.*")], "no tokenizer.model and no tokenizer.json"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_ours_is_refused_in_a_line(damage, command, there, story):
    harm, said = DAMAGES[damage]
    harm(there)
    for result in (
        command("generate.py", "Ann", "--run", str(there)),
        command(
            "train.py",
            *TINY[1:],
            "data=text",
            f"data.path={story}",
            f"init_from={there}",
            "steps=1",
        ),
    ):
        assert result.code in (2, 3)
        assert (
            result.err.count("\n") == 1 and result.err.startswith("error: ") and said in result.err
        ), result.err
        assert result.err.count("fix: ") == 1 and not result.out


@pytest.mark.parametrize(
    "content",
    [b"", b"ak42" + bytes(300), b"\x80\x02}q\x00.", struct.pack("<7i", *[64] * 7) + bytes(9)],
)
def test_a_file_that_is_not_llama2cs_is_refused(content, command, tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(content)
    result = command("generate.py", "Ann", "--run", str(file))
    assert (
        result.code == 3 and "not weights of llama2.c" in result.err and result.err.count("\n") == 1
    )
