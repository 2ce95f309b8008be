"""The numbers of tools.evaluate are those of others."""

import json
import math
from pathlib import Path

import pytest
import torch

from data.tokenizer import Tokenizer
from tests.conftest import DATASETS, STORIES, TINY, stories
from tools import evaluate
from training import checkpoint


def evaluated(command, *words: str) -> dict:
    result = command("tools/evaluate.py", *words)
    assert result.code == 0, result.err
    return json.loads(result.out.splitlines()[-1])


@stories
def test_a_model_of_llama2c_has_its_reference_loss(command):
    text = ("--text", str(DATASETS / "tinystories" / "valid.txt"), "--documents", "40", "--truncate")
    found, told = evaluated(command, "--run", str(STORIES), *text), json.loads((STORIES / "reference.json").read_text())
    assert (found["documents"], found["tokens"]) == (40, told["n_target_tokens"])
    assert abs(found["nats_per_token"] - told["mean_nll"]) < 1e-4
    assert abs(found["nats_per_token"] - 1.41126) < 1e-4


def test_bits_per_byte_are_those_of_a_plain_loop(command, trained):
    """Window by window in float64, each token from those before it in its window."""
    texts = ["Ann had a red ball.", "Привет! Bob said: " * 20, "x"]
    Path("some.txt").write_text("\n<|endoftext|>\n".join(texts))
    found = evaluated(command, "--run", str(trained), "--text", "some.txt", "--batch-size", "2")
    place = checkpoint.newest(trained)
    model, tokenizer = checkpoint.load_model(place, "cpu").double(), Tokenizer.load(place / "tokenizer.model")
    nats, count = 0.0, 0
    for text in texts:
        tokens = [tokenizer.bos, *tokenizer.encode(text)]
        for at in range(1, len(tokens)):
            window = tokens[(at - 1) // model.context * model.context : at]
            with torch.no_grad():
                nats -= model(torch.tensor([window]))[0, -1].log_softmax(-1)[tokens[at]].item()
            count += 1
    assert (found["tokens"], found["bytes"]) == (count, len("".join(texts).encode()))
    assert found["nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-5)


def test_scores_of_rows_together_are_those_of_rows_alone(trained):
    place = checkpoint.newest(trained)
    model, draw = checkpoint.load_model(place, "cpu"), torch.Generator().manual_seed(0)
    rows = [
        (torch.randint(300, (n,), generator=draw).tolist(), first) for n, first in ((5, 4), (40, 1), (3, 1), (9, 9))
    ]
    tokens = [1, 7, 9]
    while len(tokens) < 9:
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    rows.append((tokens, 3))
    together = evaluate.scores(model, rows, 5)
    for row, (score, greedy) in zip(rows, together, strict=True):
        alone = evaluate.scores(model, [row], 1)[0]
        assert alone == (pytest.approx(score, abs=1e-4), greedy)
        logits = model(torch.tensor([row[0][:-1]]))[0].log_softmax(-1)
        expected = [logits[at - 1, row[0][at]].item() for at in range(row[1], len(row[0]))]
        assert score == pytest.approx(sum(expected), abs=1e-4)
    assert [greedy for _, greedy in together] == [False, False, False, True, True]  # the fourth has nothing to miss


def task(name: str, **more) -> None:
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(Path("rows.jsonl").absolute())}}}
    content = {"task": name, "test_split": "test", "doc_to_text": "{{said}}", **common, **more}
    Path("tasks").mkdir(exist_ok=True)
    Path("tasks", f"{name}.yaml").write_text(json.dumps(content))


@pytest.mark.filterwarnings("ignore")  # of the harness and its libraries
def test_the_harness_asks_a_trained_run(command, story):
    """A choice, a text and an answer of a local task, without a network, as from the model's own probabilities."""
    words = (*TINY, "data=text", f"data.path={story}", "data.vocab_size=400", "steps=150", "eval_every=150")
    assert command("train.py", *words, "sample_every=150", "save_every=150", "run_dir=run").code == 0
    rows = [{"said": "Bob saw a red ball and", "ways": [" said", " zqx", " hat"], "right": 0, "text": "Ann had a hat."}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    right = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    bits = [{"metric": "bits_per_byte"}]
    choices = {"output_type": "multiple_choice", "doc_to_choice": "{{ways}}", "doc_to_target": "{{right}}"}
    task("choice", **choices, metric_list=[right[0] | {"metric": "acc"}])
    task("rolling", output_type="loglikelihood_rolling", doc_to_target="{{text}}", metric_list=bits)
    ends = {"until": [":", " may"], "max_gen_toks": 9}
    task("answer", output_type="generate_until", generation_kwargs=ends, doc_to_target=" said", metric_list=right)
    found = evaluated(command, "--run", "run", "--tasks", "choice,rolling,answer", "--task-folder", "tasks")["tasks"]
    assert found["choice"]["acc,none"] == 1 and found["choice"]["sample_len"] == 3
    assert found["answer"]["exact_match,none"] == 1
    Path("text.txt").write_text("Ann had a hat.")
    alone = evaluated(command, "--run", "run", "--text", "text.txt")
    assert found["rolling"]["bits_per_byte,none"] == pytest.approx(alone["bits_per_byte"], rel=1e-5)
    for more, said in ((("--tasks", "magic"), "unknown tasks (magic)"), (("--text", "none.txt"), "none.txt")):
        result = command("tools/evaluate.py", "--run", "run", *more)
        assert result.code == 2 and said in result.err and not result.out
    assert command("tools/evaluate.py", "--run", "run").code == 2
