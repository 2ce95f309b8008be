"""Attention layers match independent code: transformers classes and fla-core's references."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention
from transformers.models.inkling.modeling_inkling import InklingShortConvolution
from transformers.models.neomme.configuration_neomme import NeoMMEConfig
from transformers.models.neomme.modeling_neomme import NeoMMEExclusiveSelfAttention

from model.attention.short_conv import ShortConv
from model.attention.softmax import SoftmaxAttention
from model.attention.sparse import sum_blocks
from model.context import ForwardContext
from tests.conftest import close
from tests.model.test_layers import random
from tests.model.test_mechanisms import layers_of, output
from tests.model.test_recurrence import naive

TOLERANCE = {"rtol": 0, "atol": 1e-4}


def heads_of(layer: SoftmaxAttention, x: Tensor) -> Tensor:
    """The outputs of the heads (B, T, H, E), captured at the input of o_proj."""
    inputs = []
    hook = layer.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    layer(x, ForwardContext(x[..., 0]), None, {})
    hook.remove()
    return inputs[0].unflatten(-1, (layer.heads, -1))


def test_exclusive_attention_matches_neomme_and_is_orthogonal_to_each_tokens_value():
    layer = layers_of("exclusive")[0]
    x = random(2, 9, 64)
    ctx = ForwardContext(x[..., 0])
    q, k, v = layer.project_qkv(x, ctx)
    y = layer.attend(q, k, v, ctx.mask(None, None))
    config = NeoMMEConfig(num_attention_heads=layer.heads, num_key_value_heads=layer.kv_heads)
    theirs = NeoMMEExclusiveSelfAttention(config).double()
    torch.nn.init.constant_(theirs.alpha, 30.0)  # its tanh is 1

    ours = heads_of(layer, x)
    close(ours, theirs(y, v.transpose(1, 2)), **TOLERANCE)
    own_v = v.repeat_interleave(layer.heads // layer.kv_heads, dim=2)
    close((ours * own_v).sum(dim=-1), torch.zeros(2, 9, layer.heads).double(), rtol=0, atol=1e-5)


def test_the_short_convolution_matches_inkling():
    theirs = InklingShortConvolution(24, 4, 0, 0)
    ours = ShortConv(24, 4)
    ours.taps.data = theirs.conv1d.weight.data.clone()
    ours.taps.data[..., -1] += 1  # the residual
    x = random(2, 9, 24).float()
    close(ours(x, ForwardContext(x[..., 0])), theirs(x), **TOLERANCE)


def test_attention_after_a_convolution_initially_equals_plain_attention():
    ours = layers_of("conv")[0]
    parent = layers_of("gqa")[0]
    parent.load_state_dict(ours.state_dict(), strict=False)
    taps = ours.conv.init_param("taps", None)
    assert taps.is_floating_point()
    ours.conv.taps.data.copy_(taps)
    x = random(2, 9, 64)
    close(output(ours, x), output(parent, x))


def test_tied_keys_and_values_match_gemma_4_and_halve_the_cache():
    layer = layers_of("tied_kv")[0]
    config = Gemma4TextConfig(
        hidden_size=64,
        num_attention_heads=layer.heads,
        num_key_value_heads=layer.kv_heads,
        num_global_key_value_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        global_head_dim=layer.head_dim,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        attention_k_eq_v=True,
        rms_norm_eps=layer.norm_eps,
        attn_implementation="eager",
    )
    theirs = Gemma4TextAttention(config, 0).double()
    weights = layer.state_dict()
    weights["q_norm.weight"] = weights["q_norm.weight"] * layer.head_dim**-0.5  # theirs is unscaled
    theirs.load_state_dict(weights)
    x = random(2, 9, 64)
    ctx = ForwardContext(x[..., 0])
    tables = [
        table[:, :, 0].repeat(1, 1, 2) for table in ctx.rotary(layer.rotary_dim, layer.rope_base)
    ]
    future = torch.full((9, 9), -torch.inf).triu(1).double()
    close(output(layer, x), theirs(x, tables, future[None, None], {})[0], **TOLERANCE)

    parent = layers_of("gqa")[0]
    nbytes = [
        sum(buffer.nbytes for buffer in each.new_cache(1, 64, torch.bfloat16, "cpu").buffers)
        for each in (layer, parent)
    ]
    assert nbytes[0] == nbytes[1] / 2


def test_forgetting_attention_matches_fla_and_equals_plain_attention_if_gates_are_open():
    layer = layers_of("fox")[0]
    x = random(2, 9, 64)
    q, k, v = layer.project_qkv(x, ForwardContext(x[..., 0]))
    gates = F.logsigmoid(layer.forget_proj(x))
    theirs = naive("forgetting_attn", "naive_forgetting_attn")(q, k, v, gates)
    close(heads_of(layer, x).float(), theirs, **TOLERANCE)

    layer.forget_proj.weight.data.zero_()
    layer.forget_proj.bias.data.fill_(40.0)
    parent = layers_of("gqa", "attention.rope_base=null")[0]
    parent.load_state_dict(layer.state_dict(), strict=False)
    close(output(layer, x), output(parent, x), rtol=0, atol=1e-5)


def block_attention(layer: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MoBA as its paper defines it, in a loop over rows and queries."""
    block, group = layer.block, layer.heads // layer.kv_heads
    y = torch.zeros_like(q)
    for row in range(len(q)):
        for t in range(q.shape[1]):
            for head in range(layer.heads):
                kv_head = head // group
                chooser = q[row, t, kv_head * group : (kv_head + 1) * group].mean(dim=0)
                keys, values = k[row, : t + 1, kv_head], v[row, : t + 1, kv_head]
                own = t // block
                likeness = [
                    ((chooser @ keys[n * block : (n + 1) * block].mean(dim=0)).item(), n)
                    for n in range(own)
                ]
                chosen = {n for _, n in sorted(likeness, reverse=True)[: layer.topk]} | {own}
                seen = [s for s in range(t + 1) if s // block in chosen]
                weights = (keys[seen] @ q[row, t, head] * layer.head_dim**-0.5).softmax(dim=0)
                y[row, t, head] = weights @ values[seen]
    return y


def test_block_attention_matches_its_paper():
    layer = layers_of("moba")[0]
    layer.block, layer.topk = 3, 2
    x = random(2, 17, 64)
    q, k, v = layer.project_qkv(x, ForwardContext(x[..., 0]))
    close(heads_of(layer, x), block_attention(layer, q, k, v))


def test_blocks_are_selected_in_fp32_under_autocast():
    layer = layers_of("moba")[0].float()
    layer.block, layer.topk = 3, 2
    x = random(2, 99, 64).float()
    ctx = ForwardContext(x[..., 0])
    q, k, _ = layer.project_qkv(x, ctx)
    block = ctx.positions // 3

    def chosen() -> Tensor:
        sums, _ = sum_blocks(k, block, ctx.positions % 3 == 0, 33)
        return layer.choose_blocks(q, sums, block, block)

    expected = chosen()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(chosen(), expected)


def indexed(topk: int) -> SoftmaxAttention:
    """A layer with enough index heads to avoid ties of zero scores, whose order is undefined."""
    layer = layers_of("dsa", "attention.index_heads=24", "attention.index_dim=8")[0]
    layer.topk = topk
    return layer


def test_the_indexer_matches_deepseek_and_sparse_attention_matches_fla():
    layer = indexed(4)
    x = random(2, 17, 64)
    ctx = ForwardContext(x[..., 0])
    q, k, v = layer.project_qkv(x, ctx)
    config = DeepseekV32Config(
        hidden_size=64,
        q_lora_rank=64,
        index_n_heads=24,
        index_head_dim=8,
        qk_rope_head_dim=8,
        index_topk=4,
    )
    theirs = DeepseekV32Indexer(config, 0).double()
    theirs.load_state_dict(
        {
            "wq_b.weight": layer.index_q_proj.weight,
            "wk.weight": layer.index_k_proj.weight,
            "k_norm.weight": layer.index_k_norm.weight,
            "k_norm.bias": layer.index_k_norm.bias,
            "weights_proj.weight": layer.index_weight_proj.weight,
        }
    )
    tables = [
        table[:, :, 0].repeat(1, 1, 2) for table in ctx.rotary(layer.index_dim, layer.rope_base)
    ]
    causal = torch.ones(17, 17, dtype=torch.bool).tril()
    chosen = theirs(x, x, tables, causal[None], None)
    chosen = chosen.long().masked_fill(chosen > torch.arange(17)[:, None], -1)
    attention = naive("dsa", "naive_dsa")(q, k, v, None, None, indices=chosen)
    close(heads_of(layer, x), attention, **TOLERANCE)


@pytest.mark.parametrize("variant", ["moba", "dsa"])
def test_a_decode_step_reads_only_selected_keys(variant):
    layer = layers_of(variant)[0]
    x = random(2, 33, 64)
    cache = layer.new_cache(2, 33, torch.float64, "cpu")
    layer(x[:, :32], ForwardContext(x[:, :32, 0], torch.zeros(2, dtype=torch.int64)), cache, {})
    num_keys = []
    layer.kernel.register_forward_pre_hook(lambda _, about: num_keys.append(about[1].shape[1]))
    layer(x[:, 32:], ForwardContext(x[:, 32:, 0], torch.full((2,), 32)), cache, {})
    assert num_keys == [layer.keys_per_query]


@pytest.mark.parametrize("variant", ["moba", "dsa"])
def test_selecting_every_key_matches_full_attention(variant):
    layer = layers_of(variant)[0]
    layer.topk = 64
    parent = layers_of("gqa")[0]
    parent.load_state_dict(layer.state_dict(), strict=False)
    x = random(2, 9, 64)
    close(output(layer, x), output(parent, x), rtol=0, atol=1e-5)


def test_the_divergence_loss_trains_only_the_indexer():
    layer = indexed(4)
    x = random(2, 17, 64).requires_grad_()
    index_names = {name for name, _ in layer.named_parameters() if name.startswith("index")}
    y, shared = layer(x, ForwardContext(x[..., 0]), None, {})
    y.sum().backward(retain_graph=True)
    learned = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert not learned & index_names and x.grad is not None

    layer.zero_grad()
    x.grad = None
    shared["losses"]["indexer_kl"].objective.sum().backward()
    learned = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert learned == index_names and x.grad is None


def test_mean_weights_match_the_kernel_weights():
    """With identity values, the kernel outputs its weights, renormalized here to exclude a sink."""
    layer = layers_of("dsa", "attention.softcap=2.0", "attention.sink=true")[0]
    layer.topk = 4
    x = random(2, 17, 64)
    ctx = ForwardContext(x[..., 0])
    q, k, _ = layer.project_qkv(x, ctx)
    mask = ctx.mask(None, None)
    chosen = layer.choose(random(2, 17, 17), mask)
    identity = torch.eye(17).double()[:, None].expand(2, -1, layer.kv_heads, -1)
    weights = layer.attend_chosen(q, k, identity, chosen, mask, None).mean(dim=2)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    close(layer.mean_weights(q, k, chosen), weights, rtol=0, atol=1e-6)


def test_the_auxiliary_loss_is_the_divergence_between_attention_weights_and_index_scores():
    layer = indexed(4)
    x = random(2, 17, 64)
    ctx = ForwardContext(x[..., 0])
    q, k, _ = layer.project_qkv(x, ctx)
    _, shared = layer(x, ctx, None, {})
    index_k = layer.index_k_norm(layer.index_k_proj(x))[:, :, None]
    index_k = layer.rope(index_k, ctx, layer.index_dim)
    index = layer.index_scores(x, index_k.squeeze(2), ctx)
    for row in range(2):
        for t in range(17):
            visible = index[row, t, : t + 1]
            chosen = visible.topk(min(4, t + 1)).indices
            weights = torch.stack(
                [
                    (k[row, chosen, h // 2] @ q[row, t, h] * 0.25).softmax(dim=0)
                    for h in range(layer.heads)
                ]
            ).mean(dim=0)
            expected = F.kl_div(visible[chosen].log_softmax(dim=0), weights, reduction="sum")
            close(shared["losses"]["indexer_kl"].value[row, t], expected, rtol=0, atol=1e-6)
