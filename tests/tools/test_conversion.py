"""Exact conversions preserve the logits, and approximate conversions are reported as such."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.build import build_model
from model.context import ForwardContext
from model.rope import YaRN
from run import checkpoint
from tests.conftest import ROOT, TINY, VARIANTS, close, drawn, saved, tree_of
from tools.formats import converted_model
from tools.formats.latent_conversion import factorize, rotate_on_average, share_rotated_key

# The source preset with its overrides, and the overrides of the conversion.
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
    """A function that converts a variant, and returns the old and new model and the report."""

    @torch.no_grad()
    def run(variant: str, words: str, norm: float = 1.0):
        tree = tree_of(*variant.split(), "model.depth=4") | {"vocab_size": tokenizer.vocab_size}
        old = drawn(tree)
        for block in old.blocks:
            block.attention_norm.weight.mul_(norm)
        checkpoint.save(tmp_path, 1, old.state_dict(), {"model": tree}, tokenizer.files, {})
        new_tree = converted_model.convert_config(tree, words.split())
        new = build_model(new_tree).eval()
        path = checkpoint.find_model(tmp_path)
        changes = converted_model.load_converted(new, new_tree, path)
        return old, new, converted_model.describe(changes)

    return run


def tokens_of(model) -> torch.Tensor:
    vocab_size = model.embed.num_embeddings
    return torch.randint(vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant, words", EXACT)
def test_an_exact_conversion_preserves_logits_with_and_without_a_cache(variant, words, convert):
    old, new, lines = convert(variant, words)
    assert lines and all(" (exact): layers [" in line for line in lines)
    tokens = tokens_of(old)
    with torch.no_grad():
        expected = old(tokens)
        close(new(tokens), expected, atol=1e-5, rtol=0)
        cache = new.new_cache(2, 33, torch.float32, "cpu")
        parts = [new(part, cache) for part in tokens.split([14, 1, 1, 17], dim=1)]
        close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.1


# Presets in docs/convert.md, and the reported changes when converting from gqa.
PRESETS = {
    "chunked": ["chunk None -> 128 (approximate): layers [0, 1, 2]"],
    "gated": ["an output gate of 1/2, with o_proj doubled (exact): layers [0, 1, 2, 3]"],
    "gdn": [
        "a recurrence with the old projections; everything else is new (approximate): layers [0, 1, 2]",
        "an output gate of 1/2, with o_proj doubled (exact): layers [3]",
    ],
    "gpt_oss": [
        "a sink of -20 (exact): layers [0, 1, 2, 3]",
        "window None -> 128 (approximate): layers [0, 2]",
    ],
    "llama4": [
        "chunk None -> 128 (approximate): layers [0, 1, 2]",
        "no positions (approximate): layers [3]",
    ],
    "local_global": ["window None -> 128 (approximate): layers [0, 1, 2]"],
    "mamba2": [
        "a recurrence with the old projections; everything else is new (approximate): layers [0, 1, 2]",
        "an output gate of 1/2, with o_proj doubled (exact): layers [3]",
    ],
    "mha": ["key-value heads 2 -> 4, repeated (exact): layers [0, 1, 2, 3]"],
    "mla": [
        "a latent of rank 32; 8 of 16 features per key keep their rotation (approximate): "
        "layers [0, 1, 2, 3]"
    ],
    "mqa": ["key-value heads 2 -> 1, averaged (approximate): layers [0, 1, 2, 3]"],
    "nope": ["no positions (approximate): layers [3]"],
    "shared_kv": [
        "keys and values are the mean of 2 layers (approximate): layers [0, 2]",
        "keys and values of an earlier layer (approximate): layers [1, 3]",
    ],
    "sink": ["a sink of -20 (exact): layers [0, 1, 2, 3]"],
    "sliding_window": ["window None -> 128 (approximate): layers [0, 1, 2, 3]"],
    "value_residual": ["a weight of 0 for the first layer's values (exact): layers [1, 2, 3]"],
    "window_nope": [
        "window None -> 128 (approximate): layers [0, 1, 2]",
        "no positions (approximate): layers [3]",
    ],
}


@pytest.mark.parametrize("preset", VARIANTS)
def test_every_preset_is_converted_with_all_of_its_settings_or_refused(preset, convert):
    """This includes the settings that a preset inherits."""
    if preset in PRESETS:
        _, new, lines = convert("gqa", f"attention={preset}")
        assert lines == PRESETS[preset]
        assert new(tokens_of(new)).isfinite().all()
    else:
        with pytest.raises(
            ValueError, match=r"^(no formula for this|the overrides change nothing).*\. fix: "
        ):
            convert("gqa", f"attention={preset}")


@pytest.mark.parametrize("variant", ["local_global", "nope", "window_nope", "chunked"])
@pytest.mark.parametrize("preset, option", [("mqa", "kv_heads=1"), ("sink", "sink=true")])
def test_the_suggested_fix_for_a_hybrid_keeps_its_pattern(variant, preset, option):
    tree = tree_of(variant)
    fix = f"attention.{option}, which keeps the layers' pattern"
    with pytest.raises(ValueError, match=f"layers have different values .*fix: {fix}"):
        converted_model.convert_config(tree, [f"attention={preset}"])
    converted = converted_model.convert_config(tree, [f"attention.{option}"])
    assert converted["attention"]["pattern"] == tree["attention"]["pattern"]
    assert len(build_model(converted, "meta").blocks) == tree["depth"]


# The source preset with its overrides, the overrides of the conversion, and the report.
APPROXIMATE = [
    ("mha", "attention.kv_heads=2", "key-value heads 4 -> 2, averaged"),
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
    ("mqa", "attention=gdn", "a recurrence with the old projections"),
]


@pytest.mark.parametrize("variant, words, said", APPROXIMATE)
def test_approximate_conversions_are_reported_as_approximate(variant, words, said, convert):
    old, new, lines = convert(variant, words)
    assert any(said in line for line in lines) and "(approximate): layers [" in str(lines)
    tokens = tokens_of(old)
    with torch.no_grad():
        logits = new(tokens)
        assert logits.isfinite().all() and not torch.allclose(logits, old(tokens), atol=1e-3)


def test_key_heads_in_a_group_are_averaged(convert):
    old, new, _ = convert("mha", "attention.kv_heads=2")
    for before, after in zip(old.blocks, new.blocks, strict=True):
        mean = before.attention.k_proj.weight.view(2, 2, 16, 64).mean(1)
        close(after.attention.k_proj.weight, mean.view(32, 64))
        close(after.attention.q_proj.weight, before.attention.q_proj.weight)


def test_layers_that_share_keys_use_the_mean_of_their_projections(convert):
    old, new, _ = convert("gqa", "attention=shared_kv")
    before, after = old.state_dict(), new.state_dict()
    for name in ("k_proj", "v_proj", "k_norm"):
        first, second = (f"blocks.{layer}.attention.{name}.weight" for layer in (2, 3))
        close(after[first], (before[first] + before[second]) / 2)
    assert new.blocks[3].attention.k_proj is None


@pytest.fixture
def draw():
    """A function that returns normally distributed float64 values of a given shape."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("rank", [8, 32, 64])
