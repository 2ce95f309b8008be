"""All commands in the documentation run, with tiny models."""

import io
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import (
    ROOT,
    SHORT,
    TINY,
    close,
    compile_without_inductor,
    poisoned_memory,
    saved,
    tree_of,
)
from tools.compare import measures, plan, tuning

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
    """Split a `python` command into the file and its arguments."""
    _, *words = shlex.split(line)
    if words[0] != "-m":
        return words
    file = words[1].replace(".", "/")
    return [f"{file}.py", *words[2:]]


def run(command, line: str, *more: str):
    result = command(*file_and_words(line), *more).succeeded()
    return result


@pytest.fixture
def stories(story) -> Path:
    """The text files that the documented commands train on."""
    (story.parent / "my").mkdir()
    return story.rename(story.parent / "my" / "stories.txt")


def test_every_documented_command_is_tested():
    assert sorted(OTHERS) == sorted(TRAINING + GENERATION + COSTS)
    assert len(TRAINING) > 8 and len(GENERATION) > 5 and len(MODEL) > 8 and len(COMPARISON) == 3


@pytest.mark.parametrize("line", TRAINING)
def test_documented_training_commands_run(command, stories, line):
    text = ("data=text", "data.path=my/stories.txt", "data.validation=null", "data.vocab_size=400")
    if "data=recall" in line:  # a task needs no file
        text = ()
    line = re.sub(" max_minutes=[0-9]+", "", line)
    run(command, line, *TINY, *text, "steps=2", "batch_tokens=512")


@pytest.mark.parametrize("line", GENERATION)
def test_documented_generation_commands_run(command, tokenizer, line, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"import\n"), isatty=lambda: False)
    )
    compile_without_inductor(monkeypatch)
    saved(Path("runs/stdlib-small-gqa"), tree_of("gqa", "model.depth=1"), tokenizer)
    Path("prompts.txt").write_text("one\nand another", encoding="utf-8")
    assert " tokens/s, " in run(command, line, "--max-new-tokens", "3").err


@pytest.mark.parametrize("line", COSTS)
def test_documented_cost_commands_print_tables(command, stories, line):
    small = ("attention=gqa", "model=tiny", "data=text", f"data.path={stories}")
    table = run(command, line, *small).out
    assert table.startswith("attention") and "gqa" in table


def test_documented_comparison_commands_run(command, story, forked_jobs, monkeypatch):
    monkeypatch.setattr(measures, "latencies", lambda runs: {name: {} for name in runs})
    train, tuned, page = (file_and_words(line)[1:] for line in COMPARISON)
    text = ("data=text", f"data.path={story}", "data.vocab_size=400", "steps=2")
    few = (*TINY, *text, "attention=gqa,mla", "seed=0", "--dir", "runs/stdlib-small-x")
    command("tools/compare/__main__.py", *train, *few).succeeded()
    runs = sorted(map(str, Path("runs/stdlib-small-x").glob("*-0")))
    for module in (plan, tuning):
        monkeypatch.setattr(module, "FACTORS", (1.0, 0.5, 2.0))
    monkeypatch.setattr(tuning, "FARTHEST", 2.0)
    few = (*TINY, *text, "attention=gqa", "seed=0", "--dir", "runs/tuned")
    told = command("tools/compare/__main__.py", *tuned, *few, "--quick").succeeded().err
    assert "1 run in runs/tuned/, after at least 3 runs of the learning-rate search" in told
    assert page == ["--report", "runs/stdlib-small-*"]
    command("tools/compare/__main__.py", "--report", *runs).succeeded()


def test_documented_commands_that_use_a_model_run(command, trained, stories):
    """Imports, exports, trains and evaluates models in the documented order."""
    # Export the run to have a folder to import.
    command("tools/export_hf.py", "--out", "FOLDER").succeeded()
    for line in MODEL:
        more = (*TINY[1:], *SHORT) if line.startswith("python train.py") else ()
        run(command, line.replace("runs/NAME", str(trained)), *more)


def test_ci_runs_the_test_command_in_the_readme():
    (test,) = (line for line in TEXTS[0].splitlines() if line.endswith(".venv/bin/pytest"))
    assert test in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


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


def test_the_attention_tutorial_runs(capsys):
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) > 15
    session: dict = {}
    with poisoned_memory():
        for snippet in snippets:
            exec(compile(snippet, "docs/attention.md", "exec"), session)
