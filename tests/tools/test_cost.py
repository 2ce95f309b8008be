"""The cost table matches allocated models and caches."""

import pytest
import torch

from model.build import build_model
from run.instantiate import instantiate
from tests.conftest import VARIANTS, settings_of
from tools import cost

COST = "tools/cost.py"
OVERRIDES = ("model=tiny", "context=64", "data.vocab_size=128")


def names_in(table: str) -> list[str]:
    return [line.split()[0] for line in table.partition("\n\n")[0].splitlines()[1:]]


def test_the_cost_table_lists_every_attention_preset(monkeypatch, capfd):
    monkeypatch.setattr(cost, "row", lambda name, _: (name, *cost.COLUMNS[1:]))
    cost.main([*OVERRIDES])
    assert names_in(capfd.readouterr().out) == VARIANTS


@pytest.mark.parametrize("word", ["attention=mla,gqa", "+attention=choice(mla,gqa)"])
def test_only_selected_attention_presets_are_shown(command, word):
    assert names_in(command(COST, *OVERRIDES, word).succeeded().out) == ["mla", "gqa"]


def test_the_suggested_overrides_give_124_million_parameters(command):
    result = command(COST, "model=124m", "attention=gqa").succeeded()
    fix = "attention=mha data.vocab_size=50257 model.tied=true"
    assert fix in result.out
    model = build_model(settings_of("model=124m", *fix.split()).model, "meta")
    assert 123e6 < model.num_parameters() < 125e6


@pytest.mark.parametrize("attention", ["local_global", "mla"])
def test_cost_figures_match_the_allocated_model(attention):
    overrides = ["model=15m", "context=64", "data.vocab_size=20000"]
    model = instantiate(settings_of(*overrides, f"attention={attention}").model)
    caches = [model.new_cache(1, length, torch.bfloat16, "cpu").nbytes for length in (1, 2, 64)]
    assert cost.row(attention, overrides) == (
        attention,
        "20,000",
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M",
        f"{model.training_flops() / 1e6:.1f}",
        f"{caches[1] - caches[0]:,}",
        f"{caches[2] / 1e6:.2f}",
    )


def test_an_invalid_run_is_refused_in_one_line(command):
    result = command(COST, *OVERRIDES, "batch_tokens=100")
    assert result.code in (1, 2) and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