def test_a_factorization_is_optimal_for_its_rank(rank, draw):
    """The residual is the minimum for this rank, computed from the outputs' singular values."""
    weight, x = draw(48, 64), draw(2000, 64) @ draw(64, 64)
    down, up = factorize(weight, x.mT @ x / len(x), rank)
    identity = torch.eye(min(rank, 48), dtype=torch.float64)
    outputs, latent = x @ weight.mT, x @ down.mT
    error = (outputs - latent @ up.mT).square().sum()
    best = torch.linalg.svdvals(outputs)[rank:].square().sum()
    close(error, best, rtol=1e-6, atol=1e-9 * outputs.square().sum().item())
    close(latent.mT @ latent / len(x), identity, atol=1e-6, rtol=0)


def test_the_shared_rotated_key_is_optimal(draw):
    """For each pair of features, its residual matches a truncated SVD of sampled keys."""
    keys, x = draw(4, 6, 32), draw(500, 32) @ draw(32, 32)
    key, shares = share_rotated_key(keys, x.mT @ x / len(x))

    def by_pair(heads):
        """Return outputs (3, K, 2 N) of heads (K, 6, D): each pair's features for all samples."""
        return (heads @ x.mT).unflatten(1, (2, 3)).permute(2, 0, 1, 3).flatten(2)

    outputs = by_pair(keys)
    error = (outputs - shares.mT[..., None] * by_pair(key[None])).square().sum((1, 2))
    best = torch.linalg.svdvals(outputs)[:, 1:].square().sum(1)
    close(error, best, rtol=1e-9, atol=0)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_query_without_rope_gives_the_mean_score_over_all_distances(factor, draw):
    """Compares with all pairs of positions, rotating queries and keys as complex numbers."""
    scaling = YaRN(factor=factor, fast=32, slow=1, context=8)
    attention = SimpleNamespace(rotary_dim=4, rope_base=100.0, rope_scaling=scaling)
    q, k = draw(2, 4, 1), draw(4)
    frequencies, magnitude = scaling(torch.tensor([1.0, 0.1]), 4, 100.0)
    turns = magnitude * torch.exp(1j * torch.arange(9.0)[:, None] * frequencies)
    queries = turns * torch.complex(q[:, :2], q[:, 2:]).mT
    keys = turns * torch.complex(k[:2], k[2:])
    scores = (queries @ keys.mH).real.tril().sum((1, 2)) / 45
    close(rotate_on_average(q, attention, 9)[..., 0] @ k, scores, rtol=1e-5, atol=1e-6)


