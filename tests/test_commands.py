"""The two commands as a user runs them: what they print, what they leave behind, how they end."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from data.tokenizer import Tokenizer
from inference import generate_text, load
from inference.batch import Sequence
from inference.text import stream_texts
from run import checkpoint
from tests.conftest import LONG, ROOT, SHORT, TINY, Result, continued, saved, tree_of
from tests.run.forks import ranks
from tools.compare.runs import Run
from training.evaluation import sample_text
from training.trainer import Trainer


def test_a_run_leaves_everything_in_its_folder(trained):
    files = {path.relative_to(trained).as_posix() for path in trained.rglob("*") if path.is_file()}
    inside = ("model.safetensors", "state.pt", "config.json", "tokenizer.model", "manifest.json")
    saved = {f"checkpoints/step-{step:08d}/{name}" for step in (2, 4) for name in inside}
    assert files == {".lock", "config.yaml", "metrics.jsonl", "samples.txt", "loss.png", *saved}
    assert {path.name for path in Path().iterdir()} == {
        "runs",
        ".cache",
        "story.txt",
    }  # Hydra leaves nothing
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]
    assert [line["step"] for line in lines if "val_bpb" in line] == [2, 4]
    assert yaml.safe_load((trained / "config.yaml").read_text())["attention"]["kv_heads"] == 2
    assert "--- step 4\n" in (trained / "samples.txt").read_text()


def test_commands_can_be_repeated(command, trained, story):
    again = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400")
    assert command("train.py", *again).code == 0
    assert Path("runs/text-tiny-gqa-2/checkpoints/step-00000004").is_dir()
    finished = command("train.py", *again, "resume=true")
    assert finished.code == 0 and "already at step 4 of 4 (runs/text-tiny-gqa-2)" in finished.err
    further = command("train.py", *again, "resume=true", "steps=6")
    assert further.code == 0 and Path("runs/text-tiny-gqa-2/checkpoints/step-00000006").is_dir()


def test_a_used_folder_needs_resume(command, trained, story):
    again = (
        *TINY,
        *SHORT,
        "data=text",
        f"data.path={story}",
        "data.vocab_size=400",
        f"run_dir={trained}",
    )
    files = [path for path in trained.rglob("*") if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    refused = command("train.py", *again)
    assert refused.code == 2 and "fix: resume=true, or another run_dir" in refused.err
    assert before == {path: path.stat().st_mtime_ns for path in files}


def test_nothing_to_resume_starts_fresh_and_says_so(command, story):
    result = command(
        "train.py",
        *TINY,
        *SHORT,
        "data=text",
        f"data.path={story}",
        "data.vocab_size=400",
        "resume=true",
    )
    assert result.code == 0 and "nothing to resume" in result.err


def test_a_folder_without_a_checkpoint_starts_fresh_and_says_so(command, story):
    Path("begun").mkdir()  # by a run that was killed before its first save
    words = ("data=text", f"data.path={story}", "data.vocab_size=400", "resume=true")
    result = command("train.py", *TINY, *SHORT, *words, "run_dir=begun")
    assert result.code == 0 and "nothing to resume in begun" in result.err


@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_that_does_not_exist_is_not_resumed(tmp_path, story, monkeypatch, processes):
    monkeypatch.chdir(tmp_path)
    words = ("steps=2", "data=text", f"data.path={story}", "data.vocab_size=400", "resume=true")
    words = (*TINY, *words, "run_dir=runs/mispelt")
    codes, told = ranks([sys.executable, ROOT / "train.py", *words], processes, tmp_path)
    (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert line == (
        "error: there is nothing to resume (run_dir=runs/mispelt does not exist). "
        "fix: the folder of a run, or leave resume out to begin one there"
    )
    assert codes == [2] * processes
    assert not (tmp_path / "runs").exists()


def test_a_place_where_no_folder_can_be_is_storage(command, story):
    words = ("data=text", f"data.path={story}", "data.vocab_size=400", f"run_dir={story}/x")
    result = command("train.py", *TINY, *SHORT, *words)
    assert result.code == 74 and "fix: another run_dir" in result.err


def test_another_model_does_not_take_up_a_run(command, trained, story):
    again = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400", "resume=true")
    refused = command("train.py", *again, "model.depth=3", f"run_dir={trained}")
    assert refused.code == 2 and "model.depth (then 2, now 3)" in refused.err
    refused = command("train.py", *again, "optimizer=adamw", f"run_dir={trained}")
    assert refused.code == 2 and "optimizer._target_ (then training.optimizers.muon" in refused.err


def test_a_run_can_begin_with_the_weights_of_another(command, trained, story):
    before = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    words = (
        *TINY[1:],
        *SHORT,
        "data=text",
        f"data.path={story}",
        f"init_from={trained}",
        "name=more",
    )
    result = command("train.py", *words)
    assert result.code == 0, result.err
    look, after = [
        json.loads(line) for line in Path("runs/more/metrics.jsonl").read_text().splitlines()[:2]
    ]
    assert look["step"] == 0 and look["val_loss"] == before[-1]["val_loss"]
    # Over 5 seeds, in fp32 and in bf16, four steps take 0.75 off the loss of a batch.
    assert after["train_loss"] < before[0]["train_loss"] - 0.1


def test_a_sweep_gives_each_job_a_run_folder(command, story):
    words = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400")
    assert command("train.py", "-m", *words, "attention=gqa,mqa").code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "multirun.yaml",
        "text-tiny-gqa",
        "text-tiny-mqa",
    ]
    assert {path.name for path in Path().iterdir()} == {"runs", ".cache", "story.txt"}


OUT_OF_MEMORY = {"8": "micro_batch=4,", "null": "micro_batch=4,", "1": "a smaller model or context"}


@pytest.mark.parametrize("micro", OUT_OF_MEMORY)
def test_running_out_of_memory_proposes_a_smaller_micro_batch(command, story, monkeypatch, micro):
    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Much more text")

    monkeypatch.setattr(Trainer, "train_step", full)
    result = command(
        "train.py",
        *TINY,
        *SHORT,
        "data=text",
        f"data.path={story}",
        "data.vocab_size=400",
        f"micro_batch={micro}",
    )
    assert result.code == 2 and f"fix: {OUT_OF_MEMORY[micro]}" in result.err.splitlines()[-1]


def test_a_model_that_does_not_fit_ends_in_a_line(command, story, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Much more text")

    monkeypatch.setattr("training.trainer.build_parallel", full)
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    result = command("train.py", *TINY, *SHORT, *text)
    line = result.err.splitlines()[-1]
    assert result.code == 2 and line.endswith("CUDA out of memory. fix: a smaller model")


def test_a_run_says_what_bounds_it_and_goes_on_for_more_passes(command, story):
    text = ("data=text", f"data.path={story}", "data.vocab_size=400", "batch_tokens=256")
    words = (*TINY, *text, "steps=null", "run_dir=run")
    ends = []
    for epochs in (1, 1, 2):
        resume = f"resume={str(Path('run').exists()).lower()}"
        result = command("train.py", *words, f"max_epochs={epochs}", resume)
        assert result.code == 0 and "micro_batch=4 (at most 8 without CUDA)" in result.err
        ends.append(int(checkpoint.newest_checkpoint(Path("run")).name.removeprefix("step-")))
        assert f"at most {ends[-1]} steps (max_epochs={epochs})" in result.err
    assert ends[0] == ends[1] and ends[2] in (2 * ends[0], 2 * ends[0] + 1)
    assert yaml.safe_load(Path("run/config.yaml").read_text())["micro_batch"] is None


CPU = ("--device", "cpu")  # where a batch and a row alone are summed alike
GREEDY = ("Ann had", "--temperature", "0", "--max-new-tokens", "100")


def test_greedy_text_is_the_same_without_a_cache_past_the_context(command, drawn_run):
    cached = command("generate.py", *CPU, *GREEDY)
    assert cached.code == 0 and len(cached.out) > 50
    assert command("generate.py", *CPU, *GREEDY, "--no-cache").out == cached.out
    assert "bytes of cache" in cached.err and "tokens/s" in cached.err


def test_a_cache_in_int8_is_smaller_and_says_so(command, drawn_run):
    exact, small = (
        command("generate.py", *CPU, *GREEDY, *words).err
        for words in ((), ("--cache-dtype", "int8"))
    )
    exact, small = (
        int(re.search(r"([\d,]+) bytes of cache", err)[1].replace(",", ""))
        for err in (exact, small)
    )
    assert small == exact * (16 + 2) / (4 * 16)  # of head dimension 16, with a scale each


@pytest.mark.parametrize("variant", ["gqa", "delta"])
def test_attention_can_be_drawn(command, tokenizer, variant):
    saved(Path("runs/drawn"), tree_of(variant), tokenizer)
    result = command("generate.py", *CPU, "Ann had $3 and $4", "--attention-map", "map.png")
    assert result.code == 0, result.err
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")
    assert command("generate.py", *CPU, "Ann", "--attention-map", "map.wav").code == 2


def test_samples_differ_and_repeat_with_their_seed(command, drawn_run):
    words = (
        "Ann had",
        "--num-samples",
        "3",
        "--max-new-tokens",
        "8",
        "--top-k",
        "0",
        "--top-p",
        "1",
    )
    one, same, other = (
        command("generate.py", *CPU, *words, "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert one == same != other


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_ragged_batch_is_each_prompt_alone(command, drawn_run, temperature):
    prompts = ["Ann", "Bob had an old map. Cleo", "Dan saw a small dog and said: may I"]
    Path("prompts.txt").write_text("\n".join(prompts))
    rest = ("--temperature", temperature, "--max-new-tokens", "12", "--num-samples", "2")
    together = command("generate.py", *CPU, "--prompt-file", "prompts.txt", *rest)
    alone = [command("generate.py", *CPU, prompt, *rest) for prompt in prompts]
    assert bodies(together) == [text for result in alone for text in bodies(result)]


def bodies(result: Result) -> list[str]:
    """What is below each heading."""
    _, *texts = re.split(r"^--- .*\n", result.out, flags=re.MULTILINE)
    return texts


def test_several_texts_are_headed_by_their_prompts(command, drawn_run):
    prompts = ["Ann had", "  a\ttab  " + "and more " * 20, "<s>"]
    Path("prompts.txt").write_text("\n".join(prompts))
    greedy = ("--temperature", "0", "--max-new-tokens", "5")
    texts = [command("generate.py", *CPU, prompt, *greedy).out for prompt in prompts]
    assert not any("---" in text for text in texts)  # one text on a pipe is alone
    rest = ("--num-samples", "2", "--batch-size", "4")
    result = command("generate.py", *CPU, "--prompt-file", "prompts.txt", *greedy, *rest)
    names = ["Ann had", "a tab " + "and more " * 7 + "a", "<s>"]
    expected = ""
    for number in range(6):
        expected += f"--- {number + 1}: {names[number // 2]}\n{texts[number // 2]}"
    assert result.out == expected


def test_a_text_on_a_terminal_is_headed_by_its_prompt(drawn_run):
    """A conversation is not: its prompts were typed there."""
    words = [sys.executable, str(ROOT / "generate.py"), *CPU, "--max-new-tokens", "5"]
    piped = subprocess.run([*words, "Ann had"], capture_output=True, check=True).stdout
    for more, heading in ((["Ann had"], b"--- 1: Ann had\n"), (["--interactive"], b"")):
        reader, terminal = os.openpty()
        with open(reader, "rb", buffering=0) as shown:
            subprocess.run([*words, *more], input=b"Ann had\n", stdout=terminal, check=True)
            assert shown.read(1000).replace(b"\r\n", b"\n") == heading + piped
            os.close(terminal)


def test_a_call_generates_what_the_command_prints(command, drawn_run):
    prompts = ["Ann had", "Bob"]
    Path("prompts.txt").write_text("\n".join(prompts))
    words = (
        "--seed",
        "3",
        "--stop",
        "e",
        "--top-k",
        "9",
        "--top-p",
        "0.9",
        "--max-new-tokens",
        "30",
    )
    printed = command("generate.py", *CPU, "--prompt-file", "prompts.txt", *words)
    model, tokenizer, _ = load(str(drawn_run), "cpu")
    options = {"seed": 3, "stop_texts": ["e"], "top_k": 9, "top_p": 0.9, "temperature": 0.8}
    texts = generate_text(model, tokenizer, prompts, max_new_tokens=30, **options)
    assert [text + "\n" for text in texts] == bodies(printed)
    assert generate_text(model, tokenizer, [], max_new_tokens=1) == []
    assert generate_text(model, tokenizer, "Ann", max_new_tokens=0) == [""]


def test_json_lines_are_answered_by_json_lines(command, drawn_run):
    prompts = ["Ann", 'Bob\nsaid: "may I', "Жили"]
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    rest = ("--temperature", "0", "--max-new-tokens", "12")
    result = command(
        "generate.py", *CPU, "--prompt-file", "prompts.jsonl", "--batch-size", "2", *rest
    )
    expected = [
        {"prompt": p, "text": command("generate.py", *CPU, p, *rest).out[:-1]} for p in prompts
    ]
    assert [json.loads(line) for line in result.out.split("\n")[:-1]] == expected


def test_a_conversation_goes_on_from_the_text_before(command, tokenizer, monkeypatch):
    """Token by token as one text that grows; its text could be read as other tokens."""
    model, tokens, expected = (
        saved(Path("runs/drawn"), tree_of("gqa"), tokenizer),
        [tokenizer.bos],
        "",
    )
    for prompt in ("Ann had", "Bob saw"):
        tokens += tokenizer.encode(prompt)
        (drawn,) = continued(model, [tokens], 9)
        tokens += drawn
        expected += tokenizer.decode(drawn) + "\n"
    lines = SimpleNamespace(buffer=io.BytesIO(b"Ann had\n\nBob saw\n"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", lines)
    result = command(
        "generate.py", *CPU, "--interactive", "--temperature", "0", "--max-new-tokens", "9"
    )
    assert result.code == 0 and result.out == expected and "18 tokens" in result.err


def test_drafts_and_fewer_bits_change_the_speed_alone(command, drawn_run):
    plain = command("generate.py", *CPU, *GREEDY)
    assert command("generate.py", *CPU, *GREEDY, "--prompt-lookup", "4").out == plain.out
    assert "drawn step-00000001" in plain.err
    for dtype in ("bf16", "int8"):
        assert command("generate.py", *CPU, *GREEDY, "--dtype", dtype).code == 0


def spoken(sequence: Sequence, tokens: list[int]) -> Iterator[Sequence]:
    """What the engine yields where these tokens are drawn, until the sequence is finished."""
    for token in tokens:
        if not sequence.is_finished:
            sequence.append(token)
            yield sequence


def test_a_text_ends_where_its_model_ends_it(story):
    tokenizer = Tokenizer.train([story.read_text()], 400)
    sequence = Sequence([tokenizer.bos], 99, eos=tokenizer.eos_ids)
    tokens = [*tokenizer.encode("Ann had an old"), tokenizer.eos]
    *_, text = stream_texts(spoken(sequence, tokens), tokenizer, ["old map"])
    assert sequence.finish_reason == "eos" and sequence.tokens[1:] == tokens
    assert text.text == "Ann had an old"  # what may have become a stop, too


def test_a_text_ends_before_its_first_stop(story):
    """The stop may begin in one token and end in another."""
    tokenizer = Tokenizer.train([story.read_text()], 400)
    sequence = Sequence([tokenizer.bos], 99, eos=tokenizer.eos_ids)
    tokens = tokenizer.encode("Ann had an old map")
    for text in stream_texts(spoken(sequence, tokens), tokenizer, ["map", "n old", "@"]):
        assert "Ann had a".startswith(text.text)
    assert text.text == "Ann had a" and sequence.finish_reason == "stop"
    assert len(sequence.tokens) < 1 + len(tokens)


def test_text_ends_before_the_stop_text(command, drawn_run):
    free = command("generate.py", *CPU, *GREEDY).out
    stop = free[20:26]
    cut = command("generate.py", *CPU, *GREEDY, "--stop", "@@@", "--stop", stop).out
    assert cut == free[: free.index(stop)] + "\n"


@pytest.mark.parametrize("prompt", ["", "a=b, ${oc.env:HOME} 'x' {y}", "-", "\n", "Жили 🐈"])
def test_any_prompt_is_a_prompt(command, drawn_run, monkeypatch, prompt):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Ann had")))
    result = command(
        "generate.py", *CPU, "--max-new-tokens", "3", "--temperature", "0", "--", prompt
    )
    assert result.code == 0, result.err
    if prompt == "-":
        assert (
            result.out
            == command(
                "generate.py", *CPU, "Ann had", "--max-new-tokens", "3", "--temperature", "0"
            ).out
        )


def test_a_long_prompt_loses_its_beginning_with_a_warning(command, drawn_run):
    result = command("generate.py", *CPU, "Ann had a red ball. " * 40, "--max-new-tokens", "2")
    assert result.code == 0
    assert "context is 64" in result.err


def test_generation_without_any_run_says_how_to_get_one(command):
    result = command("generate.py", "a")
    assert result.code == 2 and "fix: python train.py" in result.err


DATA = {
    "text": ("data=text", "data.path=story.txt", "data.vocab_size=400"),
    "recall": ("data=recall", "data.pairs=[2,4]"),
}


@pytest.mark.parametrize("data", DATA)
def test_two_processes_learn_what_one_does(command, tmp_path, story, data):
    words = (*TINY, "steps=8", *DATA[data], "micro_batch=4")
    assert command("train.py", *words, "run_dir=alone").code == 0
    codes, told = ranks([sys.executable, ROOT / "train.py", *words, "run_dir=both"], 2, tmp_path)
    assert codes == [0, 0], told
    alone, both = losses_of(tmp_path / "alone"), losses_of(tmp_path / "both")
    assert len(alone) == 9 and alone == pytest.approx(
        both, abs=1e-3
    )  # equal, over 5 seeds in fp32 and in bf16
    # What is evaluated is summed over processes.
    last = [Run.read(tmp_path / name).last for name in ("alone", "both")]
    counts = [{name: part["tokens"] for name, part in run["slices"].items()} for run in last]
    assert counts[0] == counts[1] and sum(counts[0].values()) > 0
    assert last[0].get("recall_accuracy") == last[1].get("recall_accuracy")


SHARDED = [
    ("optimizer=adamw", "precision=fp32", "micro_batch=2"),
    ("clip=null", "precision=fp32", "micro_batch=4"),
    ("optimizer=adamw", "precision=bf16", "micro_batch=2", "activation_checkpointing=true"),
    ("optimizer=lion", "precision=fp32", "micro_batch=2"),
]


@pytest.mark.parametrize("more", SHARDED)
def test_a_sharded_run_learns_what_one_process_does_and_resumes_on_any_number(
    command, tmp_path, story, more
):
    often = ("steps=4", "eval_every=2", "sample_every=2", "save_every=2")
    words = (*TINY, *often, "data=text", f"data.path={story}", "data.vocab_size=400", *more)
    assert command("train.py", *words, "run_dir=alone").code == 0
    train = [sys.executable, ROOT / "train.py", *words]
    codes, told = ranks([*train, "run_dir=spread", "sharded=true"], 2, tmp_path)
    assert codes == [0, 0], told
    # In bf16, over 5 seeds: losses differ by at most 0.00002, norms by 0.00007 of theirs.
    close, spread = 1e-3 if "precision=bf16" in more else 1e-5, losses_of(tmp_path / "spread")
    if "optimizer=lion" in more:
        close = 1e-6  # a sign hides what rounding does
    assert losses_of(tmp_path / "alone") == pytest.approx(spread, abs=close)
    norms = [losses_of(tmp_path / name, "grad_norm") for name in ("alone", "spread")]
    assert norms[0] == pytest.approx(norms[1], rel=10 * close)
    second = tmp_path / "spread" / "checkpoints" / "step-00000002"
    if "precision=fp32" in more:  # the text of two processes is that of one with their weights
        tokenizer = Tokenizer.load(second / "tokenizer.model")
        text = sample_text(checkpoint.load_model(second, "cpu"), tokenizer, 2, stop=lambda: 0)
        assert (
            (tmp_path / "spread" / "samples.txt")
            .read_text()
            .startswith(f"--- step 2\n{text}\n--- step 4\n")
        )
    shutil.rmtree(second.with_name("step-00000004"))
    for processes in (0, 4) if more == SHARDED[0] else (2,):
        shutil.copytree(tmp_path / "spread", tmp_path / f"on{processes}")
        resume = (f"run_dir=on{processes}", "resume=true", f"sharded={str(processes > 1).lower()}")
        if processes == 0:
            alone = command("train.py", *words, *resume)
            codes, told = [alone.code], alone.err
        else:
            codes, told = ranks([*train, *resume], processes, tmp_path)
        assert set(codes) == {0} and "resuming step 2" in told, told
        again = losses_of(tmp_path / f"on{processes}")
        assert again == spread if processes == 2 else again == pytest.approx(spread, abs=close)


def test_infinite_weights_of_one_process_end_all(tmp_path, story):
    (tmp_path / "train.py").write_text(
        f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from run import checkpoint
from training.trainer import Trainer
save = Trainer.save
@torch.no_grad()
def spoiled(self):
    if self.ranks.rank == 1:
        next(self.model.parameters()).to_local().fill_(float("inf"))
    save(self)
Trainer.save = spoiled
import runpy
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    )
    words = (
        *TINY,
        "steps=2",
        "save_every=1",
        "sharded=true",
        "data=text",
        f"data.path={story}",
        "data.vocab_size=400",
    )
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        "train.py",
    ]
    how = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": LONG}
    done = subprocess.run([*start, *words, "micro_batch=4"], **how)
    assert "error: training diverged (step 1 made the weights infinite)" in done.stderr
    assert done.stderr.count("exitcode  : 4") == 2 and not [
        *tmp_path.glob("runs/*/checkpoints/step-*")
    ]


def losses_of(run: Path, *keys: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        line[key] for line in lines for key in keys or ("train_loss", "val_loss") if key in line
    ]


def test_a_reader_that_has_enough_is_no_error(drawn_run):
    words = f"{sys.executable} {ROOT / 'generate.py'} Ann --max-new-tokens 100 | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words], capture_output=True, timeout=LONG
    )
    assert done.returncode == 0 and len(done.stdout) == 10 and b"Traceback" not in done.stderr
