"""One command converts a Hugging Face folder to a checkpoint, or refuses it in one line."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from data.tokenizer import Tokenizer, tokenizer_file
from run import checkpoint
from run.checkpoint import load_model
from tests.conftest import (
    DATASETS,
    LONG,
    PRECISION,
    ROOT,
    STORIES,
    TINY,
    close,
    saved,
    stories,
    tell,
    tree_of,
)
from tests.tools.families import write_tokenizer
from tests.training.test_train_command import metrics
from tools import export_hf

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer) -> Path:
    """A folder with a run and with a Hugging Face folder of the same model."""
    root = tmp_path_factory.mktemp("exported")
    saved(root / "run", tree_of("llama"), tokenizer)
    export_hf.main(Namespace(run=root / "run", out=root / "there", dtype="f32"))
    return root


@pytest.fixture
def there(exported, tmp_path) -> Path:
    """A copy of the Hugging Face folder that the test may modify."""
    return shutil.copytree(exported / "there", tmp_path / "there")


def imported(command, folder: Path) -> dict[str, torch.Tensor]:
    """Import a folder with the command; return its weights."""
    command("tools/import_hf.py", str(folder), "--out", "new").succeeded()
    return load_model(checkpoint.find_model("new"), "cpu").state_dict()


@stories
def test_an_imported_model_generates_its_reference_story_and_can_be_trained_further(command):
    told = json.loads((STORIES / "reference.json").read_text(encoding="utf-8"))
    imported(command, STORIES)
    words = ("", "--run", "new", "--temperature", "0", "--max-new-tokens", "199")
    result = command("generate.py", *words).succeeded()
    # The two largest logits differ by at least 0.004; fp32 errors are 0.00002.
    assert result.out == told["greedy_text"] + "\n"

    Path("part.txt").write_text(
        (DATASETS / "tinystories" / "valid.txt").read_text(encoding="utf-8")[:300_000],
        encoding="utf-8",
    )
    words = (
        "data=text",
        "data.path=part.txt",
        "context=256",
        "batch_tokens=2048",
        "eval_every=6",
        "steps=12",
        "max_minutes=null",
        "optimizer=adamw",
        "optimizer.lr=1e-4",
        "device=cpu",
        "compile=false",
        f"precision={PRECISION}",
        "run_dir=run",
    )
    result = command("train.py", "init_from=new", *words).succeeded()
    losses = [(line["step"], line["val_loss"]) for line in metrics("run") if "val_loss" in line]
    # Over 5 seeds, in fp32 and bf16: 1.602 to 1.603 at the start, 1.574 to 1.577 at the end.
    assert [step for step, _ in losses] == [0, 6, 12] and losses[2][1] < losses[0][1] < 2


def test_init_from_copies_the_model_of_a_run(command, exported, story):
    old = exported / "run"
    words = (
        *TINY[1:],
        "data=text",
        f"data.path={story}",
        f"init_from={old}",
        "run_dir=begun",
        "optimizer=adamw",
        "optimizer.lr=1e-9",
    )
    command("train.py", *words, "steps=1").succeeded()
    begun, now = (load_model(checkpoint.find_model(run), "cpu") for run in (old, "begun"))
    close(now.state_dict(), begun.state_dict(), atol=1e-5, rtol=0)
    assert command("train.py", *words, "steps=2", "resume=true").code == 0


SMALL = {
    "vocab_size": 360,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Entries that transformers 4 omits, with their defaults.
LEFT_OUT = {"SmolLM3": ("tie_word_embeddings", True)}


def drawn_folder(name: str, folder: Path, tokenizer_of: Path, vocab_size: int) -> None:
    """Save a small random model of a transformers class with our tokenizer.

    transformers cannot read our tokenizer for Qwen2, so Qwen2 gets a tokenizer of the Qwen2 family.
    """
    import transformers

    if name == "Qwen2":
        texts = tell(folder.absolute().parent).read_text(encoding="utf-8").split("\n")
        folder.mkdir()
        write_tokenizer(folder, "Qwen3-0.6B", texts)
        vocab_size = 600
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**SMALL | special | {"vocab_size": vocab_size})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if name in LEFT_OUT:
        entry, value = LEFT_OUT[name]
        file = folder / "config.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        assert content.pop(entry, value) == value
        file.write_text(json.dumps(content), encoding="utf-8")
    if name != "Qwen2":
        for file in ("tokenizer.model", "tokenizer_config.json"):
            shutil.copy(tokenizer_of / file, folder / file)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3"])
def test_an_imported_and_trained_model_can_be_exported_to_transformers(
    name, command, exported, story, tokenizer
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    drawn_folder(name, Path("model"), exported / "there", tokenizer.vocab_size)
    tokens = torch.arange(3, 53)[None]
    command("tools/import_hf.py", "model", "--out", "new").succeeded()
    before = load_model(checkpoint.find_model("new"), "cpu")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained("model").eval()(tokens).logits
        close(before(tokens), expected, atol=1e-4, rtol=0)

    words = [word for word in TINY if not word.startswith(("model=", "precision"))]
    words += ["init_from=new", "data=text", f"data.path={story}", "steps=2", "precision=fp32"]
    command("train.py", *words, "run_dir=run", "optimizer=adamw", "optimizer.lr=1e-2").succeeded()
    command("tools/export_hf.py", "--run", "run", "--out", "again").succeeded()
    theirs = AutoModelForCausalLM.from_pretrained("again").eval()
    with torch.no_grad():
        after = load_model(checkpoint.find_model("run"), "cpu")(tokens)
        close(after, theirs(tokens).logits, atol=1e-4, rtol=0)
    assert (after - expected).abs().max() > 0.1
    their_tokenizer = AutoTokenizer.from_pretrained("again")
    our_tokenizer = Tokenizer.load(tokenizer_file(checkpoint.find_model("run")))
    for text in ("Ann had a red ball.", " </s>a", "\tТест\n"):
        assert their_tokenizer(text)["input_ids"] == our_tokenizer.encode_prompt(text)


def test_a_tensor_that_the_class_lacks_is_refused(command, exported, tokenizer):
    """transformers ignores an output bias of Qwen2."""
    drawn_folder("Qwen2", Path("model"), exported / "there", tokenizer.vocab_size)
    name = "model.layers.1.self_attn.o_proj.bias"
    weights = load_file(Path("model") / WEIGHTS)
    assert name not in weights
    save_file(weights | {name: torch.ones(64)}, Path("model") / WEIGHTS)
    result = command("tools/import_hf.py", "model", "--out", "new")
    assert result.code == 3 and f"the weights do not match the config (model: {name})" in result.err


def test_other_commands_refuse_a_hugging_face_folder(command, there, story):
    text = ("data=text", f"data.path={story}", "steps=1")
    for words in (
        ("generate.py", "Ann", "--run", str(there)),
        ("tools/export_hf.py", "--run", str(there), "--out", "x"),
        ("train.py", *TINY[1:], *text, f"init_from={there}"),
    ):
        result = command(*words)
        assert result.code == 2 and result.err.count("\n") == 1, result.err
        assert f"({there}). fix: python -m tools.import_hf {there} --out " in result.err
    command("tools/import_hf.py", str(there), "--out", "models/there").succeeded()
    command("generate.py", "Ann", "--run", "models/there").succeeded()
    assert "(absent)" in command("train.py", *TINY[1:], "init_from=absent").err


@pytest.mark.parametrize("has_index", [True, False])
def test_shards_bf16_weights_and_old_files_are_imported(command, there, has_index):
    weights = {name: weight.bfloat16() for name, weight in load_file(there / WEIGHTS).items()}
    (there / WEIGHTS).unlink()
    # Old folders contain RoPE frequencies.
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_torch_state_dict(weights | old, there, max_shard_size=50_000)
    assert len(list(there.glob("*.safetensors"))) > 2
    if not has_index:  # without an index, all files are read
        (there / INDEX).unlink()
        min(there.glob("*.safetensors")).rename(there / "first.safetensors")
    assert torch.equal(imported(command, there)["head.weight"], weights["lm_head.weight"].float())


@pytest.mark.parametrize("is_sharded", [True, False])
def test_weight_files_that_transformers_does_not_read_are_ignored(command, there, is_sharded):
    """Folders of published models often contain additional copies of weights and adapters."""
    from transformers import AutoModelForCausalLM

    weights = load_file(there / WEIGHTS)
    if is_sharded:
        split(there)
    others = {name: torch.full_like(weight, 3.0) for name, weight in weights.items()}
    for name in ("consolidated", "adapter_model", "model.fp16", "model-00009-of-00009"):
        save_file(others, there / f"{name}.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(there)
    ours = imported(command, there)
    assert torch.equal(ours["head.weight"], theirs.lm_head.weight)
    assert torch.equal(ours["norm.weight"], theirs.model.norm.weight)


def test_a_tied_head_can_be_stored_as_a_copy_of_the_embedding(command, there):
    weights = load_file(there / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, there / WEIGHTS)
    change(tie_word_embeddings=True)(there)
    command("tools/import_hf.py", str(there), "--out", "new").succeeded()
    assert "head.weight" not in load_model(checkpoint.find_model("new"), "cpu").state_dict()


def change(**entries):
    """Damage: set these entries of config.json."""

    def harm(there: Path) -> None:
        file = there / "config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text(encoding="utf-8")) | entries), encoding="utf-8"
        )

    return harm


def reweigh(**tensors: torch.Tensor | None):
    """Damage: set these tensors, or remove them if they are None."""

    def harm(there: Path) -> None:
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        weights = load_file(there / WEIGHTS) | named
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, there / WEIGHTS)

    return harm


def pickled(there: Path) -> None:
    torch.save(load_file(there / WEIGHTS), there / "pytorch_model.bin")
    (there / WEIGHTS).unlink()


def split(there: Path) -> None:
    save_torch_state_dict(load_file(there / WEIGHTS), there, max_shard_size=50_000)
    (there / WEIGHTS).unlink(missing_ok=True)


def without_a_shard(there: Path) -> None:
    split(there)
    next(there.glob("model-00002-*")).unlink()


def with_a_stale_shard(there: Path) -> None:
    """Add an old shard. Without an index, it is unknown which shards belong to the model."""
    split(there)
    (there / INDEX).unlink()
    shard = min(there.glob("model-*-of-*.safetensors"))
    shutil.copy(shard, there / "model-00009-of-00009.safetensors")


def reindex(**files: str | None):
    """Damage: split into shards, and change or remove these tensors in the index."""

    def harm(there: Path) -> None:
        split(there)
        index = json.loads((there / INDEX).read_text(encoding="utf-8"))
        named = {name.replace("__", "."): file for name, file in files.items()}
        weight_map = index["weight_map"] | named
        for tensor, file in named.items():
            if file == "ANOTHER":
                weight_map[tensor] = min(
                    {*index["weight_map"].values()} - {index["weight_map"].get(tensor)}
                )
        index["weight_map"] = {name: file for name, file in weight_map.items() if file is not None}
        (there / INDEX).write_text(json.dumps(index), encoding="utf-8")

    return harm


def with_an_index(content: str):
    """Damage: split into shards, and write this content as the index."""

    def harm(there: Path) -> None:
        split(there)
        (there / INDEX).write_text(content, encoding="utf-8")

    return harm


def write(name: str, content: str):
    return lambda there: (there / name).write_text(content, encoding="utf-8")


def no_tokenizer(there: Path) -> None:
    for file in there.glob("tokenizer.*"):
        file.unlink()


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_sentencepiece_model_takes_bos_and_eos_from_its_configs(
    adds_bos, command, there, tokenizer
):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    change(eos_token_id=[7, tokenizer.eos])(there)
    file = there / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"add_bos_token": adds_bos}),
        encoding="utf-8",
    )
    imported(command, there)
    ours = Tokenizer.load(checkpoint.find_model("new") / "tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(there)
    tokens = ours.encode("a ball")
    assert ours.encode_prompt("a ball") == theirs("a ball")["input_ids"]
    generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(there))
    assert [*ours.eos_ids] == generation.eos_token_id == [7, tokenizer.eos]
    # Without BOS, documents are delimited by EOS.
    document = [tokenizer.bos, *tokens, 7] if adds_bos else [7, *tokens]
    assert ours.encode_documents(["a ball"]) == [document]


LONGROPE = {"rope_type": "longrope", "factor": 2.0}
MSCALE = {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}
# The exit code, the damage, and a part of the message.
DAMAGES = {
    "pickle": (3, pickled, "are pickles"),
    "shape": (3, reweigh(model__norm__weight=torch.ones(63)), "model.norm.weight"),
    "tensor": (3, reweigh(model__norm__weight=None), "model.norm.weight"),
    "another tensor": (3, reweigh(more=torch.ones(1)), "config (/"),
    "NaN": (4, reweigh(model__norm__weight=torch.full((64,), torch.nan)), "NaN"),
    "NaN in 8 bits": (
        4,
        reweigh(model__norm__weight=torch.full((64,), torch.nan).to(torch.float8_e4m3fn)),
        "NaN",
    ),
    "shard": (3, without_a_shard, "there/model-00002-of-000"),
    "index without a tensor": (3, reindex(lm_head__weight=None), "there: lm_head.weight)"),
    "index with a tensor": (3, reindex(more="ANOTHER"), "list different tensors"),
    "index with a wrong shard": (
        3,
        reindex(lm_head__weight="ANOTHER"),
        "index.json: lm_head.weight)",
    ),
    "index with a missing shard": (
        3,
        reindex(lm_head__weight="model-7.safetensors"),
        "model-7.safetensors",
    ),
    "index with an outside path": (
        3,
        reindex(lm_head__weight="../run/secret"),
        "weights are missing",
    ),
    "truncated index": (3, with_an_index('{"weight_map": {'), "invalid index"),
    "index without a map": (3, with_an_index("{}"), "invalid index"),
    "index of numbers": (3, with_an_index('{"weight_map": {"a": 1}}'), "invalid index"),
    "empty index": (3, with_an_index('{"weight_map": {}}'), "weights are missing"),
    "stale shard": (3, with_a_stale_shard, "two files have the same tensor"),
    "cut": (3, write(WEIGHTS, 100 * "\0"), "invalid weights"),
    "tied, with a head": (3, change(tie_word_embeddings=True), "lm_head.weight"),
    "head_dim": (3, change(head_dim=32), "self_attn.q_proj"),
    "architecture": (2, change(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "architecture is text": (2, change(architectures="LlamaForCausalLM"), "unknown arch"),
    "code": (2, change(auto_map={"AutoModelForCausalLM": "m.M"}), "auto_map"),
    "size": (2, change(intermediate_size=-128), "intermediate_size=-128"),
    "large": (3, change(hidden_size=2**40), "the weights do not match the config"),
    "deep": (2, change(num_hidden_layers=10**9), "not a config of"),
    "text": (2, change(hidden_size="64"), "not a config of"),
    "a missing entry": (2, change(num_hidden_layers=None), "not a config of"),
    "layers": (2, change(layer_types=["chunked_attention"] * 2), "not a config of"),
    "epsilon": (2, change(rms_norm_eps=-1.0), "rms_norm_eps=-1.0"),
    "base": (2, change(rope_parameters={"rope_theta": float("inf")}), "rope_theta"),
    "activation": (2, change(hidden_act="mish"), "(config.json: hidden_act=mish"),
    "groups": (2, change(num_key_value_heads=3), "num_key_value_heads=3"),
    "bias": (2, change(mlp_bias=True), "mlp_bias=True"),
    "positions": (2, change(rope_parameters=LONGROPE), "longrope"),
    "unsupported YaRN option": (2, change(rope_parameters=MSCALE), "mscale"),
    "vocabulary": (2, change(vocab_size=300), "does not fit the model"),
    "not causal": (2, change(is_causal=False), "is_causal=False"),
    "quantized": (2, change(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "another class": (2, change(model_type="qwen3"), "model_type=qwen3"),
    "invalid JSON": (2, write("config.json", "{}}"), "config.json: Extra data"),
    "not an object": (2, write("config.json", "[]"), "missing or have wrong types"),
    "layers of another depth": (
        2,
        change(layer_types=["full_attention"]),
        "do not match num_hidden_layers",
    ),
    "a run of this repository": (
        2,
        lambda folder: (folder / "config.json").unlink(),
        "config.json",
    ),
    "no tokenizer": (2, no_tokenizer, "tokenizer.model"),
}
# These classes have unsupported features.
for name in ("Llama4", "GraniteSWA", "DiffLlama", "DeepseekV3", "Qwen3_5"):
    DAMAGES[name] = (2, change(architectures=[f"{name}ForCausalLM"]), "unknown architecture")


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unsupported_model_is_refused_in_one_line(damage, command, there):
    code, harm, said = DAMAGES[damage]
    harm(there)
    result = command("tools/import_hf.py", str(there), "--out", "new")
    assert result.code == code and result.err.startswith("error: ") and said in result.err
    assert result.err.count("\n") == 1, result.err
    assert not result.out and not Path("new").exists()


def test_files_are_read_as_utf8_in_any_locale(there):
    file = there / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8")) | {"note": "é"}
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from tools.formats.special_tokens import read_json"
    )
    code += "; print(ascii(read_json(Path(sys.argv[1]))['note']))"
    env = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    words = [sys.executable, "-c", code, file]
    told = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, timeout=LONG)
    assert told.stdout == b"'\\xe9'\n", told.stderr