def test_a_full_rank_latent_with_all_rotations_differs_only_by_its_norm(convert):
    """With one key head and all rotations, the models differ only in the norm of the latent."""
    old, new, _ = convert(
        "llama attention.kv_heads=1", "attention=mla attention.rank=16 attention.rope_dim=16"
    )
    for block in new.blocks:
        block.attention.latent_norm.register_forward_hook(
            lambda norm, inputs, _: inputs[0] * norm.weight
        )
    with torch.no_grad():
        close(new(tokens_of(old)), old(tokens_of(old)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama attention.kv_heads=1", "gqa attention.kv_heads=1"])
@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_a_latent_accounts_for_the_weights_of_the_preceding_norm(variant, size, convert):
    """In trained models, norm weights are far from 1; they must not scale keys and values."""
    words = "attention=mla attention.rank=16 attention.rope_dim=16"
    old, new, _ = convert(variant, words, norm=size)
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(2))
    ctx = ForwardContext(x[..., 0], None, None, None)
    with torch.no_grad():
        x = old.blocks[0].attention_norm(x)
        before, after = (model.blocks[0].attention(x, ctx, None, {})[0] for model in (old, new))
    assert (after - before).norm() < 0.4 * before.norm()


def test_options_of_a_hybrid_are_set_in_its_layer_kinds(convert):
    tree = tree_of("gqa", "model.depth=4")
    with pytest.raises(ValueError, match=r"rope_base is null, not 10000\.0") as refused:
        convert("gqa", "attention=kda")
    fix = str(refused.value).partition(". fix: ")[2]
    assert fix == "attention.kinds.full.rope_base=10000.0"
    plain = converted_model.convert_config(tree, ["attention=kda", "attention.rope_base=10000.0"])
    assert plain == converted_model.convert_config(tree, ["attention=kda", fix])
    assert plain["attention"]["kinds"]["full"]["rope_base"] == 10000.0


def test_all_missing_options_of_a_conversion_are_reported_at_once(convert):
    with pytest.raises(ValueError, match="no formula") as refused:
        convert("gqa", "attention.qk_norm=null attention.head_dim=32 attention.kv_heads=1")
    fix = str(refused.value).partition(". fix: ")[2]
    assert fix == "attention.head_dim=16 attention.qk_norm=before_rope"
    converted_model.convert_config(tree_of("gqa"), ["attention.kv_heads=1", *fix.split()])


REFUSED = [
    ("sliding_window", "attention=mla", "set attention.window to null"),
    ("chunked", "attention=mla", "set attention.chunk to null"),
    ("sliding_window", "attention=kda", "set attention.window to null"),
    ("softcap", "attention=mla", "from scratch"),
    ("mha", "model.dim=32", "attention=PRESET or attention.KEY=VALUE"),
    ("gqa", "attention.qk_norm=null", "attention.qk_norm=before_rope"),
    ("gqa", "attention.head_dim=32", "attention.head_dim=16"),
    ("mha", "attention.kv_heads=3", ""),
    ("gated", "attention.gated=false", "an attention variant with gate_proj.weight"),
    ("gqa attention.rope_base=null", "attention.rope_base=10000.0", "attention.rope_base=null"),
    (
        "gqa",
        "attention=differential",
        "attention=gqa, shared_kv, value_residual, mla, gdn or mamba2",
    ),
    ("gqa", "attention=retention", "mla, gdn or mamba2"),
    ("gqa", "attention=kda", "attention.kinds.full.rope_base=10000.0"),
    (
        "gqa",
        "attention=gdn attention.kinds.full.window=9 attention.kinds.full.softcap=5.0",
        "attention.kinds.full.softcap=null",
    ),
    ("gqa", "attention=softcap", "attention.softcap=null"),
    ("gqa", "attention=llama", "choose a different preset or different values"),
    ("gqa", "attention.rank=8", "attention=PRESET"),
    ("gqa", "attention=mla attention.rank=100000", "attention.rank=160"),
    ("gqa", "attention._target_=model.layers.Linear", "Linear"),
    ("gqa", "attention._target_=model.layers.rms", "rms"),
    ("mla", "attention=gqa", "train the new attention variant from scratch"),
    ("nope", "attention=gqa", "attention.rope_base=VALUE"),
    ("gated", "attention=mla", "an attention variant with gate_proj.weight"),
    ("gqa", "attention=mla attention.rope_dim=6", "attention.rope_dim=8"),
    ("gqa model.softcap=30.0 attention.window=9", "attention=mla", "attention.window to null"),
    ("gqa", "attention=mla attention.head_dim=4", "attention.head_dim=16"),
    ("nope", "attention=mla attention.rope_base=10000.0", "use RoPE"),
]


@pytest.mark.parametrize("variant, words, fix", REFUSED)
def test_the_error_for_an_unsupported_conversion_suggests_the_nearest_supported_conversion(
    variant, words, fix, command, tokenizer, tmp_path
):
    saved(tmp_path / "run", tree_of(*variant.split(), "model.depth=4"), tokenizer)
    result = command("tools/convert.py", "run", *words.split(), "--out", "new")
    assert result.code == 2 and result.err.count("\n") == 1, result.err
    assert result.err.startswith("error: ") and fix in result.err, result.err
    assert not Path("new").exists()


def listed() -> dict[str, set[str]]:
    """The presets that docs/convert.md lists as converted or refused."""
    text = (ROOT / "docs/convert.md").read_text(encoding="utf-8")
    presets = {}
    for title in ("Converted", "Refused"):
        line = text.partition(f"{title} from a `gqa` model: ")[2].partition("\n\n")[0]
        presets[title] = set(re.findall(r"`(\w+)`", line))
    return presets


@pytest.mark.parametrize("preset", [name for name in VARIANTS if name != "gqa"])
def test_the_conversion_page_lists_converted_and_refused_presets(preset, tokenizer, tmp_path):
    saved(tmp_path / "run", tree_of("gqa", "model.depth=4"), tokenizer)
    path = checkpoint.find_model(tmp_path / "run")
    title = "Converted"
    try:
        tree = converted_model.convert_config(
            checkpoint.load_model_config(path), [f"attention={preset}"]
        )
        converted_model.load_converted(build_model(tree), tree, path)
    except ValueError as error:
        title = "Refused"
        # Apply the fix if it can be pasted.
        fix = str(error).partition("fix: ")[2]
        assert "fix: " in str(error)
        if fix.startswith("attention.kinds."):
            converted_model.convert_config(
                checkpoint.load_model_config(path), [f"attention={preset}", fix]
            )
    # A new preset does not have to be on the page.
    pages = [name for name, presets in listed().items() if preset in presets]
    assert pages in ([title], []), pages


def test_the_conversion_page_covers_all_presets_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    presets = set(re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE))
    assert len(presets) == 30
    assert presets - {"gqa"} == set.union(*listed().values())


