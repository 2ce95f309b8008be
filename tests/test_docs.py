"""What the documents say to type works, at tiny size."""

import io
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, SHORT, TINY, close, saved, tree_of

PAGES = (
    "README",
    "docs/generation",
    "docs/data",
    "docs/compare",
    "docs/formats",
    "docs/evaluation",
    "docs/extend",
)
TEXTS = [(ROOT / f"{page}.md").read_text() for page in PAGES]
BLOCKS = [block for text in TEXTS for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]
# each command once, without its comment
COMMANDS = [shlex.join(shlex.split(line, comments=True)) for line in "".join(BLOCKS).splitlines()]
LINES = [*dict.fromkeys(filter(None, COMMANDS))]
TAKEN = [
    line
    for line in LINES
    if any(word in line for word in ("tools.export_hf", "my-model", "tools.evaluate"))
]
TRAINING = [line for line in LINES if line.startswith("python train.py") and line not in TAKEN]
GENERATION = [line for line in LINES if line.startswith("python generate.py") and line not in TAKEN]


def test_there_are_commands_to_test():
    assert len(TRAINING) >= 4 and len(GENERATION) >= 2


@pytest.mark.parametrize("line", TRAINING)
def test_training_commands(command, story, line):
    (story.parent / "my").mkdir()
    story.rename(story.parent / "my" / "stories.txt")
    text = ("data=text", "data.path=my/stories.txt", "data.vocab_size=400")
    words = [word for word in shlex.split(line)[2:] if not word.startswith("max_minutes")]
    result = command("train.py", *words, *TINY, *text, "steps=2", "batch_tokens=512")
    assert result.code == 0, result.err


@pytest.mark.parametrize("line", GENERATION)
def test_generation_commands(command, tokenizer, line, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"import\n"), isatty=lambda: False)
    )
    saved(
        Path("runs/stdlib-small-gqa"), tree_of("gqa", "model.depth=1"), tokenizer
    )  # the compiler is slow
    Path("prompts.txt").write_text("one\nand another")
    result = command("generate.py", *shlex.split(line)[2:], "--max-new-tokens", "3")
    assert result.code == 0, result.err
    assert " tokens; loaded in " in result.err or "map.png" in line


def test_the_comparison_and_its_report(command, story, forked_jobs):
    train, report = (shlex.split(line)[3:] for line in LINES if "tools.compare" in line)
    text = ("data=text", f"data.path={story}", "data.vocab_size=400", "steps=2")
    few = (*TINY, *text, "attention=gqa,mla", "seed=0", "--dir", "runs/stdlib-small-x")
    assert command("tools/compare/__main__.py", *train, *few).code == 0
    runs = sorted(map(str, Path("runs/stdlib-small-x").glob("*-0")))
    assert (
        command("tools/compare/__main__.py", report[0], *runs).code == 0
        and report[1] == "runs/stdlib-small-*"
    )


def test_a_model_is_taken_away_and_back(command, trained, story):
    """Export, generate, fine-tune and evaluate in the order of the documents, without a network."""
    (story.parent / "my").mkdir()
    story.rename(story.parent / "my" / "stories.txt")
    lines = [line for line in TAKEN if "--tasks" not in line]
    assert len(lines) == 9 and len(TAKEN) == 11
    for line in lines:
        module, *words = shlex.split(line.replace("-m ", "").replace("runs/NAME", str(trained)))[1:]
        file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
        result = command(file, *words, *((*TINY[1:], *SHORT) if file == "train.py" else ()))
        assert result.code == 0, result.err


def test_the_commands_of_conversion_run(command, tokenizer, story):
    saved(Path("old"), tree_of("mha"), tokenizer)
    (block,) = re.findall(
        r"```bash\n(.*?)```", (ROOT / "docs" / "convert.md").read_text(), re.DOTALL
    )
    words = {"MODEL": "old", "TEXT": str(story), "-m ": ""}
    for number, line in enumerate(block.splitlines()):
        for word, value in (words | {"FOLDER": f"new{number}"}).items():
            line = line.replace(word, value)
        module, *arguments = shlex.split(line, comments=True)[1:]
        file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
        more = [*TINY[1:], *SHORT] if file == "train.py" else []
        result = command(file, *arguments, *more)
        assert result.code == 0, result.err


def test_the_test_command_of_ci_is_the_readmes():
    (test,) = (line for line in TEXTS[0].splitlines() if line.endswith(".venv/bin/pytest"))
    assert test in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/generation.md"])
def test_a_notebook_has_texts_and_logits(command, tokenizer, page):
    model = saved(Path("runs/NAME"), tree_of("gqa"), tokenizer)
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    session: dict = {}
    exec(compile(snippet, page, "exec"), session)
    assert session["name"] == "NAME step-00000001"
    assert [type(text) for text in session["texts"]] == [str, str] and all(session["texts"])
    tokens = session["tokens"].cpu().clone()  # no tensor of inference mode
    close(session["logits"].cpu(), model(tokens), rtol=1e-3, atol=1e-3)


def test_the_examples_of_extensions_are_the_code_that_ships():
    text = (ROOT / "docs" / "extend.md").read_text()
    examples = re.findall(
        r"^`([\w/.]+)`:\n```(?:python|yaml)\n(.*?)```", text, re.DOTALL | re.MULTILINE
    )
    assert len(examples) == text.count("```python") + text.count("```yaml") >= 11
    for path, example in examples:
        words = " ".join(example.split())  # whatever the indentation
        assert words in " ".join((ROOT / path).read_text().split()), path


def test_the_attention_tutorial_runs(capsys):
    snippets = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "attention.md").read_text(), re.DOTALL
    )
    assert len(snippets) > 15
    session: dict = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/attention.md", "exec"), session)
