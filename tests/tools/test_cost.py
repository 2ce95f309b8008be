"""The cost table matches allocated models and caches."""

import pytest
import torch

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


def test_only_selected_attention_presets_are_shown(command):
    result = command(COST, *OVERRIDES, "attention=mla,gqa").succeeded()
    assert names_in(result.out) == ["mla", "gqa"]


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


def test_the_cost_uses_the_vocabulary_of_the_tokenizer(tmp_path, tokenizer):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(tokenizer.files[file.name])
    _, vocabulary, *_ = cost.row("gqa", ["model=tiny", f"data.tokenizer={file}"])
    assert vocabulary == f"{tokenizer.vocab_size:,}"


def test_a_model_to_start_from_is_refused_because_its_size_would_be_ignored():
    with pytest.raises(ValueError, match="init_from=runs/a"):
        cost.row("gqa", ["model=tiny", "init_from=runs/a"])
