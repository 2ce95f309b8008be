"""A model with another attention computes the same where a conversion is exact, and says so where it does not."""

import cmath
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.build import build_model, materialize
from model.context import ForwardContext
from model.init import initialize
from model.rope import YaRN
from run import checkpoint
from tests.conftest import TINY, close, saved, tree_of
from tools.formats import converted_model
from tools.formats.attention_conversion import (
    Change,
    factorize,
    rotate_on_average,
    share_rotated_key,
)

# source, its words; words of the conversion
EXACT = [
    ("gqa", "attention.kv_heads=4"),
    ("mqa", "attention=mha"),
    ("mqa", "attention.kv_heads=2"),
    ("llama", "attention=gated"),
    ("gqa", "attention=gated"),
    ("llama", "attention=sink"),
    ("gqa attention.head_dim=24", "attention=sink attention.gated=true attention.kv_heads=4"),
    ("llama attention.rope_base=500000.0", "attention.bias=true"),
    ("gqa attention.bias=true attention.kv_heads=1", "attention=gated attention.kv_heads=2"),
    ("sliding_window", "attention.sink=true"),
    ("chunked attention.pattern=[local]", "attention.kv_heads=4"),
    ("gqa", "attention=value_residual"),
    (
        "local_global",
        "attention=local_global attention.kinds.local.window=5 attention.kinds.full.gated=true",
    ),
    ("nope", "attention=nope attention.kinds.nope.kv_heads=4 attention.kinds.rope.kv_heads=4"),
    ("nope", "attention.kv_heads=4"),
    ("nope", "attention.kinds.rope.gated=true"),
    ("mqa model.heads=2", "attention=mha"),
    ("mha", "attention.sink=true"),
]


@pytest.fixture
def convert(tmp_path, tokenizer):
    """A function: variant and words -> the model, the converted one, and the changes."""

    def run(variant: str, words: str):
        tree = tree_of(*variant.split(), "model.depth=4")
        saved(tmp_path / "run", tree, tokenizer)
        path = checkpoint.find_model(tmp_path / "run")
        tree = checkpoint.load_config(path)["model"]
        new_tree = converted_model.convert_config(tree, words.split())
        model = materialize(build_model(new_tree), "cpu")
        initialize(model, seed=0)
        changes = converted_model.load_converted(model, new_tree, path)
        return checkpoint.load_model(path, "cpu"), model.eval(), changes

    return run


