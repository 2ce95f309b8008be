"""One command converts a Hugging Face folder to a checkpoint, or refuses it in one line."""

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.tokenizer import Tokenizer, tokenizer_file
from run import checkpoint
from run.checkpoint import load_model
from tests.conftest import STORIES, TINY, close, continued, saved, stories, tell, tree_of
from tests.tools.families import CONFIGS, make_folder
from tools import export_hf, import_hf

IMPORT = "tools/import_hf.py"
WEIGHTS = "model.safetensors"
PROMPT = "Ann had a red ball."


def publish(folder: Path, family: str, **save: object) -> None:
    texts = tell(folder.parent).read_text(encoding="utf-8").split("\n")
    make_folder(folder, family, texts, **save)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_imported_model_continues_a_prompt_as_transformers_does(family, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The smallest model is saved in several files.
    save = {"max_shard_size": "40KB"} if family == "SmolLM2-135M" else {}
    publish(tmp_path / "model", family, **save)
    import_hf.main(Namespace(folder=tmp_path / "model", out=tmp_path / "run"))
    place = checkpoint.find_model(tmp_path / "run")
    ours = load_model(place, "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokens = torch.randint(600, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)

    # 40 tokens, or up to an EOS.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    made = theirs.generate(**prompt, max_new_tokens=40, do_sample=False)
    our_tokenizer = Tokenizer.load(tokenizer_file(place))
    tokens = our_tokenizer.encode_prompt(PROMPT)
    (drawn,) = continued(ours, [tokens], 40, eos=our_tokenizer.eos_ids)
    assert [*tokens, *drawn] == made[0].tolist()


def test_a_published_model_and_its_settings_survive_training_and_export(command, story, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = tmp_path / "model"
    publish(folder, "SmolLM3-3B")
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.pad_token = "<|im_start|>"
    template = "{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"
    theirs.chat_template = {"default": template, "tool_use": template * 2, "é.v2": "{{ 1 }}"}
    theirs.save_pretrained(folder)
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [3, 2]}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    change(eos_token_id=2)(folder)

    command(IMPORT, str(folder), "--out", "new").succeeded()
    words = [word for word in TINY if not word.startswith(("model=", "context", "precision"))]
    words += ["init_from=new", "data=text", f"data.path={story}", "context=32", "steps=1"]
    words += ["precision=fp32", "optimizer=adamw", "optimizer.lr=1e-2", "run_dir=runs/t"]
    command("train.py", *words).succeeded()
    command("tools/export_hf.py", "--run", "runs/t", "--out", "again").succeeded()

    again = AutoTokenizer.from_pretrained("again")
    assert again.chat_template == theirs.chat_template
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(again, name) == getattr(theirs, name)
    model = AutoModelForCausalLM.from_pretrained("again").eval()
    assert model.config.pad_token_id == theirs.pad_token_id
    sampling = GenerationConfig.from_pretrained("again")
    assert (sampling.temperature, sampling.top_k, sampling.do_sample) == (0.6, 20, True)
    place = checkpoint.find_model("runs/t")
    tokenizer = Tokenizer.load(tokenizer_file(place))
    assert sampling.eos_token_id == [3, 2] and tokenizer.eos_ids == (3, 2)
    assert again(PROMPT)["input_ids"] == tokenizer.encode_prompt(PROMPT)

    tokens = torch.arange(3, 33)[None]
    with torch.no_grad():
        before = load_model(checkpoint.find_model("new"), "cpu")(tokens)
        after = load_model(place, "cpu")(tokens)
        close(after, model(tokens).logits, atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 0.1


@stories
def test_an_imported_model_generates_its_reference_story(command):
    stated = json.loads((STORIES / "reference.json").read_text(encoding="utf-8"))
    command(IMPORT, str(STORIES), "--out", "new").succeeded()
    words = ("", "--run", "new", "--temperature", "0", "--max-new-tokens", "199")
    result = command("generate.py", *words).succeeded()
    # The two largest logits differ by at least 0.004; fp32 errors are 0.00002.
    assert result.out == stated["greedy_text"] + "\n"


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    saved(folder / "run", tree_of("llama"), tokenizer)
    export_hf.main(Namespace(run=folder / "run", out=folder / "there", dtype="f32"))
    return folder / "there"


@pytest.fixture
def there(exported, tmp_path) -> Path:
    """A Hugging Face folder of a model of ours, which the test may modify."""
    return shutil.copytree(exported, tmp_path / "there")


def test_other_commands_refuse_a_hugging_face_folder_with_a_fix(command, there, story):
    text = ("data=text", f"data.path={story}", "steps=1")
    for words in (
        ("generate.py", "Ann", "--run", str(there)),
        ("tools/export_hf.py", "--run", str(there), "--out", "x"),
        ("train.py", *TINY[1:], *text, f"init_from={there}"),
    ):
        result = command(*words)
        assert result.code == 2 and result.err.count("\n") == 1, result.err
        fix = result.err.split("fix: python -m tools.import_hf ")[1]
    folder, option, out = fix.split()[:3]
    command(IMPORT, folder, option, out).succeeded()
    command("generate.py", "Ann", "--run", out).succeeded()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_stored_in_the_dtype_of_the_config_if_nothing_is_lost(dtype, command, there):
    weights = {name: weight.to(dtype) for name, weight in load_file(there / WEIGHTS).items()}
    save_file(weights, there / WEIGHTS)
    change(torch_dtype="bfloat16")(there)
    command(IMPORT, str(there), "--out", "new").succeeded()
    stored = load_file(checkpoint.find_model("new") / WEIGHTS)
    close(stored["head.weight"], weights["lm_head.weight"], atol=0, rtol=0)


def change(**entries):
    """Damage: set these entries of config.json."""

    def harm(there: Path) -> None:
        file = there / "config.json"
        content = json.loads(file.read_text(encoding="utf-8")) | entries
        file.write_text(json.dumps(content), encoding="utf-8")

    return harm


def reweigh(name: str, weight: torch.Tensor | None):
    """Damage: set a tensor, or remove it if `weight` is None."""

    def harm(there: Path) -> None:
        weights = load_file(there / WEIGHTS)
        weights.pop(name, None)
        if weight is not None:
            weights[name] = weight
        save_file(weights, there / WEIGHTS)

    return harm


def pickled(there: Path) -> None:
    torch.save(load_file(there / WEIGHTS), there / "pytorch_model.bin")
    (there / WEIGHTS).unlink()


def write(name: str, content: str):
    return lambda there: (there / name).write_text(content, encoding="utf-8")


NORM = "model.norm.weight"
NAN = torch.full((64,), torch.nan)
# The exit code, the damage, and the tensor, file or entry that the message names.
DAMAGES = {
    "pickle": (3, pickled, "pickles"),
    "shape": (3, reweigh(NORM, torch.ones(63)), NORM),
    "tensor": (3, reweigh(NORM, None), NORM),
    "another tensor": (3, reweigh("model.layers.0.self_attn.o_proj.bias", NAN), "o_proj.bias"),
    "NaN": (4, reweigh(NORM, NAN), "NaN"),
    "NaN in 8 bits": (4, reweigh(NORM, NAN.to(torch.float8_e4m3fn)), "NaN"),
    "truncated weights": (3, write(WEIGHTS, 100 * "\0"), "weights"),
    "tied, with a head": (2, change(tie_word_embeddings=True), "logits"),
    "architecture": (2, change(architectures=["Llama4ForCausalLM"]), "Llama4ForCausalLM"),
    "another class": (2, change(model_type="qwen3"), "model_type=qwen3"),
    "code": (2, change(auto_map={"AutoModelForCausalLM": "m.M"}), "auto_map"),
    "large": (3, change(intermediate_size=2**40), "weights"),
    "deep": (2, change(num_hidden_layers=10**9), "layers"),
    "layer type": (2, change(layer_types=["chunked_attention"] * 2), "chunked_attention"),
    "positions": (2, change(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "longrope"),
    "vocabulary": (2, change(vocab_size=300), "300"),
    "an unknown entry": (2, change(new_rope={"factor": 2}), "new_rope"),
    "invalid JSON": (2, write("config.json", "{}}"), "config.json"),
    "no tokenizer": (2, lambda there: (there / "tokenizer.model").unlink(), "cannot import"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unsupported_model_is_refused_in_one_line(damage, command, there):
    code, harm, named = DAMAGES[damage]
    harm(there)
    result = command(IMPORT, str(there), "--out", "new")
    assert result.code == code and result.err.startswith("error: ") and named in result.err
    assert result.err.count("\n") == 1, result.err
    assert not result.out and not Path("new").exists()


def test_without_transformers_these_commands_name_the_requirements(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for words in ((IMPORT, "hf"), ("tools/export_hf.py",)):
        result = command(*words, "--out", "new")
        assert result.code == 2 and "requirements-dev.txt" in result.err
        assert not Path("new").exists()
