"""The cost card against what is really allocated."""

import pytest
import torch

from run.instantiate import instantiate
from tests.conftest import VARIANTS, settings_of
from tools import cost
from training import memory
from training.loss import LanguageModelLoss

OVERRIDES = ("model=tiny", "context=64", "batch_tokens=512", "micro_batch=2", "data.vocab_size=128")


def test_the_card_has_every_attention(command):
    result = command("tools/cost.py", *OVERRIDES)
    assert (
        result.code == 0 and [line.split()[0] for line in result.out.splitlines()[1:-3]] == VARIANTS
    )


def test_figures_are_those_of_the_real_thing():
    overrides = (
        "model=15m",
        *OVERRIDES[1:],
        "data.vocab_size=20000",
    )  # so large that every part is seen in the figures
    settings = settings_of(*overrides, "attention=local_global")
    model = instantiate(settings["model"])
    weights = sum(p.numel() for p in model.parameters())
    activations = memory.saved_bytes(
        LanguageModelLoss(model, z_loss=0.0, bos=None), torch.zeros(2, 64, dtype=torch.int64)
    )
    moments = sum(
        p.numel() * (1 if p.ndim == 2 and "blocks" in name else 2)
        for name, p in model.named_parameters()
    )
    head = model.embed.weight.numel()  # tied
    loss = 6 * head + 25 * 2 * 64 * 20000  # of each logit, 25 bytes
    assert cost.row(cost.Cost([*overrides, "attention=local_global"])) == (
        f"{weights / 1e6:.2f} M",
        f"{model.training_flops() / 1e6:.1f}",
        f"{2 * 2 * model.blocks[0].attention.head_dim * 2 * len(model.blocks):,}",
        f"{model.new_cache(1, 64, torch.bfloat16, 'cpu').nbytes / 1e6:.2f}",
        f"{(4 * (2 * weights + moments) + activations + loss) / 1e9:.2f}",
    )


def test_a_choice_of_attentions_and_a_wrong_one(command):
    chosen = command("tools/cost.py", *OVERRIDES, "attention=mla,gqa")
    assert [line.split()[0] for line in chosen.out.splitlines()[1:3]] == ["mla", "gqa"]
    wrong = command("tools/cost.py", *OVERRIDES, "attention=none")
    assert wrong.code == 1 and wrong.err.startswith("error: ") and wrong.err.count("\n") == 1
    assert command("tools/cost.py", *OVERRIDES, "batch_tokens=100").code == 2


def test_more_gpus_hold_less_and_reach_more(command):
    result = command(
        "tools/cost.py", *OVERRIDES, "attention=gqa,mla", "gpus=1,4", "optimizer=adamw"
    )
    rows = [line.split() for line in result.out.splitlines()[1:5]]
    assert [(row[0], row[3]) for row in rows] == [
        ("gqa", "1"),
        ("gqa", "4"),
        ("mla", "1"),
        ("mla", "4"),
    ]
    found = cost.Cost(
        [*OVERRIDES, "attention=gqa", "optimizer=adamw", "model.dim=512", "model.depth=8"]
    )
    one, four = cost.scale_row(found, 1), cost.scale_row(found, 4)
    assert one[2] == four[2] and one[3] == "-" and float(four[2]) > float(four[3]) > float(four[4])
    assert float(four[5].replace(",", "")) == pytest.approx(
        4 * float(one[5].replace(",", "")), rel=1e-3
    )


@pytest.mark.parametrize("gpus", ["0", "many", "1.5"])
def test_a_number_of_gpus_that_cannot_be(command, gpus):
    result = command("tools/cost.py", *OVERRIDES, f"gpus={gpus}")
    assert result.code == 2 and result.err.count("\n") == 1


def test_speed_is_predicted_on_each_gpu_for_every_attention(command):
    sizes = ("model=tiny", "context=64", "micro_batch=2", "data.vocab_size=128")
    result = command("tools/cost.py", "--gpu", "H100,L4", *sizes, "batch_tokens=512")
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.split("\n\n")[0].splitlines()[1:]]
    assert [row[:2] for row in rows] == [[name, gpu] for name in VARIANTS for gpu in ("H100", "L4")]
    # Recurrent attention is many kernels.
    unpredicted = {row[0] for row in rows if row[2] == "-"}
    assert {"delta", "retention"} & set(VARIANTS) <= unpredicted
    assert unpredicted.isdisjoint({"gqa", "mla", "sliding_window", "softcap", "differential"})
    for row in rows:
        if row[2] == "-":
            continue
        milliseconds, tokens_per_second = (float(cell.replace(",", "")) for cell in row[2:4])
        assert tokens_per_second == pytest.approx(512e3 / milliseconds, rel=0.2)
        assert sum(float(share.rstrip("%")) for share in row[5:11]) == pytest.approx(100, abs=0.5)


def test_help_names_the_gpus_and_an_unknown_one_is_refused(command):
    result = command("tools/cost.py", "--help")
    assert result.code == 0 and "H100, A100, 4090, L4" in " ".join(result.out.split())
    result = command("tools/cost.py", "--gpu", "H10", *OVERRIDES)
    assert result.code == 2 and result.err.count("\n") == 1 and "H10" in result.err
