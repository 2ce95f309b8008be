"""`generate.py` as a user runs it: its output and exit codes."""

import io
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from inference import generate_text, load, stream_text
from inference.batch import Sequence
from inference.text import detokenize
from run import checkpoint
from tests.conftest import Result, saved, tree_of

GREEDY = " --temperature 0 --max-new-tokens "


@pytest.fixture
def generate(command, drawn_run):
    """Run generate.py on the CPU, where sums have the same order for a batch and a single row."""
    return lambda prompt, words="", *more: command(
        "generate.py", "--device=cpu", *words.split(), *more, prompt
    )


def filed(prompts: list[str]) -> str:
    Path("prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    return "--prompt-file=prompts.txt"


def bodies(result: Result) -> list[str]:
    """The text below each heading."""
    _, *texts = re.split(r"^--- .*\n", result.out, flags=re.MULTILINE)
    return texts


def test_greedy_text_past_the_context_is_the_same_without_a_cache(generate):
    cached = generate("Ann had", GREEDY + "100")
    assert len(cached.out) > 50 and "---" not in cached.out  # a single text has no heading
    assert generate("Ann had", GREEDY + "100 --no-cache").out == cached.out


@pytest.mark.parametrize("words", [["--stop", ""], ["--cache-dtype=int8", "--no-cache"]])
def test_options_without_an_effect_are_refused(command, drawn_run, words):
    result = command("generate.py", "Ann had", *words)
    (line,) = result.err.splitlines()
    named = words[0].partition("=")[0].removeprefix("--")
    assert (result.code, result.out) == (2, "") and named in line


@pytest.mark.parametrize("typed, option", [("--no-cach", "--no-cache"), ("--zyzzyva", "--zyzzyva")])
def test_an_unknown_option_is_refused_with_the_nearest_option(command, typed, option):
    result = command("generate.py", "Ann had", typed)
    (line,) = result.err.splitlines()
    assert result.code == 2 and option in line


@pytest.mark.parametrize("path", ["runs/drawm", "runs/drawn/checkpoints", "runs/new"])
def test_a_path_without_a_checkpoint_is_refused_by_name(drawn_run, path):
    Path("runs/new").mkdir()
    Path("runs/new/config.yaml").touch()
    with pytest.raises(ValueError, match=path):
        checkpoint.find_model(path)


def test_low_precision_weights_and_caches_are_used(generate):
    sizes = []
    for words in ("--dtype fp32", "--dtype bf16", "--dtype int8 --cache-dtype int8"):
        result = generate("Ann had", f"{words} --max-new-tokens 20")
        assert len(result.succeeded().out) > 10
        sizes.append(int(re.search(r"([\d,]+) bytes", result.err)[1].replace(",", "")))
    assert sizes[2] < sizes[1] < sizes[0]


def test_attention_maps_are_drawn(command, tokenizer):
    saved(Path("runs/drawn"), tree_of("gdn"), tokenizer)
    words = ("tools/attention_map.py", "--device=cpu", "Ann had $3 and $4", "--out")
    command(*words, "map.svg").succeeded()
    texts = re.findall("<!-- (.*?) -->", Path("map.svg").read_text(encoding="utf-8"))
    assert {"drawn step-00000001: 'Ann had $3 and $4'", "Ann"} < set(texts)
    assert "&lt;s&gt;" in texts  # BOS decodes to nothing
    assert "layers without softmax: [0]" in texts
    assert command(*words, "map.wav").code == 2


def test_several_texts_are_printed_under_their_prompts(generate):
    """A text does not depend on the other texts in its batch."""
    prompts = ["Ann had", "  a\ttab  " + "and more " * 20, "<s>"]
    names = ["Ann had", "a tab " + "and more " * 7 + "a", "<s>"]
    words = "--temperature 1 --max-new-tokens 12 --num-samples 2"
    alone = []
    for prompt in prompts:
        alone += bodies(generate(prompt, words))
    assert alone[0] != alone[1]
    expected = ""
    for number, text in enumerate(alone):
        expected += f"--- {number + 1}: {names[number // 2]}\n{text}"
    assert generate(filed(prompts), words + " --batch-size 4").out == expected


def test_generate_text_returns_the_same_text_as_the_command(generate, drawn_run):
    prompts = ["Ann had", "Bob"]
    words = "--seed 3 --stop e --top-k 9 --top-p 0.9 --max-new-tokens 30"
    printed = generate(filed(prompts), words)
    model, tokenizer, _ = load(str(drawn_run), "cpu")
    options = {"stop_texts": "e", "top_k": 9, "top_p": 0.9, "temperature": 0.8}
    texts, other = (
        generate_text(model, tokenizer, prompts, max_new_tokens=30, **options | {"seed": seed})
        for seed in (3, 4)
    )
    assert [text + "\n" for text in texts] == bodies(printed) and texts != other
    with pytest.raises(ValueError, match="stop text"):
        generate_text(model, tokenizer, prompts, stop_texts=["a", ""])


@pytest.mark.parametrize("stop", ["<s>", "a<s>", "\\n"])
def test_a_stop_text_that_is_probably_a_mistake_is_warned_of(generate, stop):
    result = generate("Ann had", GREEDY + f"3 --stop {stop}").succeeded()
    assert f"warning: {stop!r}" in result.err
    for usual in ("s", "</s>"):
        assert "warning" not in generate("Ann had", GREEDY + f"3 --stop {usual}").err


def test_stream_text_yields_after_every_token(drawn_run):
    model, tokenizer, _ = load(str(drawn_run), "cpu")
    prompts = ["Ann had", "Bob", "Ann had"]
    options = {"max_new_tokens": 9, "stop_texts": ["@@"], "batch_size": 2, "seed": 3}
    expected = generate_text(model, tokenizer, prompts, **options)
    stream = stream_text(model, tokenizer, prompts, **options)
    steps = [(text.sequence.index, text.text) for text in stream]
    assert len(steps) > len(prompts) and expected[0] == expected[2] != expected[1]
    for index, whole in enumerate(expected):
        texts = [text for number, text in steps if number == index]
        assert texts[-1] == whole
        for earlier, later in pairwise(texts):
            assert later.startswith(earlier)


@pytest.mark.parametrize(
    "is_ended, stops, expected, reason",
    [
        (True, ("old map",), "Ann had an old", "eos"),
        (False, ("map", "n old", "@"), "Ann had a", "stop"),  # begins and ends inside tokens
    ],
)
def test_detokenized_text_ends_before_the_first_stop_text_or_at_eos(
    tokenizer, is_ended, stops, expected, reason
):
    sequence = Sequence([tokenizer.bos], 99, eos=tokenizer.eos_ids)
    tokens = tokenizer.encode("Ann had an old" if is_ended else "Ann had an old map")
    tokens += [tokenizer.eos] * is_ended

    def engine():
        for token in tokens:
            if sequence.finish_reason is None:
                sequence.append(token)
                yield sequence

    for text in detokenize(engine(), tokenizer, stops):
        assert expected.startswith(text.text)
    assert text.text == expected and sequence.finish_reason == reason
    assert (sequence.tokens[1:] == tokens) == is_ended


@pytest.mark.parametrize("prompt", ["", "a=b, ${oc.env:HOME} 'x' {y}", "Жили 🐈"])
def test_any_text_can_be_a_prompt(generate, prompt):
    generate(prompt, GREEDY + "3").succeeded()


def test_a_minus_reads_the_prompt_from_standard_input(generate, monkeypatch):
    """A byte order mark and the last newline are no part of a prompt, wherever it comes from."""
    expected = generate("Ann had", GREEDY + "3").out
    for typed in (b"Ann had", b"\xef\xbb\xbfAnn had\n", b"Ann had\r\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        assert generate("-", GREEDY + "3").out == expected
    assert generate("\ufeffAnn had", GREEDY + "3").out == expected


def test_generation_without_a_run_explains_how_to_train_one(command):
    result = command("generate.py", "a")
    assert result.code == 2 and "fix: python train.py" in result.err


def test_a_tilde_is_expanded_after_an_equals_sign(command, drawn_run, monkeypatch):
    """A shell expands ~ only at the start of a word."""
    home = Path("home").absolute()
    monkeypatch.setenv("HOME", str(home))
    shutil.move("runs", home / "runs")
    (home / "prompts").write_text("Ann had", encoding="utf-8")
    words = ("--run=~/runs/drawn", "--prompt-file=~/prompts", "--max-new-tokens=2")
    command("generate.py", *words).succeeded()


def test_a_checkpoint_is_found_from_any_folder_and_under_any_name(generate, drawn_run, monkeypatch):
    (step,) = Path(drawn_run, "checkpoints").absolute().iterdir()

    def text(path: str) -> str:
        return generate("Ann had", GREEDY + "9", f"--run={path}").succeeded().out

    usual = text(str(step))
    shutil.copytree(step, "best")
    assert text("best") == usual
    Path("newest").symlink_to(step)
    assert text("newest") == usual
    monkeypatch.chdir(step.parent)
    assert text(step.name) == usual
    monkeypatch.chdir(step)
    assert text(".") == usual
