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
    assert cached.code == 0 and len(cached.out) > 50
    assert generate("Ann had", GREEDY + "100 --no-cache").out == cached.out
    assert "bytes of cache" in cached.err and "tokens/s" in cached.err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--stop", ""], "--stop is empty"),
        (["--no-cache", "--cache-dtype=int8"], "int8"),
        (["--temperature", "inf"], "got inf"),
    ],
)
def test_invalid_options_are_refused(command, words, said):
    result = command("generate.py", "Ann had", *words)
    (line,) = result.err.splitlines()
    assert (result.code, result.out) == (2, "") and said in line


@pytest.mark.parametrize("typed", ["--tempreature 1", "--no-cach", "--zyzzyva", "--prompt x"])
def test_an_unknown_option_is_refused_by_name(command, drawn_run, typed):
    result = command("generate.py", "Ann had", *typed.split())
    (line,) = result.err.splitlines()
    assert result.code == 2 and typed.split()[0] in line


def test_a_mistyped_option_is_followed_by_the_right_one(command, drawn_run):
    result = command("generate.py", "Ann had", "--tempreature", "1")
    assert result.code == 2 and result.err.endswith("fix: --temperature\n")


@pytest.mark.parametrize("path", ["runs/drawm", "runs/drawn/checkpoints", "absent/file.pt"])
def test_a_path_that_is_not_a_run_is_refused_by_name(drawn_run, path):
    with pytest.raises(ValueError, match=re.escape(f"not a run or checkpoint ({path})")):
        checkpoint.find_model(path)