def test_all_commands_accept_a_converted_model(command, tokenizer, tmp_path):
    saved(tmp_path / "run", tree_of("mha", "model.depth=4"), tokenizer)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    words = ("attention=mla", "attention.rank=32")
    result = command("tools/convert.py", "run", *words, "--out", "new").succeeded()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert "a latent of rank 32" in result.out
    # 64 slots in 4 layers hold 2 x 4 heads of width 16, or a latent of 32 and a key of 8.
    sizes = (2 * 2 * 4 * 16 * 64 * 4, 2 * (32 + 8) * 64 * 4)
    assert f"bf16: {sizes[0]:,} -> {sizes[1]:,} bytes" in result.out
    command("generate.py", "--run", "new", "Ann", "--device", "cpu").succeeded()
    command("tools/export_hf.py", "--run", "new", "--out", "hf").succeeded()
    again = command("tools/convert.py", "run", *words, "--out", "new")
    assert again.code == 2 and "must be a new or empty folder" in again.err


@pytest.fixture
def heal(command, tokenizer, story):
    """A function that trains a model converted from old/; returns the result and metrics lines."""
    saved(Path("old"), tree_of("mha", "model.depth=2"), tokenizer)
    converted = command("tools/convert.py", "old", "attention=mqa", "--out", "mqa")
    assert "4 -> 1, averaged (approximate): layers [0, 1]" in converted.out, converted.err
    words = [word for word in TINY if not word.startswith("model=")]
    words += ["init_from=mqa", "data=text", f"data.path={story}", "save_every=2", "steps=4"]

    def train(name: str, *more: str):
        result = command("train.py", *words, f"run_dir={name}", *more)
        log = Path(name, "metrics.jsonl")
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return result, [json.loads(line) for line in lines]

    return train


