"""All commands in the documentation can be used: training commands are composed, others run."""

import io
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import (
    ROOT,
    TINY,
    close,
    compile_without_inductor,
    poisoned_memory,
    saved,
    tree_of,
)
from tools.compare.plan import plan_variants
from training.setup import read_settings

PAGES = (
    "README",
    "docs/generation",
    "docs/data",
    "docs/compare",
    "docs/formats",
    "docs/evaluation",
    "docs/extend",
)
TEXTS = [(ROOT / f"{page}.md").read_text(encoding="utf-8") for page in PAGES]
BLOCKS = [block for text in TEXTS for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]
# Each command once, without its comment.
COMMANDS = [shlex.join(shlex.split(line, comments=True)) for line in "".join(BLOCKS).splitlines()]
LINES = [*dict.fromkeys(filter(None, COMMANDS))]

# Commands that need a fresh clone, a network, several minutes, a longer text (tested in
# tests/tools/test_evaluate.py) or a different program.
UNTESTED = (".venv", "--tasks", "tools.bench", "--lengths", "llama")
# Commands that use a model, in the documented order, because some use earlier outputs.
WITH_A_MODEL = ("runs/NAME", "models/NAME", "tools.attention_map")
TESTED = [line for line in LINES if not any(word in line for word in UNTESTED)]
MODEL = [line for line in TESTED if any(word in line for word in WITH_A_MODEL)]
COMPARISON = [line for line in TESTED if "tools.compare" in line]
OTHERS = [line for line in TESTED if line not in MODEL + COMPARISON]
TRAINING = [line for line in OTHERS if line.startswith("python train.py")]
GENERATION = [line for line in OTHERS if line.startswith("python generate.py")]
COSTS = [line for line in OTHERS if line.startswith("python -m tools.cost")]


def file_and_words(line: str) -> list[str]:
    """Split a `python` command, which may follow variables, into the file and its arguments."""
    _, *words = shlex.split(line[line.index("python") :])
    if words[0] != "-m":
        return words
    file = words[1].replace(".", "/")
    return [f"{file}.py", *words[2:]]


@pytest.fixture
def texts(command, story) -> Path:
    """The files that the documented commands train on; returns the text."""
    for name in ("fineweb10B/train.bin", "fineweb10B/val.bin", "my/stories.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(story, name)
    return Path("my/stories.txt").resolve()


def test_every_documented_command_is_tested():
    assert sorted(OTHERS) == sorted(TRAINING + GENERATION + COSTS)
    assert len(TRAINING) > 8 and len(GENERATION) > 5 and len(MODEL) > 8 and len(COMPARISON) > 2


@pytest.mark.parametrize("line", TRAINING)
def test_documented_training_commands_compose(command, texts, line):
    file, *words = file_and_words(line)
    if "--help" in words:
        command(file, *words).succeeded()
    else:
        read_settings([*words, "device=cpu"])


@pytest.mark.parametrize("words", ["data=text data.path=my/stories.txt", "data=recall"])
def test_documented_training_commands_run(command, texts, words):
    line = next(line for line in TRAINING if words in line)
    size = ("data.vocab_size=400", "steps=2")
    command(*file_and_words(line), *TINY, *size).succeeded()


@pytest.mark.parametrize("line", GENERATION)
def test_documented_generation_commands_run(command, tokenizer, line, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"import\n"), isatty=lambda: False)
    )
    compile_without_inductor(monkeypatch)
    saved(Path("runs/stdlib-small-gqa"), tree_of("gqa", "model.depth=1"), tokenizer)
    Path("prompts.txt").write_text("one\nand another", encoding="utf-8")
    command(*file_and_words(line), "--max-new-tokens", "3").succeeded()


@pytest.mark.parametrize("line", COSTS)
def test_documented_cost_commands_print_tables(command, texts, line):
    small = ("attention=gqa", "model=tiny", "data=text", f"data.path={texts}")
    table = command(*file_and_words(line), *small).succeeded().out
    assert table.startswith("attention") and "gqa" in table


def test_documented_comparison_commands_are_planned(command, texts):
    *plans, report = [file_and_words(line)[1:] for line in COMPARISON]
    text = ["data=text", f"data.path={texts}", "data.vocab_size=400"]
    text += ["context=64", "batch_tokens=512", "device=cpu"]
    for words in plans:
        overrides = [word for word in words if word != "--tune"]
        variants = plan_variants([*overrides, *text], "none", None, "--tune" in words)
        assert len(variants) > 1
    assert report == ["--report", "runs/stdlib-small-*"]


def test_documented_commands_that_use_a_model_run(command, trained, texts):
    """Imports, exports and evaluates models in the documented order."""
    # Export the run to have a folder to import.
    command("tools/export_hf.py", "--out", "FOLDER").succeeded()
    for line in MODEL:
        file, *words = file_and_words(line.replace("runs/NAME", str(trained)))
        if file == "train.py":
            read_settings([*words, "device=cpu"])
        else:
            command(file, *words).succeeded()


def test_the_python_example_generates_text_and_computes_logits(command, tokenizer):
    model = saved(Path("runs/NAME"), tree_of("gqa"), tokenizer)
    page = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    session: dict = {}
    exec(compile(snippet, "docs/generation.md", "exec"), session)
    assert session["name"] == "NAME step-00000001"
    assert [type(text) for text in session["texts"]] == [str, str] and all(session["texts"])
    tokens = session["tokens"].cpu().clone()  # not an inference tensor
    close(session["logits"].cpu(), model(tokens), rtol=1e-3, atol=1e-3)
    for layer in session["weights"].values():
        close(layer.sum(-1), torch.ones(layer.shape[:-1]), rtol=1e-3, atol=1e-3)


def test_extension_examples_match_the_shipped_code():
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8") + TEXTS[0]
    examples = re.findall(
        r"^`([\w/.]+)`:\n```(?:python|yaml)\n(.*?)```", text, re.DOTALL | re.MULTILINE
    )
    assert len(examples) == text.count("```python") + text.count("```yaml") >= 13
    for path, example in examples:
        words = " ".join(example.split())  # ignores indentation
        assert words in " ".join((ROOT / path).read_text(encoding="utf-8").split()), path


def test_the_page_of_variants_lists_presets():
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    presets = {file.stem for file in (ROOT / "configs" / "attention").glob("*.yaml")}
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert len(listed) > 30 and {*listed} <= presets  # a user may have more


def test_the_attention_tutorial_runs(capsys):
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) > 15
    session: dict = {}
    with poisoned_memory():
        for snippet in snippets:
            exec(compile(snippet, "docs/attention.md", "exec"), session)