def tokens_of(model) -> torch.Tensor:
    vocab_size = model.embed.num_embeddings
    return torch.randint(vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant, words", EXACT)
def test_an_exact_conversion_has_the_same_logits_cached_and_not(variant, words, convert):
    old, new, changes = convert(variant, words)
    assert any(changes) and all(change.is_exact for layer in changes for change in layer)
    tokens = tokens_of(old)
    with torch.no_grad():
        expected = old(tokens)
        close(new(tokens), expected, atol=1e-5, rtol=0)
        cache = new.new_cache(2, 33, torch.float32, "cpu")
        parts = [new(part, cache) for part in tokens.split([14, 1, 1, 17], dim=1)]
        close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.1


# source, its words; words of the conversion; what is said
APPROXIMATE = [
    ("mha", "attention.kv_heads=2", "key-value heads 4 -> 2, averaged"),
    ("mha", "attention=gqa", "key-value heads 4 -> 2, averaged"),
    ("llama", "attention=mqa", "key-value heads 2 -> 1, averaged"),
    ("gqa", "attention=sliding_window attention.window=7", "window None -> 7"),
    ("gqa", "attention.chunk=7", "chunk None -> 7"),
    ("gqa", "attention.rope_base=500000.0", "RoPE: base 10000, None -> base 500000, None"),
    (
        "gqa",
        "attention.rope_scaling={_target_:model.rope.YaRN,factor:4,fast:32,slow:1,context:64}",
        "YaRN(factor=4",
    ),
    ("gqa", "attention=nope", "no positions"),
    ("gqa", "attention=shared_kv", "keys and values are the mean of 2 layers"),
    ("gqa", "attention=shared_kv attention.share=half", "the mean of 2 layers"),
    ("gqa", "attention=mla attention.rank=48", "a latent of rank 48"),
    ("llama", "attention=mla attention.rank=20 attention.rope_dim=4", "4 of 16 features"),
    ("mqa", "attention=delta", "a delta rule with these projections"),
]


@pytest.mark.parametrize("variant, words, said", APPROXIMATE)
def test_an_approximate_conversion_says_so(variant, words, said, convert):
    old, new, changes = convert(variant, words)
    assert said in "; ".join(converted_model.describe(changes))
    assert not all(change.is_exact for layer in changes for change in layer)
    tokens = tokens_of(old)
    with torch.no_grad():
        logits = new(tokens)
        assert logits.isfinite().all() and not torch.allclose(logits, old(tokens), atol=1e-3)


def test_heads_are_averaged_over_groups_of_neighbours(convert):
    old, new, _ = convert("mha", "attention.kv_heads=2")
    for before, after in zip(old.blocks, new.blocks, strict=True):
        heads = before.attention.k_proj.weight.view(4, 16, 64)
        mean = torch.stack([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2])
        close(after.attention.k_proj.weight, mean.view(32, 64))
        close(after.attention.q_proj.weight, before.attention.q_proj.weight)


def test_layers_that_share_have_the_mean_of_their_keys(convert):
    old, new, _ = convert("gqa", "attention=shared_kv")
    for name in ("k_proj", "v_proj", "k_norm"):
        first, second = (getattr(old.blocks[layer].attention, name).weight for layer in (2, 3))
        close(getattr(new.blocks[2].attention, name).weight, (first + second) / 2)
    assert new.blocks[3].attention.k_proj is None


@pytest.mark.parametrize("rank", [8, 32, 64])
def test_a_factorization_has_the_nearest_outputs_of_its_rank(rank):
    """Beside the residual of the best map of that rank, which the singular values of the outputs give."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=draw, dtype=torch.float64)
    x = torch.randn(2000, 64, generator=draw, dtype=torch.float64) @ torch.randn(
        64, 64, generator=draw, dtype=torch.float64
    )
    down, up = factorize(weight, x.mT @ x / len(x), rank)
    width = min(rank, 48)
    assert down.shape == (width, 64) and up.shape == (48, width)
    outputs = x @ weight.mT
    error = (outputs - x @ down.mT @ up.mT).square().sum()
    best = torch.linalg.svdvals(outputs)[rank:].square().sum()
    assert error.item() == pytest.approx(
        best.item(), rel=1e-6, abs=1e-9 * outputs.square().sum().item()
    )
    latent = x @ down.mT
    identity = torch.eye(width, dtype=torch.float64)
    close(latent.mT @ latent / len(x), identity, atol=1e-6, rtol=0)


def test_the_key_that_all_heads_share_is_the_nearest_to_theirs():
    """Beside the residual of a truncated SVD of the keys of samples, one pair of features at a time."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(4, 6, 32, generator=draw, dtype=torch.float64)
    x = torch.randn(500, 32, generator=draw, dtype=torch.float64) @ torch.randn(
        32, 32, generator=draw, dtype=torch.float64
    )
    key, shares = share_rotated_key(keys, x.mT @ x / len(x))
    assert key.shape == (6, 32) and shares.shape == (4, 3)
    for pair in range(3):
        features = [pair, pair + 3]
        # (K, 2 N): both features of all samples, which are mixed alike.
        outputs = torch.stack([torch.cat([x @ head[f] for f in features]) for head in keys])
        shared = torch.cat([x @ key[f] for f in features])
        error = (outputs - shares[:, pair, None] * shared).square().sum()
        close(error, torch.linalg.svdvals(outputs)[1:].square().sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_query_without_rope_has_the_mean_score_of_all_distances(factor):
    """Beside each query and key of a context, rotated by a matrix of its angle."""
    scaling = YaRN(factor=factor, fast=32, slow=1, context=8)
    attention = SimpleNamespace(rotary=(4, 100.0, scaling))
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, generator=draw, dtype=torch.float64)
    k = torch.randn(4, generator=draw, dtype=torch.float64)
    frequencies, magnitude = scaling(torch.tensor([1.0, 0.1]), 4, 100.0)

    def rotate(vector, position):
        rotated = []
        for pair, frequency in enumerate(frequencies.tolist()):
            number = complex(vector[pair], vector[pair + 2])
            rotated.append(magnitude * number * cmath.exp(1j * position * frequency))
        return rotated

    scores = torch.zeros(2, dtype=torch.float64)
    count = 0
    for last in range(9):
        for first in range(last + 1):
            count += 1
            key = rotate(k, first)
            for head in range(2):
                query = rotate(q[head, :, 0], last)
                products = [a * b.conjugate() for a, b in zip(query, key, strict=True)]
                scores[head] += sum(products).real
    close(rotate_on_average(q, attention, 9)[..., 0] @ k, scores / count, rtol=1e-5, atol=1e-6)


def test_a_latent_of_full_rank_with_all_rotations_differs_by_its_norm_alone(convert):
    """One key head, whose features all keep their rotation: only the latent's norm is not in the old model."""
    old, new, _ = convert(
        "llama attention.kv_heads=1", "attention=mla attention.rank=16 attention.rope_dim=16"
    )
    for block in new.blocks:
        latent_norm = block.attention.latent_norm
        scale = latent_norm.weight.clone()
        block.attention.latent_norm = torch.nn.Module()
        block.attention.latent_norm.forward = lambda x, scale=scale: x * scale
    with torch.no_grad():
        close(new(tokens_of(old)), old(tokens_of(old)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama attention.kv_heads=1", "gqa attention.kv_heads=1"])
@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_a_latent_takes_the_size_of_its_inputs_from_the_norm_before(
    variant, size, tokenizer, tmp_path
):
    """Norms of trained models are far from 1; keys and values that are too large by that would be another model."""
    tree = tree_of(*variant.split(), "model.depth=1")
    old = saved(tmp_path / "run", tree, tokenizer)
    (block,) = old.blocks
    with torch.no_grad():
        block.attention_norm.weight.mul_(size)
    tree = tree | {"vocab_size": tokenizer.vocab_size}
    checkpoint.save(tmp_path / "new", 1, old.state_dict(), {"model": tree}, tokenizer.files, {})
    new_tree = converted_model.convert_config(
        tree, ["attention=mla", "attention.rank=16", "attention.rope_dim=16"]
    )
    new = materialize(build_model(new_tree), "cpu").eval()
    converted_model.load_converted(new, new_tree, checkpoint.find_model(tmp_path / "new"))
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(2))
    ctx = ForwardContext(x[..., 0], None, None, None)
    with torch.no_grad():
        x = block.attention_norm(x)
        outputs = [model.blocks[0].attention(x, ctx, None, {})[0] for model in (old, new)]
    assert (outputs[1] - outputs[0]).norm() < 0.4 * outputs[0].norm()


REFUSED = [
    ("gqa", "attention.qk_norm=null", "attention.qk_norm=before_rope"),
    ("gqa", "attention.head_dim=32", "attention.head_dim=16"),
    ("mha", "attention.kv_heads=3", ""),
    ("gated", "attention.gated=false", "an attention with gate_proj.weight"),
    ("sink", "attention.sink=false", "an attention with sink"),
    ("gqa attention.rope_base=null", "attention.rope_base=10000.0", "attention.rope_base=null"),
    ("gqa", "attention=differential", "attention=gqa, shared_kv, value_residual, mla or delta"),
    ("gqa", "attention=softcap", "attention.softcap=null"),
    ("gqa", "attention=llama", "leave out what the model has"),
    ("gqa", "attention.kv_heads=2", "leave out what the model has"),
    ("gqa", "attention.rank=8", "attention=PRESET"),
    ("nope", "attention.kinds.rope=8", "attention=PRESET"),
    ("mla", "attention=gqa", "train the new attention anew"),
    ("mla", "attention=mla attention.rank=8", "train the new attention anew"),
    ("nope", "attention=gqa", "attention.rope_base=VALUE"),
    ("gated", "attention=mla", "an attention with gate_proj.weight"),
    ("gqa", "attention=mla attention.rope_dim=6", "attention.rope_dim=8"),
    ("gqa model.softcap=30.0 attention.window=9", "attention=mla", "attention.window=null"),
    ("gqa", "attention=mla attention.head_dim=4", "attention.head_dim=16"),
    ("nope", "attention=mla attention.rope_base=10000.0", "a model with RoPE"),
]


@pytest.mark.parametrize("variant, words, fix", REFUSED)
def test_what_has_no_formula_is_refused_with_the_nearest(
    variant, words, fix, command, tokenizer, tmp_path
):
    saved(tmp_path / "run", tree_of(*variant.split(), "model.depth=4"), tokenizer)
    result = command("tools/convert.py", *words.split(), "--model", "run", "--out", "new")
    assert result.code == 2 and result.err.count("\n") == 1, result.err
    assert result.err.startswith("error: ") and fix in result.err.partition(". fix: ")[2], (
        result.err
    )
    assert not Path("new").exists()


def test_neighbours_with_equal_changes_share_a_line():
    window = Change("window None -> 64", False)
    gate = Change("a gate", True)
    lines = converted_model.describe([[gate], [gate], [], [window, gate]])
    assert lines == [
        "layers 0 to 1: a gate (exact)",
        "layer 3: window None -> 64 (approximate); a gate (exact)",
    ]


def test_the_command_writes_a_model_that_all_others_read(command, tokenizer, tmp_path, story):
    saved(tmp_path / "run", tree_of("mha", "model.depth=4"), tokenizer)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    words = ("attention=mla", "attention.rank=32", "--text", str(story), "--documents", "5")
    result = command("tools/convert.py", *words, "--model", "run", "--out", "new")
    assert result.code == 0, result.err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert "layers 0 to 3: a latent of rank 32" in result.out
    losses = [float(line.split()[1]) for line in result.out.splitlines() if "nats" in line]
    assert len(losses) == 2 and losses[0] != losses[1]
    # 2 x 4 heads of 16 features for 65 slots of 4 layers; a latent of 32 and a key of 8.
    sizes = (2 * 2 * 4 * 16 * 65 * 4, 2 * (32 + 8) * 65 * 4)
    assert f"bf16: {sizes[0]:,} -> {sizes[1]:,} bytes" in result.out
    assert command("generate.py", "--run", "new", "Ann", "--device", "cpu").code == 0
    assert command("tools/export_hf.py", "--run", "new", "--format", "hf", "--out", "hf").code == 0
    again = command("tools/convert.py", *words, "--model", "run", "--out", "new")
    assert again.code == 2 and "there is something already" in again.err
    other = command("tools/convert.py", "model.dim=32", "--model", "run", "--out", "other")
    assert other.code == 2 and "only attention is converted (model.dim=32)" in other.err


def test_training_begins_with_a_converted_model_and_resumes(command, tokenizer, tmp_path, story):
    saved(tmp_path / "old", tree_of("mha", "model.depth=4"), tokenizer)
    words = [word for word in TINY if not word.startswith("model=")]
    words += ["init_from=old", "data=text", f"data.path={story}", "attention=mqa", "run_dir=new"]
    result = command("train.py", *words, "steps=4", "save_every=2")
    assert result.code == 0, result.err
    assert "layers 0 to 3: key-value heads 4 -> 1, averaged (approximate)" in result.err
    settings = checkpoint.load_config(checkpoint.find_model(Path("new")))
    assert settings["model"]["attention"]["kv_heads"] == settings["attention"]["kv_heads"] == 1
    lines = [json.loads(line) for line in Path("new/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 0 and "val_loss" in lines[0]  # before it is healed
    resumed = command("train.py", *words, "steps=6", "resume=true")
    assert resumed.code == 0 and "resuming step 4" in resumed.err
    refused = command("train.py", *words, "steps=4", "model.dim=32")
    assert refused.code == 2 and "fix: leave these out" in refused.err


def test_a_run_that_learns_from_a_teacher_resumes_and_keeps_it_out(
    command, tokenizer, tmp_path, story
):
    saved(tmp_path / "old", tree_of("mha", "model.depth=2"), tokenizer)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "old").rglob("*")}
    words = [word for word in TINY if not word.startswith("model=")]
    words += ["init_from=old", "data=text", f"data.path={story}", "attention=mqa", "save_every=2"]

    def losses(name: str, *more: str) -> list[float]:
        result = command("train.py", *words, f"run_dir={name}", *more)
        assert result.code == 0, result.err
        text = Path(name, "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return [line[key] for line in lines for key in ("train_loss", "val_loss") if key in line]

    alone = losses("alone", "steps=4")
    assert losses("zero", "steps=4", "distill=old", "distill_weight=0") == alone
    taught = losses("taught", "steps=4", "distill=old", "distill_weight=1")
    assert taught[:2] == alone[:2] and taught != alone
    losses("cut", "steps=4", "max_minutes=null", "distill=old", "distill_weight=1")
    newest = checkpoint.find_model(Path("cut"))
    assert newest.name == "step-00000004"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert losses("cut", "steps=4", "distill=old", "distill_weight=1", "resume=true") == taught
    sizes = [
        (checkpoint.find_model(Path(name)) / "model.safetensors").stat().st_size
        for name in ("alone", "taught")
    ]
    assert sizes[0] == sizes[1]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "old").rglob("*")} == before

    other = ("data.vocab_size=300", "distill=old", "steps=4", "run_dir=other")
    refused = command("train.py", *words[:-5], *other, f"data.path={story}", "data=text")
    assert refused.code == 2 and "the teacher has another vocabulary" in refused.err, refused.err
    refused = command("train.py", *words, "distill=nowhere", "steps=4", "run_dir=other")
    assert refused.code == 2 and "no model (nowhere)" in refused.err
    refused = command("train.py", *words, "distill=old", "distill_weight=2", "steps=4")
    assert refused.code == 2 and "distill_weight must be a number from 0 to 1" in refused.err