def test_the_prompt_is_dimmed_on_a_terminal(generate, monkeypatch):
    """The prompt is on standard error, on a separate line if standard output is redirected."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    result = generate("Ann had", GREEDY + "3")
    assert "\x1b[2mAnn had\x1b[0m\n" in result.err and "Ann had" not in result.out


def test_the_reported_size_of_an_int8_cache_is_smaller(generate):
    exact, small = (
        re.search(r"([\d,]+) bytes of cache", generate("Ann had", f"--cache-dtype {dtype}").err)[1]
        for dtype in ("auto", "int8")
    )
    # 16 features per head, and one scale.
    assert int(small.replace(",", "")) == int(exact.replace(",", "")) * (16 + 2) / (4 * 16)


@pytest.mark.parametrize("variant, others", [("gqa", "none"), ("gdn", "[0]")])
def test_attention_maps_are_drawn(command, tokenizer, variant, others):
    saved(Path("runs/drawn"), tree_of(variant), tokenizer)
    words = ("tools/attention_map.py", "--device=cpu", "Ann had $3 and $4", "--out")
    command(*words, "map.png").succeeded()
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")
    # The figure labels axes and tokens, and names the layers without a map.
    command(*words, "map.svg").succeeded()
    texts = re.findall("<!-- (.*?) -->", Path("map.svg").read_text(encoding="utf-8"))
    assert {"weight", "drawn step-00000001: 'Ann had $3 and $4'"} < set(texts)
    assert any(text.startswith("query") for text in texts)
    assert any(text.startswith("key") for text in texts)
    assert "&lt;s&gt;" in texts and "Ann" in texts  # BOS decodes to nothing
    assert f"layers without softmax: {others}" in texts
    assert command(*words, "map.wav").code == 2


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_ragged_batch_generates_the_same_texts_as_separate_prompts(generate, temperature):
    prompts = ["Ann", "Bob had an old map. Cleo", "Dan saw a small dog and said: may I"]
    words = f"--temperature {temperature} --max-new-tokens 12 --num-samples 2"
    alone = [text for prompt in prompts for text in bodies(generate(prompt, words))]
    assert bodies(generate(filed(prompts), words)) == alone


def test_several_texts_are_printed_under_their_prompts(generate):
    prompts = ["Ann had", "  a\ttab  " + "and more " * 20, "<s>"]
    texts = [generate(prompt, GREEDY + "5").out for prompt in prompts]
    assert not any("---" in text for text in texts)  # a single text in a pipe has no heading
    names = ["Ann had", "a tab " + "and more " * 7 + "a", "<s>"]
    expected = ""
    for number in range(6):
        expected += f"--- {number + 1}: {names[number // 2]}\n{texts[number // 2]}"
    assert generate(filed(prompts), GREEDY + "5 --num-samples 2 --batch-size 4").out == expected


def test_generate_text_returns_the_same_text_as_the_command(generate, drawn_run):
    prompts = ["Ann had", "Bob"]
    words = "--seed 3 --stop e --top-k 9 --top-p 0.9 --max-new-tokens 30"
    printed = generate(filed(prompts), words)
    model, tokenizer, _ = load(str(drawn_run), "cpu")
    options = {"stop_texts": ["e"], "top_k": 9, "top_p": 0.9, "temperature": 0.8}
    texts, other = (
        generate_text(model, tokenizer, prompts, max_new_tokens=30, **options | {"seed": seed})
        for seed in (3, 4)
    )
    assert [text + "\n" for text in texts] == bodies(printed) and texts != other
    assert generate_text(model, tokenizer, [], max_new_tokens=1) == []
    assert generate_text(model, tokenizer, "Ann", max_new_tokens=0) == [""]
    # A string is one stop text.
    same = generate_text(model, tokenizer, prompts, stop_texts=" @ @", temperature=0)
    assert same == generate_text(model, tokenizer, prompts, temperature=0)
    with pytest.raises(ValueError, match="a stop text is empty"):
        generate_text(model, tokenizer, prompts, stop_texts=["a", ""])


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
    # The caller may stop after any token.
    first = next(stream_text(model, tokenizer, "Ann had", **options))
    assert first.sequence.num_generated == 1 and expected[0].startswith(first.text)


def type_in(monkeypatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_low_precision_weights_generate_text(generate, dtype):
    result = generate("Ann had", f"--dtype {dtype}")
    assert result.code == 0 and "drawn step-00000001" in result.err


@pytest.mark.parametrize(
    "is_ended, stops, expected, reason",
    [
        (True, ["old map"], "Ann had an old", "eos"),  # the end of the text could begin a stop text
        (False, ["map", "n old", "@"], "Ann had a", "stop"),  # begins and ends inside tokens
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

    for text in detokenize(engine(), tokenizer, iter(stops)):
        assert expected.startswith(text.text)
    assert text.text == expected and sequence.finish_reason == reason
    assert (sequence.tokens[1:] == tokens) == is_ended


def test_generated_text_ends_before_the_stop_text(generate):
    free = generate("Ann had", GREEDY + "100").out
    stop = free[20:26]
    cut = generate("Ann had", GREEDY + "100 --stop @@@", "--stop", stop).out
    assert cut == free[: free.index(stop)] + "\n"


@pytest.mark.parametrize("prompt", ["", "a=b, ${oc.env:HOME} 'x' {y}", "-", "\n", "Жили 🐈"])
def test_any_text_can_be_a_prompt(generate, monkeypatch, prompt):
    type_in(monkeypatch, b"Ann had")
    result = generate(prompt, GREEDY + "3 --").succeeded()
    if prompt == "-":
        assert result.out == generate("Ann had", GREEDY + "3").out


def test_a_long_prompt_is_truncated_with_a_warning(generate):
    result = generate("Ann had a red ball. " * 40, "--max-new-tokens 2")
    assert result.code == 0 and "context is 64" in result.err


def test_generation_without_a_run_explains_how_to_train_one(command):
    result = command("generate.py", "a")
    assert result.code == 2 and "fix: python train.py" in result.err


def test_the_error_names_a_run_without_a_checkpoint(command):
    Path("runs/new").mkdir(parents=True)
    Path("runs/new/config.yaml").touch()
    result = command("generate.py", "Once", "--run", "new")
    assert result.code == 2 and result.err == "error: the run has no checkpoint yet (runs/new)\n"


def test_a_tilde_is_expanded_after_an_equals_sign(command, drawn_run, monkeypatch):
    """A shell expands ~ only at the start of a word."""
    home = Path("home").absolute()
    monkeypatch.setenv("HOME", str(home))
    shutil.move("runs", home / "runs")
    (home / "prompts").write_text("Ann had", encoding="utf-8")
    words = ("--run=~/runs/drawn", "--prompt-file=~/prompts", "--max-new-tokens=2")
    command("generate.py", *words).succeeded()
    command("tools/export_hf.py", "--run=~/runs/drawn", "--out=~/exported").succeeded()
    command("tools/import_hf.py", "~/exported", "--out=~/imported").succeeded()
    command("tools/attention_map.py", "Ann", "--run=~/runs/drawn", "--out=~/map.svg").succeeded()
    names = {"exported", "imported", "map.svg", "prompts", "runs"}
    # Libraries may write hidden files, such as Matplotlib's list of fonts.
    found = {path.name for path in home.iterdir() if not path.name.startswith(".")}
    assert found == names and not Path("~").exists()


@pytest.mark.parametrize("way", ["from inside", "itself", "renamed", "linked", "at the root"])
def test_a_checkpoint_is_found_from_any_folder_and_under_any_name(
    generate, drawn_run, monkeypatch, way
):
    (step,) = Path(drawn_run, "checkpoints").iterdir()
    usual = generate("Ann had", GREEDY + "9", f"--run={step}")
    assert "drawn step-00000001: 9 tokens" in usual.err
    run = str(step.name)
    name = "drawn step-00000001"
    if way == "from inside":
        monkeypatch.chdir(step.parent)
    elif way == "itself":
        monkeypatch.chdir(step)
        run = "."
    elif way == "renamed":
        run = name = "best"
        shutil.copytree(step, run)
    elif way == "linked":
        run = "newest"
        Path(run).symlink_to(step.absolute())
    else:  # a folder without a parent
        monkeypatch.setattr(Path, "resolve", lambda path, strict=False: Path("/", path.name))
        monkeypatch.setattr(checkpoint, "verify", lambda *_, **__: {})
        run = str(step)
        name = "step-00000001"
    result = generate("Ann had", GREEDY + "9", f"--run={run}").succeeded()
    assert result.out == usual.out and f"\n{name}: 9 tokens" in f"\n{result.err}"
