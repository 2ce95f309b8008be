"""What only a GPU can show: pytest -m gpu."""

import json
from pathlib import Path

import pytest
import torch

from common.instantiate import instantiate
from inference.engine import compile_decode_step, decode_step
from tests.conftest import VARIANTS, continued, redraw, tree_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_greedy_tokens_are_those_of_the_cpu(variant, compiled):
    torch._dynamo.reset()
    model = redraw(instantiate(tree_of(variant))).eval()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    expected = continued(model, prompts, 20)
    step = compile_decode_step(torch.device("cuda")) if compiled else decode_step
    for guesses in (0, 3):
        assert (
            continued(model.cuda(), prompts, 20, rows=2, step=step, num_draft_tokens=guesses)
            == expected
        )
        step = (
            compile_decode_step(torch.device("cuda")) if compiled else decode_step
        )  # of another cache


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "overrides", ["precision=bf16", "precision=bf16 compile=true", "precision=fp16"]
)
def test_every_variant_learns(command, story, variant, overrides):
    tiny = (
        "model=tiny",
        "context=64",
        "batch_tokens=512",
        "max_minutes=null",
        "log_every=1",
        "steps=50",
    )
    text = (
        "data=text",
        f"data.path={story}",
        "data.vocab_size=400",
        "device=cuda",
        f"attention={variant}",
    )
    result = command("train.py", *tiny, *text, "compile=false", *overrides.split())
    assert result.code == 0, result.err
    (run,) = Path("runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[49]["train_loss"] < lines[0]["train_loss"] / 2
    assert command("generate.py", "Ann had", "--device", "cuda", "--max-new-tokens", "10").code == 0


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_no_step_waits_for_the_device(trainer_of, optimizer):
    trainer = trainer_of("device=cuda", f"optimizer={optimizer}", "micro_batch=4")
    trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "overrides", ["attention=value_residual", "activation_checkpointing=true z_loss=1e-4"]
)
def test_options_learn(command, story, overrides):
    tiny = (
        "context=64",
        "batch_tokens=512",
        "max_minutes=null",
        "log_every=1",
        "steps=50",
        "compile=true",
    )
    text = ("data=text", f"data.path={story}", "data.vocab_size=400", "device=cuda")
    assert command("train.py", *overrides.split(), *tiny, *text).code == 0
    (run,) = Path("runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[49]["train_loss"] < lines[0]["train_loss"] / 2
