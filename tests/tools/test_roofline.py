"""The arithmetic of predicted speed, against counts by torch and by hand."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from run.instantiate import instantiate
from tests.conftest import tree_of
from tools.roofline import MACHINES, Machine, product_bytes, step_seconds, token_bytes
from training.loss import LanguageModelLoss

BATCH, CONTEXT = 3, 64


def machine(flops: float = math.inf, bandwidth: float = math.inf, **parts) -> Machine:
    """One that reaches its peaks; an infinite one takes no time. Sums begin and end at once."""
    parts = {"tile": 1e-9, "processors": 0} | parts
    return Machine(
        flops,
        bandwidth,
        product_share=1.0,
        attention_share=1.0,
        bandwidth_share=1.0,
        launch=0.0,
        **parts,
    )


@pytest.fixture
def model():
    return instantiate(tree_of("mha"))


def test_flops_of_products_are_those_that_torch_counts(model):
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
    # The fused attention of a CPU is not among what torch counts.
    with FlopCounterMode(display=False) as counted:
        LanguageModelLoss(model, z_loss=0.0, bos=None)(tokens, tokens)[0].backward()
    parts = step_seconds(machine(flops=1.0), model, BATCH, BATCH * CONTEXT)
    assert parts["products"] + parts["head+loss"] == pytest.approx(counted.get_total_flops())


def test_fused_attention_is_two_products_forward_and_five_backward(model):
    pairs = BATCH * CONTEXT * (CONTEXT + 1) // 2  # of a query and a key that it sees, causally
    width = model.embed.embedding_dim
    parts = step_seconds(machine(flops=1.0), model, BATCH, BATCH * CONTEXT)
    assert parts["attention"] == pytest.approx(len(model.blocks) * 7 * 2 * pairs * width)


def test_a_product_reads_two_matrices_and_writes_one():
    assert product_bytes(2, 3, 4) == 2 * (2 * 4 + 4 * 3 + 2 * 3)
    assert machine(bandwidth=26.0).product_seconds(2, 3, 4) == 2.0


def test_a_product_takes_turns_and_begins_and_ends_its_sums():
    # 4 x 4 numbers in parts of 2 x 2, sums of 8 in parts of 4: 8 parts, and half of 3 processors
    # idle in the last turn. 2 x 16 x (8 + 2) FLOPs.
    one = machine(flops=10.0, processors=3, tile=2, tile_terms=4)
    assert one.product_seconds(4, 4, 8) == pytest.approx(32.0 * (1 + 3 / 16))
    # Sums of 2 are not divided: 4 parts.
    assert one.product_seconds(4, 4, 2) == pytest.approx(12.8 * (1 + 3 / 8))


def test_micro_batches_repeat_everything_but_the_update(model):
    both = MACHINES["H100"]
    once = step_seconds(both, model, BATCH, BATCH * CONTEXT)
    twice = step_seconds(both, model, BATCH, 2 * BATCH * CONTEXT)
    update = once.pop("optimizer")
    assert twice.pop("optimizer") == update > 0
    assert twice == pytest.approx({part: 2 * seconds for part, seconds in once.items()})


def test_a_token_reads_the_weights_but_of_the_embedding_and_the_cache():
    model = instantiate(tree_of("mha", "model.tied=false"))
    weights = sum(p.numel() for name, p in model.named_parameters() if name != "embed.weight")
    keys_and_values = 2 * CONTEXT * model.embed.embedding_dim * len(model.blocks)
    slots = 2 * model.embed.embedding_dim * len(model.blocks)  # that take what is not kept
    assert token_bytes(model, 5) == 2 * weights + 5 * 2 * (keys_and_values + slots)


@pytest.mark.parametrize("variant", ["delta", "retention"])
def test_attention_in_many_kernels_is_not_predicted(variant):
    with pytest.raises(ValueError, match="no fused kernel"):
        step_seconds(MACHINES["H100"], instantiate(tree_of(variant)), BATCH, BATCH * CONTEXT)
