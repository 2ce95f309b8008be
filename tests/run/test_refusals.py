"""Bad input is one line with a fix and an exit code, and nothing is written."""

from pathlib import Path

import pytest
import torch

from tests.conftest import TINY

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
    "a vocabulary too small": (
        ["data=text", "data.path=story.txt", "data.vocab_size=260"],
        2,
        "260",
    ),
    "two models to begin with": (["init_from=absent"], 2, "(model=tiny). fix: leave"),
    "a dataset that is not reached": (["data=tinystories"], 2, "roneneldan/TinyStories"),
    "no heads": (["model.heads=0"], 2, "model.heads"),
    "a negative knob": (["attention.kv_heads=-1"], 2, "attention.kv_heads"),
    "a window of nothing": (["attention.window=0"], 2, "attention.window"),
    "a window for the delta rule": (
        ["attention=delta", "+attention.kinds.delta.window=8"],
        2,
        "window",
    ),
    "an odd rotary dimension": (["attention=mla", "attention.rope_dim=3"], 2, "3"),
    "a rotary part that is odd": (["attention.rope_fraction=0.2"], 2, "rope_fraction=0.2 is 3.2"),
    "a window and a chunk": (["attention.window=5", "attention.chunk=4"], 2, "window=5 chunk=4"),
    "heads that pair with none": (
        ["attention=differential", "attention.kv_heads=1"],
        2,
        "kv_heads=1",
    ),
    "dropout of a difference": (
        ["attention=differential", "attention.dropout=0.1"],
        2,
        "dropout=0.1, Diff",
    ),
    "too much dropout": (["attention.dropout=1.5"], 2, "1.5"),
    "no latent": (["attention=mla", "attention.rank=0"], 2, "attention.rank"),
    "a cap of nothing": (["attention.softcap=0"], 2, "softcap"),
    "a kind that is not there": (
        ["attention=nope", "attention.pattern=[rope,hope]"],
        2,
        "'hope' of ['nope', 'rope']",
    ),
    "layers that cannot share": (["attention=shared_kv", "attention.share=all"], 2, "'all'"),
    "a flag in words": (["attention.sink=no"], 2, "sink must be bool (got 'no')"),
    "a flag for a number": (
        ["attention.softcap=true"],
        2,
        "softcap must be float | None (got True)",
    ),
    "a name for a scaling": (["attention.rope_scaling=YaRN"], 2, "rope_scaling"),
    "a knob of a kind in no place": (
        ["attention=local_global", "attention.window=16"],
        1,
        "attention.kinds.local.window",
    ),
    "a size in words": (["model.dim=wide"], 2, "model.dim"),
    "one beta": (["optimizer=adamw", "optimizer.betas=[0.9]"], 2, "betas"),
    "a window of half tokens": (["attention.window=9.5"], 2, "9.5"),
    "a knob in words": (["attention.kv_heads=zero"], 2, "zero"),
    "a base in words": (["attention.rope_base=x"], 2, "(got 'x')"),
    "a key with dashes": (["--attention=mha"], 2, "fix: attention=mha"),
    "a group of nothing": (["attention=null"], 2, "attention=gqa"),
    "no name for a group": (["data="], 2, "data="),
    "a share above one": (["schedule.cooldown=2"], 2, "cooldown"),
    "no holdout": (["data=text", "data.path=story.txt", "data.holdout=0"], 2, "holdout"),
    "a number for a path": (["data=text", "data.path=2024"], 2, "2024"),
    "faults of a rule and of the model": (["steps=0", "model.heads=3"], 2, "heads=3"),
    "faults of everything": (
        [
            "device=cuda",
            "init_from=absent",
            "data=text",
            "model.heads=7",
            "schedule.cooldown=2",
            "steps=0",
        ],
        2,
        "data.path",
    ),
}


@pytest.mark.parametrize("case", BAD_TRAINING)
def test_bad_input_to_training_is_a_line_and_a_code(command, story, monkeypatch, case):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"cafe \xff")
    words, code, value = BAD_TRAINING[case]
    result = command("train.py", *TINY, "steps=2", *words)
    assert (result.code, result.out) == (code, "")
    lines = result.err.splitlines()
    assert (
        all(line.startswith("error: ") and ". fix: " in line for line in lines)
        and value in result.err
    )
    assert len(lines) == {"faults of everything": 6}.get(case, 2 if "faults" in case else 1)
    assert {path.name for path in Path().iterdir()} == {"story.txt", "empty.txt", "latin.txt"}


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
    "JSON without a prompt": (["--prompt-file", "lines.jsonl"], 2, "line 3"),
    "no kernel for int8": (["a", "--device", "mps", "--dtype", "int8"], 2, "int8"),
    "a prompt and a file": (["a", "--prompt-file", "latin.txt"], 2, "--prompt-file"),
    "half a character": (["--prompt-file", "half.jsonl"], 2, "line 1"),
    "deep JSON": (["--prompt-file", "deep.jsonl"], 2, "line 1"),
    "no text to stop at": (["a", "--stop", ""], 2, "--stop"),
    "no tokens": (["a", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
    "guesses without a cache": (["a", "--no-cache", "--prompt-lookup", "3"], 2, "--prompt-lookup"),
    "a conversation without a cache": (["--interactive", "--no-cache"], 2, "cache"),
}


@pytest.mark.parametrize("case", BAD_GENERATION)
def test_bad_input_to_generation_is_a_line_and_a_code(command, drawn_run, monkeypatch, case):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    Path("half.jsonl").write_text('{"prompt": "\\ud800 a"}\n')
    Path("deep.jsonl").write_text("[" * 200_000)
    Path("lines.jsonl").write_text('{"prompt": "a"}\n\n{"text": "a"}\n')
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"cafe \xff")
    words, code, value = BAD_GENERATION[case]
    result = command("generate.py", *words)
    assert (result.code, result.out) == (code, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ") and ". fix: " in line and value in line
