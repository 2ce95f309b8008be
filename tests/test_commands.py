"""The two commands as a user runs them: what they print, what they leave behind, how they end."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.conftest import ROOT, TINY
from training.trainer import Trainer

SHORT = ("steps=4", "eval_every=2", "sample_every=4", "save_every=2")


@pytest.fixture
def trained(command, story):
    """A tiny run on the story."""
    result = command("train.py", *TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400")
    assert result.code == 0, result.err
    return Path("runs/text-tiny-gqa")


def test_a_run_leaves_everything_in_its_folder(trained):
    files = {path.relative_to(trained).as_posix() for path in trained.rglob("*") if path.is_file()}
    inside = ("model.safetensors", "state.pt", "config.json", "tokenizer.model", "manifest.json")
    saved = {f"checkpoints/step-{step:08d}/{name}" for step in (2, 4) for name in inside}
    assert files == {"config.yaml", "metrics.jsonl", "samples.txt", "loss.png", *saved}
    assert {path.name for path in Path().iterdir()} == {"runs", ".cache", "story.txt"}  # Hydra leaves nothing
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
    again = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400", f"run_dir={trained}")
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    refused = command("train.py", *again)
    assert refused.code == 2 and "fix: resume=true, or another run_dir" in refused.err
    assert before == {path: path.stat().st_mtime_ns for path in trained.rglob("*")}


def test_nothing_to_resume_starts_fresh_and_says_so(command, story):
    result = command("train.py", *TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400", "resume=true")
    assert result.code == 0 and "nothing to resume" in result.err


def test_a_place_where_no_folder_can_be_is_storage(command, story):
    words = ("data=text", f"data.path={story}", "data.vocab_size=400", f"run_dir={story}/x")
    result = command("train.py", *TINY, *SHORT, *words)
    assert result.code == 74 and "fix: another run_dir" in result.err


def test_another_model_does_not_take_up_a_run(command, trained, story):
    again = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400", "resume=true")
    refused = command("train.py", *again, "model.depth=3", f"run_dir={trained}")
    assert refused.code == 2 and "model.depth (checkpoint 2, now 3)" in refused.err
    refused = command("train.py", *again, "optimizer=adamw", f"run_dir={trained}")
    assert refused.code == 2 and "optimizer (checkpoint training.optimizers.muon" in refused.err


def test_a_run_can_begin_with_the_weights_of_another(command, trained, story):
    before = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    result = command("train.py", *TINY, *SHORT, "data=text", f"data.path={story}", f"init_from={trained}", "name=more")
    assert result.code == 0, result.err
    after = json.loads(Path("runs/more/metrics.jsonl").read_text().splitlines()[0])
    assert after["train_loss"] < before[0]["train_loss"] - 0.1


def test_a_sweep_gives_each_job_a_run_folder(command, story):
    words = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400")
    assert command("train.py", "-m", *words, "attention=gqa,mqa").code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["multirun.yaml", "text-tiny-gqa", "text-tiny-mqa"]
    assert {path.name for path in Path().iterdir()} == {"runs", ".cache", "story.txt"}


BAD_TRAINING = {
    "an unknown key": (["colour=blue"], 1, "colour"),
    "an added key": (["+colour=blue"], 2, "colour"),
    "an unknown choice": (["attention=magic"], 1, "magic"),
    "several faults": (["steps=0", "optimizer.lr=nan"], 2, "optimizer.lr"),
    "heads that do not divide": (["model.heads=3"], 2, "heads=3"),
    "kv heads that do not divide": (["attention.kv_heads=3"], 2, "kv_heads=3"),
    "an odd head dimension": (["model.dim=36"], 2, "36"),
    "a target of elsewhere": (["attention._target_=os.system"], 2, "os.system"),
    "a knob of elsewhere": (["+attention.colour=1"], 2, "colour"),
    "no GPU": (["device=cuda"], 2, "device=cuda"),
    "fp16 on a CPU": (["precision=fp16"], 2, "fp16"),
    "no path": (["data=text"], 2, "data.path"),
    "a missing file": (["data=text", "data.path=absent.txt"], 2, "absent.txt"),
    "an empty file": (["data=text", "data.path=empty.txt"], 2, "empty.txt"),
    "bytes that are no text": (["data=text", "data.path=latin.txt"], 2, "byte 5"),
    "too little text": (
        ["data=text", "data.path=story.txt", "data.vocab_size=400", "batch_tokens=65536"],
        2,
        "need 65",
    ),
    "a vocabulary too small": (["data=text", "data.path=story.txt", "data.vocab_size=260"], 2, "260"),
    "nothing to begin with": (["init_from=absent"], 2, "absent"),
    "a dataset that is not reached": (["data=tinystories"], 2, "roneneldan/TinyStories"),
    "no heads": (["model.heads=0"], 2, "model.heads"),
    "a negative knob": (["attention.kv_heads=-1"], 2, "attention.kv_heads"),
    "a window of nothing": (["attention.window=0"], 2, "attention.window"),
    "a window for the delta rule": (["attention=delta", "+attention.kinds.delta.window=8"], 2, "window"),
    "an odd rotary dimension": (["attention=mla", "attention.rope_dim=3"], 2, "3"),
    "a rotary part that is odd": (["attention.rope_fraction=0.2"], 2, "rope_fraction=0.2 is 3.2"),
    "a window and a chunk": (["attention.window=5", "attention.chunk=4"], 2, "window=5 chunk=4"),
    "heads that pair with none": (["attention=differential", "attention.kv_heads=1"], 2, "kv_heads=1"),
    "dropout of a difference": (["attention=differential", "attention.dropout=0.1"], 2, "dropout=0.1, Diff"),
    "too much dropout": (["attention.dropout=1.5"], 2, "1.5"),
    "no latent": (["attention=mla", "attention.rank=0"], 2, "attention.rank"),
    "a cap of nothing": (["attention.softcap=0"], 2, "softcap"),
    "a kind that is not there": (["attention=nope", "attention.pattern=[rope,hope]"], 2, "'hope' of ['nope', 'rope']"),
    "layers that cannot share": (["attention=shared_kv", "attention.share=all"], 2, "'all'"),
    "a size in words": (["model.dim=wide"], 2, "model.dim"),
    "one beta": (["optimizer=adamw", "optimizer.betas=[0.9]"], 2, "betas"),
    "a window of half tokens": (["attention.window=9.5"], 2, "9.5"),
    "a knob in words": (["attention.kv_heads=zero"], 2, "zero"),
    "a base in words": (["attention.rope_base=x"], 2, "str"),
    "a key with dashes": (["--attention=mha"], 2, "fix: attention=mha"),
    "a share above one": (["schedule.cooldown=2"], 2, "cooldown"),
    "no holdout": (["data=text", "data.path=story.txt", "data.holdout=0"], 2, "holdout"),
    "a number for a path": (["data=text", "data.path=2024"], 2, "2024"),
    "faults of a rule and of the model": (["steps=0", "model.heads=3"], 2, "heads=3"),
}


@pytest.mark.parametrize("case", BAD_TRAINING)
def test_bad_input_to_training_is_a_line_and_a_code(command, story, monkeypatch, case):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"cafe \xff")
    words, code, value = BAD_TRAINING[case]
    result = command("train.py", *TINY, "steps=2", *words)
    assert (result.code, result.out) == (code, "")
    lines = result.err.splitlines()
    assert all(line.startswith("error: ") and ". fix: " in line for line in lines) and value in result.err
    assert len(lines) == (2 if "faults" in case else 1)
    assert {path.name for path in Path().iterdir()} == {"story.txt", "empty.txt", "latin.txt"}


def test_running_out_of_memory_proposes_a_smaller_micro_batch(command, story, monkeypatch):
    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Much more text")

    monkeypatch.setattr(Trainer, "optimize", full)
    result = command(
        "train.py", *TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400", "micro_batch=8"
    )
    assert result.code == 2 and "micro_batch=4" in result.err.splitlines()[-1]


CPU = ("--device", "cpu")  # where a batch and a row alone are summed alike
GREEDY = ("Ann had", "--temperature", "0", "--max-new-tokens", "100")


def test_greedy_text_is_the_same_without_a_cache_past_the_context(command, trained):
    cached = command("generate.py", *CPU, *GREEDY)
    assert cached.code == 0 and len(cached.out) > 50
    assert command("generate.py", *CPU, *GREEDY, "--no-cache").out == cached.out
    assert "bytes of cache" in cached.err and "tokens/s" in cached.err


def test_a_cache_in_int8_is_smaller_and_says_so(command, trained):
    exact, small = (command("generate.py", *CPU, *GREEDY, *words).err for words in ((), ("--cache-dtype", "int8")))
    exact, small = (int(re.search(r"([\d,]+) bytes of cache", err)[1].replace(",", "")) for err in (exact, small))
    assert small == exact * (16 + 2) / (4 * 16)  # of head dimension 16, with a scale each


@pytest.mark.parametrize("words", [(), ("attention=delta", "model.depth=3")])
def test_attention_can_be_drawn(command, story, words):
    text = ("data=text", f"data.path={story}", "data.vocab_size=400", "steps=2")
    assert command("train.py", *TINY, *text, *words).code == 0
    result = command("generate.py", *CPU, "Ann had $3 and $4", "--attention-map", "map.png")
    assert result.code == 0, result.err
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")
    assert command("generate.py", *CPU, "Ann", "--attention-map", "map.wav").code == 2


def test_samples_differ_and_repeat_with_their_seed(command, trained):
    words = ("Ann had", "--num-samples", "3", "--max-new-tokens", "8", "--top-k", "0", "--top-p", "1")
    one, same, other = (command("generate.py", *CPU, *words, "--seed", seed).out for seed in ("1", "1", "2"))
    assert one == same != other


def test_a_ragged_batch_is_each_prompt_alone(command, trained):
    prompts = ["Ann", "Bob had an old map. Cleo", "Dan saw a small dog and said: may I"]
    Path("prompts.txt").write_text("\n".join(prompts))
    rest = ("--temperature", "0", "--max-new-tokens", "12")
    together = command("generate.py", *CPU, "--prompt-file", "prompts.txt", *rest)
    assert together.out == "".join(command("generate.py", *CPU, prompt, *rest).out for prompt in prompts)


def test_text_ends_before_the_stop_text(command, trained):
    free = command("generate.py", *CPU, *GREEDY).out
    stop = free[20:26]
    cut = command("generate.py", *CPU, *GREEDY, "--stop", stop).out
    assert cut == free[: free.index(stop)] + "\n"


@pytest.mark.parametrize("prompt", ["", "a=b, ${oc.env:HOME} 'x' {y}", "-", "\n", "Жили 🐈"])
def test_any_prompt_is_a_prompt(command, trained, monkeypatch, prompt):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Ann had")))
    result = command("generate.py", *CPU, "--max-new-tokens", "3", "--temperature", "0", "--", prompt)
    assert result.code == 0, result.err
    if prompt == "-":
        assert result.out == command("generate.py", *CPU, "Ann had", "--max-new-tokens", "3", "--temperature", "0").out


def test_a_long_prompt_loses_its_beginning_with_a_warning(command, trained):
    result = command("generate.py", *CPU, "Ann had a red ball. " * 40, "--max-new-tokens", "2")
    assert result.code == 0
    assert "context is 64" in result.err


def test_no_new_tokens_are_no_text(command, trained):
    assert command("generate.py", *CPU, "Ann", "--max-new-tokens", "0").out.strip() == ""


BAD_GENERATION = {
    "no run": (["a", "--run", "absent"], 2, "absent"),
    "no prompt": ([], 2, "prompt"),
    "two prompts": (["a", "--prompt-file", "story.txt"], 2, "prompt"),
    "an unknown option": (["a", "--colour", "blue"], 2, "--colour"),
    "a negative temperature": (["a", "--temperature", "-1"], 2, "-1"),
    "no number": (["a", "--temperature", "nan"], 2, "nan"),
    "an infinite one": (["a", "--temperature", "inf"], 2, "inf"),
    "a negative top-k": (["a", "--top-k", "-1"], 2, "-1"),
    "a top-p above 1": (["a", "--top-p", "1.5"], 2, "1.5"),
    "a negative length": (["a", "--max-new-tokens", "-5"], 2, "-5"),
    "no GPU": (["a", "--device", "cuda"], 2, "cuda"),
    "a missing file": (["--prompt-file", "absent.txt"], 2, "absent.txt"),
    "an empty file": (["--prompt-file", "empty.txt"], 2, "empty.txt"),
    "a file that is no text": (["--prompt-file", "latin.txt"], 2, "byte 5"),
}


@pytest.mark.parametrize("case", BAD_GENERATION)
def test_bad_input_to_generation_is_a_line_and_a_code(command, trained, monkeypatch, case):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"cafe \xff")
    words, code, value = BAD_GENERATION[case]
    result = command("generate.py", *words)
    assert (result.code, result.out) == (code, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ") and ". fix: " in line and value in line


def test_generation_without_any_run_says_how_to_get_one(command):
    result = command("generate.py", "a")
    assert result.code == 2 and "fix: python train.py" in result.err


def run(*words: str, processes: int = 0, folder: Path) -> subprocess.CompletedProcess:
    """The command in processes of its own."""
    start = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"] if processes else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *start, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_two_processes_learn_what_one_does(tmp_path, story):
    words = (
        str(ROOT / "train.py"),
        *TINY,
        "steps=50",
        "data=text",
        f"data.path={story}",
        "data.vocab_size=400",
        "micro_batch=4",
    )
    losses = []
    for processes in (0, 2):
        done = run(*words, f"run_dir=run{processes}", processes=processes, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (tmp_path / f"run{processes}" / "metrics.jsonl").read_text().splitlines()]
        losses.append([line.get("train_loss", line.get("val_loss")) for line in lines])
    assert len(losses[0]) == 51
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0][-1] < losses[0][0] - 1


def test_a_reader_that_has_enough_is_no_error(trained):
    words = f"{sys.executable} {ROOT / 'generate.py'} Ann --max-new-tokens 100 | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.encode()) == 10 and "Traceback" not in done.stderr
