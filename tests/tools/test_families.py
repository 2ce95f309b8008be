"""Models with a tokenizer.json match transformers after import, training and export."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from data.prepare import prepare
from data.tokenizer import Tokenizer, tokenizer_file
from run import checkpoint
from run.checkpoint import load_model
from tests.conftest import TINY, close, continued, saved, tell, tree_of
from tests.faults.harness import source
from tests.tools.families import CONFIGS, make_folder
from tests.tools.test_export import NASTY
from tests.training.test_train_command import metrics
from tools import import_hf
from tools.import_hf import import_tokenizer

LAYERS = dict.fromkeys(CONFIGS, 1) | {"SmolLM2-135M": 2, "SmolLM3-3B": 4}
# Families whose post-processor does not prepend BOS.
WITHOUT_BOS = ("SmolLM2-135M", "Qwen3-0.6B", "SmolLM3-3B")
PROMPT = "Ann had a red ball."


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A function that returns a family's folder and the imported run, created only once."""
    root = tmp_path_factory.mktemp("published")

    def made(family: str) -> tuple[Path, Path]:
        folder = root / family
        if not folder.exists():
            # The smallest model is saved in several files.
            save = {"max_shard_size": "200KB"} if family == "SmolLM2-135M" else {}
            texts = tell(root).read_text(encoding="utf-8").split("\n")
            make_folder(folder, family, LAYERS[family], texts, **save)
            import_hf.main(Namespace(folder=folder, out=root / f"our-{family}"))
        return folder, root / f"our-{family}"

    yield made
    shutil.rmtree(root)


def loaded(folder: Path):
    """Load the model (in fp32) and the tokenizer with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def assert_same(folder: Path, ours: torch.nn.Module, tokenizer: Tokenizer) -> None:
    """Assert that logits and the ids of difficult texts match transformers."""
    theirs, their_tokenizer = loaded(folder)
    for text in NASTY:
        ids = their_tokenizer(text)["input_ids"]
        assert tokenizer.encode_prompt(text) == (ids or [tokenizer.bos]), text
        assert tokenizer.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)
    tokens = torch.randint(600, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_ids_and_text_match_transformers(family, published, command):
    folder, run = published(family)
    place = checkpoint.find_model(run)
    ours = load_model(place, "cpu")
    tokenizer = Tokenizer.load(place / "tokenizer.json")
    assert_same(folder, ours, tokenizer)
    assert tokenizer.starts_with_bos == (family not in WITHOUT_BOS)

    # 40 tokens, or up to an EOS.
    theirs, their_tokenizer = loaded(folder)
    prompt = their_tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    made = theirs.generate(**prompt, max_new_tokens=40, do_sample=False)
    tokens = tokenizer.encode_prompt(PROMPT)
    (drawn,) = continued(ours, [tokens], 40, eos=tokenizer.eos_ids)
    assert [*tokens, *drawn] == made[0].tolist()
    expected = their_tokenizer.decode(made[0], skip_special_tokens=True).removeprefix(PROMPT)
    words = ("--temperature", "0", "--max-new-tokens", "40", "--device", "cpu", "--dtype", "fp32")
    result = command("generate.py", "--run", str(run), PROMPT, *words)
    assert result.code == 0
    # In a byte sequence that is not valid UTF-8, ByteFallback also replaces valid characters. When
    # streaming token by token, these characters have already been printed.
    if family not in ("TinyLlama-1.1B", "Mistral-7B-v0.3") or "\ufffd" not in expected:
        assert result.out.removesuffix("\n") == expected.removesuffix("\n")


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3-0.6B",
        *[pytest.param(name, marks=pytest.mark.long) for name in CONFIGS if "Qwen" not in name],
    ],
)
def test_transformers_can_load_a_trained_and_exported_model(family, published, command, story):
    _, run = published(family)
    words = [word for word in TINY if not word.startswith(("model=", "batch_tokens", "context"))]
    words += [
        f"init_from={run}",
        "data=text",
        f"data.path={story}",
        "context=32",
        "batch_tokens=64",
        "steps=20",
        "optimizer=adamw",
        "optimizer.lr=0.0001",
    ]
    trained = command("train.py", *words, "run_dir=runs/t", "precision=fp32")
    assert trained.code == 0, trained.err
    lines = metrics("runs/t")
    assert lines[-1]["val_bpb"] < lines[0]["val_bpb"]
    newest = checkpoint.find_model("runs/t")
    assert checkpoint.load_config(newest)["model"]["vocab_size"] == 640  # some rows have no token
    command("tools/export_hf.py", "--run", "runs/t", "--out", "there").succeeded()
    tokenizer = Tokenizer.load(newest / "tokenizer.json")
    assert_same(Path("there"), load_model(newest, "cpu"), tokenizer)


@pytest.mark.parametrize("family", ["SmolLM2-135M", "Llama-3.2-1B", "SmolLM3-3B"])
def test_documents_are_encoded_as_plain_text_between_bos_and_eos(
    family, published, tmp_path, story
):
    path = checkpoint.find_model(published(family)[1]) / "tokenizer.json"
    tokenizer = Tokenizer.load(path)
    token = tokenizer.processor.id_to_token(tokenizer.eos)
    # The text of a special token is encoded as the token in prompts and as plain text in documents.
    assert tokenizer.eos in tokenizer.encode_prompt(f"a {token} b")
    (document,) = tokenizer.encode_documents([f"a {token} b"])
    text = document[1:] if tokenizer.bos in tokenizer.eos_ids else document[1:-1]
    assert not {tokenizer.bos, *tokenizer.eos_ids} & set(text)
    assert tokenizer.decode(document) == f"a {token} b"

    # The corpus is cached, and its byte counts match its text.
    corpus = prepare(source(story, tokenizer=str(path)), tmp_path / "cache")
    again = prepare(source(story, tokenizer=str(path)), tmp_path / "cache")
    assert corpus.sha256 == again.sha256 and corpus.tokenizer.files == tokenizer.files
    held_out = corpus.validation
    assert held_out[0] == tokenizer.bos and tokenizer.nbytes(held_out) > 0


def test_eos_text_in_a_document_is_plain_text_even_if_eos_is_not_marked_as_special(
    published, tmp_path
):
    from transformers import AutoTokenizer

    folder = shutil.copytree(published("SmolLM2-135M")[0], tmp_path / "model")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = False
    file.write_text(json.dumps(content), encoding="utf-8")
    tokenizer = import_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "a <|endoftext|> b"
    assert tokenizer.encode(text) == theirs(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.encode_prompt(text) == theirs(text)["input_ids"]
    assert tokenizer.eos in tokenizer.encode_prompt(text)
    assert tokenizer.decode([tokenizer.eos, *tokenizer.encode(text)]) == text


TEMPLATE = "{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
def test_templates_padding_special_ids_and_sampling_settings_round_trip(
    kind, published, command, story, tokenizer, tmp_path
):
    """The settings of a folder saved by transformers survive import, training and export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if kind == "tokenizer.json":
        folder = shutil.copytree(published("SmolLM3-3B")[0], tmp_path / "model")
    else:
        folder = tmp_path / "model"
        saved(tmp_path / "old", tree_of("llama"), tokenizer)
        command("tools/export_hf.py", "--run", "old", "--out", str(folder)).succeeded()
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.pad_token = theirs.bos_token or "<|im_start|>"
    theirs.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE * 2, "é.v2": "{{ 1 }}"}
    theirs.save_pretrained(folder)
    (folder / "tokenizer.model").unlink(missing_ok=True)
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [3, 2]}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    spoiled(folder, "config.json", eos_token_id=2)

    command("tools/import_hf.py", str(folder), "--out", "new").succeeded()
    words = [word for word in TINY if not word.startswith(("model=", "context"))]
    words += ["init_from=new", "data=text", f"data.path={story}", "context=32", "steps=1"]
    command("train.py", *words, "run_dir=runs/t").succeeded()
    command("tools/export_hf.py", "--run", "runs/t", "--out", "again").succeeded()
    again = AutoTokenizer.from_pretrained("again")
    assert again.chat_template == theirs.chat_template
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(again, name) == getattr(theirs, name)
    model = AutoModelForCausalLM.from_pretrained("again")
    assert model.config.pad_token_id == theirs.pad_token_id
    sampling = GenerationConfig.from_pretrained("again")
    assert (sampling.temperature, sampling.top_k, sampling.do_sample) == (0.6, 20, True)
    assert sampling.eos_token_id == model.generation_config.eos_token_id == [3, 2]
    assert Tokenizer.load(tokenizer_file(checkpoint.find_model("runs/t"))).eos_ids == (3, 2)