def test_training_can_start_from_a_converted_model_and_resume(heal):
    result, lines = heal("new")
    assert result.code == 0, result.err
    settings = checkpoint.load_config(checkpoint.find_model(Path("new")))
    assert settings["model"]["attention"]["kv_heads"] == 1
    assert lines[0]["step"] == 0 and "val_loss" in lines[0]  # before training
    resumed, _ = heal("new", "steps=6", "resume=true")
    assert resumed.code == 0 and "resuming step 4" in resumed.err
    for word in ("model.dim=32", "attention=mqa", "++attention.window=3"):
        refused, _ = heal("other", word)
        assert refused.code == 2 and f"({word}). fix: leave these out" in refused.err
    assert "python -m tools.convert mqa attention=NAME --out Y, then init_from=Y" in refused.err


def test_a_distillation_run_resumes_and_does_not_save_its_teacher(heal, command, story):
    def losses(name: str, *more: str) -> list[float]:
        result, lines = heal(name, *more)
        assert result.code == 0, result.err
        return [line[key] for line in lines for key in ("train_loss", "val_loss") if key in line]

    alone = losses("alone")
    assert losses("zero", "distill=old", "distill_weight=0") == alone
    teacher = ("distill=old", "distill_weight=1")
    taught = losses("taught", *teacher)
    assert taught[:2] == alone[:2] and taught != alone
    newest = checkpoint.find_model(Path("taught"))
    assert newest.name == "step-00000004"
    # The teacher's checkpoint is recorded, because further training of the teacher adds newer ones.
    assert checkpoint.load_config(newest)["distill"] == str(checkpoint.find_model("old"))
    shutil.rmtree(newest)
    assert losses("taught", *teacher, "resume=true") == taught

    text = ("data=text", f"data.path={story}", "data.vocab_size=300")
    refused = command("train.py", *TINY, *text, "distill=old", "steps=4")
    assert refused.code == 2 and "the teacher has a different tokenizer" in refused.err, refused.err
    told = re.search(r"SHA-256 (\w+); the model: 300, (\w+)\)", refused.err)
    assert told[1] != told[2]  # the hashes differ even if sizes are equal
    refused, _ = heal("other", "distill=nowhere")
    assert refused.code == 2 and "not a run or checkpoint (nowhere)" in refused.err
