"""One command converts a Hugging Face folder to a checkpoint, or refuses it in one line."""

import json
import shutil
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
from tests.conftest import DATASETS, PRECISION, STORIES, TINY, close, saved, stories, tell, tree_of
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


def drawn_folder(name: str, folder: Path, tokenizer_of: Path, vocab_size: int) -> None:
    """Save a small random model of a transformers class with a tokenizer of ours or of Qwen."""
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
    assert result.code == 3 and name in result.err


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


def test_shards_bf16_weights_and_old_files_are_imported(command, there):
    weights = {name: weight.bfloat16() for name, weight in load_file(there / WEIGHTS).items()}
    (there / WEIGHTS).unlink()
    # Old folders contain RoPE frequencies.
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_torch_state_dict(weights | old, there, max_shard_size=50_000)
    assert len(list(there.glob("*.safetensors"))) > 2
    change(torch_dtype="bfloat16")(there)
    assert torch.equal(imported(command, there)["head.weight"], weights["lm_head.weight"].float())
    stored = load_file(checkpoint.find_model("new") / WEIGHTS)["head.weight"]
    assert torch.equal(stored, weights["lm_head.weight"])


def test_weights_are_not_rounded_to_the_dtype_of_the_config(command, there):
    weights = load_file(there / WEIGHTS)
    change(torch_dtype="bfloat16")(there)
    assert torch.equal(imported(command, there)["head.weight"], weights["lm_head.weight"])


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


LONGROPE = {"rope_type": "longrope", "factor": 2.0}
MSCALE = {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}
# The exit code, the damage, and the tensor, file or entry that the message names.
DAMAGES = {
    "pickle": (3, pickled, "are pickles"),
    "shape": (3, reweigh(model__norm__weight=torch.ones(63)), "model.norm.weight"),
    "tensor": (3, reweigh(model__norm__weight=None), "model.norm.weight"),
    "another tensor": (3, reweigh(more=torch.ones(1)), "more"),
    "NaN": (4, reweigh(model__norm__weight=torch.full((64,), torch.nan)), "NaN"),
    "NaN in 8 bits": (
        4,
        reweigh(model__norm__weight=torch.full((64,), torch.nan).to(torch.float8_e4m3fn)),
        "NaN",
    ),
    "shard": (3, without_a_shard, "weights"),
    "truncated index": (3, with_an_index('{"weight_map": {'), "weights"),
    "index without a map": (3, with_an_index("{}"), "weights"),
    "index of numbers": (3, with_an_index('{"weight_map": {"a": 1}}'), "weights"),
    "empty index": (3, with_an_index('{"weight_map": {}}'), "weights"),
    "cut": (3, write(WEIGHTS, 100 * "\0"), "weights"),
    "tied, with a head": (2, change(tie_word_embeddings=True), "logits differ"),
    "head_dim": (3, change(head_dim=32), "weights"),
    "architecture": (2, change(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "architecture is text": (2, change(architectures="LlamaForCausalLM"), "unknown arch"),
    "code": (2, change(auto_map={"AutoModelForCausalLM": "m.M"}), "auto_map"),
    "size": (2, change(intermediate_size=-128), "-128"),
    "large": (3, change(intermediate_size=2**40), "the weights do not match the config"),
    "deep": (2, change(num_hidden_layers=10**9), "layers"),
    "text": (2, change(hidden_size="64"), "hidden_size"),
    "layers": (2, change(layer_types=["chunked_attention"] * 2), "chunked_attention"),
    "epsilon": (2, change(rms_norm_eps=-1.0), "-1.0"),
    "base": (2, change(rope_theta=float("inf"), rope_parameters=None), "inf"),
    "activation": (2, change(hidden_act="mish"), "mish"),
    "groups": (2, change(num_key_value_heads=3), "3"),
    "bias": (2, change(mlp_bias=True), "mlp_bias=True"),
    "absent biases": (3, change(attention_bias=True), "q_proj.bias"),
    "positions": (2, change(rope_parameters=LONGROPE), "longrope"),
    "unsupported YaRN option": (2, change(rope_parameters=MSCALE), "mscale"),
    "vocabulary": (2, change(vocab_size=300), "does not fit the model"),
    "not causal": (2, change(is_causal=False), "is_causal=False"),
    "quantized": (2, change(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "an unknown entry": (2, change(new_rope={"factor": 2}), "new_rope"),
    "another class": (2, change(model_type="qwen3"), "model_type=qwen3"),
    "invalid JSON": (2, write("config.json", "{}}"), "config.json: Extra data"),
    "not an object": (2, write("config.json", "[]"), "config.json"),
    "layers of another depth": (2, change(layer_types=["full_attention"]), "layer_types"),
    "a run of this repository": (
        2,
        lambda folder: (folder / "config.json").unlink(),
        "config.json",
    ),
    "no tokenizer": (2, no_tokenizer, "no tokenizer"),
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


@pytest.mark.parametrize("call", ["import_hf hf --out new", "export_hf --out new"])
def test_transformers_is_needed_only_by_these_commands(call, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    name, *words = call.split()
    result = command(f"tools/{name}.py", *words)
    assert result.code == 2 and "requirements-dev.txt" in result.err and not Path("new").exists()