NOTES = {
    "Qwen3-0.6B": "'e\\u0301 \\xe9' decodes to",  # NFC
    "Mistral-7B-v0.3": "' a' decodes to 'a'",
    "SmolLM2-135M": None,
}


@pytest.mark.parametrize("family", NOTES)
def test_the_import_reports_texts_that_do_not_round_trip(family, published, command):
    folder, _ = published(family)
    result = command("tools/import_hf.py", str(folder), "--out", "new").succeeded()
    assert result.err.count("\n") == (NOTES[family] is not None)
    assert (NOTES[family] or "") in result.err


def spoiled(folder: Path, name: str, **entries: object) -> None:
    file = folder / name
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | entries), encoding="utf-8"
    )


NO_EOS = {"eos_token_id": None}
DAMAGES = {
    "not a tokenizer": lambda folder: write(folder / "tokenizer.json", "{}"),
    "no EOS": lambda folder: [
        (folder / "generation_config.json").unlink(),
        spoiled(folder, "config.json", **NO_EOS),
        spoiled(folder, "tokenizer_config.json", eos_token=None),
    ],
    "EOS is a number": lambda folder: [
        spoiled(folder, "generation_config.json", **NO_EOS),
        spoiled(folder, "config.json", **NO_EOS),
        spoiled(folder, "tokenizer_config.json", eos_token=5),
    ],
    "a list": lambda folder: write(folder / "generation_config.json", "[1]"),
    "nested": lambda folder: write(folder / "tokenizer_config.json", 100_000 * "["),
    "no unknown": lambda folder: spoiled(
        folder,
        "tokenizer.json",
        model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"},
        added_tokens=[],
        pre_tokenizer=None,
    ),
    "no tokens": lambda folder: spoiled(
        folder, "tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]
    ),
    "outside": lambda folder: spoiled(folder, "generation_config.json", eos_token_id=[2, 128001]),
    "more tokens than rows": lambda folder: spoiled(folder, "config.json", vocab_size=200),
}


def write(file: Path, content: str) -> None:
    file.write_text(content, encoding="utf-8")


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unsupported_tokenizer_is_refused_in_one_line(damage, published, command, tmp_path):
    folder = shutil.copytree(published("SmolLM2-135M")[0], tmp_path / "model")
    DAMAGES[damage](folder)
    result = command("tools/import_hf.py", str(folder), "--out", "new")
    assert result.code == 2 and result.err.count("\n") == 1, result.err
    assert not Path("new").exists()
