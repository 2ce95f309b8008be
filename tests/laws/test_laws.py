"""The contract every attention variant keeps. A new yaml in configs/attention is tested by being there.

In fp64, where two orders of summing agree to 1e-7: what differs by more is wrong.
"""

from functools import partial
from random import Random

import pytest
import torch
from torch._dynamo.utils import counters

from inference import batch, quantize
from inference.batch import Sequence, prefill
from inference.engine import compile_decode_step, decode_step, generate
from inference.sampling import sample
from model.context import ForwardContext
from model.init import initialize
from run import checkpoint
from run.compilation import cpp_compiler
from tests.conftest import ROOT, VARIANTS, assert_greedy, close, continued, poisoned_memory

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
TOKENS = torch.randint(128, (3, 13), generator=torch.Generator().manual_seed(1))


def new_cache(model, batch=3, capacity=16):
    return model.new_cache(batch, capacity, torch.float64, "cpu")


def feed(model, cache, tokens, chunks, valid=None):
    """Logits of tokens (B, T) read in chunks of these lengths."""
    valids = [None] * len(chunks) if valid is None else valid.split(chunks, dim=1)
    return torch.cat(
        [
            model(t, cache, valid=v)
            for t, v in zip(tokens.split(chunks, dim=1), valids, strict=True)
        ],
        dim=1,
    )


def test_the_mixer_matters_in_every_layer(model):
    logits = model(TOKENS)
    for block in model.blocks:
        weight = block.attention.o_proj.weight.data
        kept = weight.clone()
        weight.zero_()
        assert (model(TOKENS) - logits).abs().max() > 1e-2
        weight.copy_(kept)


def test_the_future_is_invisible(model):
    changed = TOKENS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 128
    close(model(TOKENS)[:, :7], model(changed)[:, :7])


@pytest.mark.parametrize("chunks", [(13,), (1,) * 13, (5, 1, 1, 6), (2, 11)])
def test_cached_decoding_matches_the_full_forward(model, chunks):
    close(feed(model, new_cache(model), TOKENS, chunks), model(TOKENS))


@pytest.mark.parametrize("chunks", [(13,), (1,) * 13, (4, 1, 8)])
def test_a_row_of_a_ragged_batch_equals_the_row_alone(model, chunks):
    valid = torch.ones(3, 13, dtype=torch.bool)
    valid[0, :6] = valid[1, 9:] = valid[2, 3:5] = valid[2, 11] = False  # left, right, and within
    cache = new_cache(model)
    together, uncached = feed(model, cache, TOKENS, chunks, valid), model(TOKENS, valid=valid)
    assert cache.lengths.tolist() == valid.sum(1).tolist()
    for row in range(3):
        alone = model(TOKENS[row, valid[row]][None])[0]
        close(together[row, valid[row]], alone)
        close(uncached[row, valid[row]], alone)


def test_padding_changes_nothing_in_the_cache(model):
    cache = new_cache(model)
    model(TOKENS[:, :7], cache)
    before = [[b.clone() for b in layer.buffers] for layer in cache.layers]
    model(TOKENS[:, 7:10], cache, valid=torch.zeros(3, 3, dtype=torch.bool))
    assert cache.lengths.tolist() == [7, 7, 7]
    for layer, kept in zip(cache.layers, before, strict=True):
        for new, old in zip(layer.used(), kept, strict=True):
            assert torch.equal(new, old[:, : new.shape[1]])


def test_a_cache_stays_where_it_was_allocated(model):
    cache = new_cache(model)
    where = [
        t.data_ptr() for t in (cache.lengths, *(b for layer in cache.layers for b in layer.buffers))
    ]
    feed(model, cache, TOKENS, (6, 1, 6))
    assert where == [
        t.data_ptr() for t in (cache.lengths, *(b for layer in cache.layers for b in layer.buffers))
    ]


def test_no_two_tokens_of_a_chunk_take_one_slot():
    valid = torch.arange(13) != torch.tensor([[2], [12], [20]])
    slots = ForwardContext(TOKENS, torch.tensor([0, 3, 50]), valid, None).cache_slots(5)
    for row in slots:  # two writes to one slot come in any order on a GPU
        assert row[row < 5].sort().values.tolist() == [0, 1, 2, 3, 4]


def test_packed_documents_equal_each_alone(model):
    documents = torch.tensor([0] * 6 + [1] * 7).expand(3, -1)
    apart = torch.cat((model(TOKENS[:, :6]), model(TOKENS[:, 6:])), dim=1)
    close(
        model(TOKENS, documents=documents), apart, rtol=1e-4, atol=1e-4
    )  # other angles, of fp32 tables


@pytest.mark.parametrize(
    "dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 0.006), (torch.int8, 0.0135)]
)
def test_a_cache_in_less_precision_is_nearly_exact(model, dtype, error):
    logits = feed(model, model.new_cache(3, 16, dtype, "cpu"), TOKENS, (6, 1, 1, 5))
    assert (logits - model(TOKENS)).std() < error * logits.std()


def test_rows_can_be_reset_and_copied(model):
    cache = new_cache(model)
    model(TOKENS[:, :7], cache)
    cache.row(1).reset()
    cache.row(2).copy_(cache.row(0))
    logits = model(TOKENS[:, 7:9], cache)
    close(logits[1], model(TOKENS[1:2, 7:9])[0])
    close(logits[2], model(torch.cat((TOKENS[:1, :7], TOKENS[2:, 7:9]), dim=1))[0, 7:])


def test_a_cache_that_is_reset_equals_a_new_one(model):
    cache, empty = new_cache(model), new_cache(model)
    model(TOKENS[:, :7], cache)
    cache.row(1).reset()
    for layer, new in zip(cache.layers, empty.layers, strict=True):
        for buffer, expected in zip(layer.buffers, new.buffers, strict=True):
            assert torch.equal(buffer[1], expected[1])
    cache.reset()
    assert cache.lengths.tolist() == [0, 0, 0]
    for layer, new in zip(cache.layers, empty.layers, strict=True):
        for buffer, expected in zip(layer.buffers, new.buffers, strict=True):
            assert torch.equal(buffer, expected)


def test_a_rewound_cache_goes_on_or_refuses(model):
    cache = new_cache(model)
    model(TOKENS[:, :9], cache)
    if not all(layer.can_rewind for layer in cache.layers):
        with pytest.raises(ValueError, match="cannot be rewound"):
            cache.rewind(torch.tensor([4, 6, 9]))
        return
    cache.rewind(torch.tensor([4, 6, 9]))
    logits = model(TOKENS[:, 9:12], cache)
    for row, length in enumerate((4, 6, 9)):
        alone = model(torch.cat((TOKENS[row, :length], TOKENS[row, 9:12]))[None])[0, length:]
        close(logits[row], alone)


def test_a_block_begins_as_the_identity(model):
    initialize(model, 0)
    close(model.hidden(TOKENS), model.norm(model.embed(TOKENS)))


def test_every_parameter_learns(model):
    model(TOKENS).square().mean().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("capacity", [3, 64])
def test_the_cache_costs_what_cache_bytes_says(model, capacity):
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        stated = model.cache_bytes(capacity, dtype)
        assert model.new_cache(5, capacity, dtype, "cpu").nbytes == 5 * stated


def test_a_decode_step_compiles_once(model):
    torch._dynamo.reset()
    graphs = []
    step = torch.compile(
        decode_step,
        fullgraph=True,
        dynamic=False,
        backend=lambda graph, _: graphs.append(graph) or graph,
    )
    compiled = continued(model, PROMPTS, 101, rows=3, step=step)
    assert len(graphs) == 1
    assert compiled == continued(model, PROMPTS, 101)  # past the context


def test_eight_ragged_rows_say_in_fp32_what_each_says_alone(model):
    model = model.float()
    quantize.load_matvec(ROOT / ".cache", cpp_compiler())  # where there is a compiler
    quantize.optimize_for_decoding(model, int8=False)
    prompts = TOKENS.flatten().split([1, 2, 3, 4, 5, 6, 7, 11])
    prompts = [prompt.tolist() for prompt in prompts]
    for prompt, together in zip(prompts, continued(model, prompts, 20, rows=8), strict=True):
        assert_greedy(model, prompt, together, continued(model, [prompt], 20, rows=1)[0])


@pytest.mark.long
def test_a_thousand_tokens_are_never_compiled_again(model):
    torch._dynamo.reset()
    counters.clear()
    model = model.float()
    quantize.optimize_for_decoding(model, int8=False)
    compiled = continued(
        model, PROMPTS[:3], 1000, rows=3, step=compile_decode_step(torch.device("cpu"))
    )
    assert (
        counters["stats"]["unique_graphs"] == 1
        and not counters["graph_break"]
        and not counters["recompiles"]
    )
    for prompt, text in zip(PROMPTS, compiled, strict=True):
        assert_greedy(model, prompt, text[:40], continued(model, [prompt], 40, rows=1)[0])


def few(logits, *about, temperature):
    """Draws of six tokens, so that a text repeats itself and guesses are right now and then."""
    return sample(
        logits[..., :6],
        *about[:2],
        about[2][..., :6],
        temperature=temperature,
        repetition_penalty=1.2,
    )


@pytest.mark.parametrize("temperature, eos", [(0, ()), (2.0, ()), (2.0, (5,))])
def test_a_text_is_the_same_alone_in_a_batch_with_guesses_and_without_a_cache(
    model, temperature, eos
):
    """Past the context, with fewer rows than texts, ends within what was guessed right."""
    draw, widths = partial(few, temperature=temperature), []

    def step(*about):
        widths.append(about[1].shape[1])
        return decode_step(*about)

    random = Random(0)
    prompts = [random.choices(range(6), k=length) for length in (1, 40, 63, 7, 61)]
    expected = continued(model, prompts, 14, draw, eos=eos)
    for rows, guesses in ((2, 0), (1, 5), (5, 3)):
        how = {"step": step, "num_draft_tokens": guesses, "prefill_chunk": 9}
        assert continued(model, prompts, 14, draw, rows, eos=eos, **how) == expected
    assert eos or set(widths) >= {1, 4, 6}


def test_training_has_no_graph_break(model):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    logits = compiled(TOKENS)
    close(logits, model(TOKENS))
    logits.square().mean().backward()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trained_variant_decodes_from_its_checkpoint(trainer_of, variant):
    with poisoned_memory():
        trainer = trainer_of(f"attention={variant}", "batch_tokens=256", "micro_batch=4")
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    with poisoned_memory():
        loaded = checkpoint.load_model(checkpoint.newest_checkpoint(trainer.run_dir), "cpu")
    tokens, _ = trainer.loader(3)
    trainer.model.eval()
    with torch.no_grad():
        trained = trainer.model(tokens)
        close(loaded(tokens), trained, rtol=0, atol=0)
        cache = loaded.new_cache(len(tokens), tokens.shape[1], torch.float32, "cpu")
        cached = [loaded(chunk, cache) for chunk in tokens.split([31, 1, 1, 31], dim=1)]
    close(torch.cat(cached, dim=1), trained, rtol=1e-4, atol=1e-4)  # sums in another order


@pytest.mark.parametrize("guesses", [0, 3])
def test_a_text_goes_on_from_what_the_cache_holds(model, guesses):
    cache, draw = new_cache(model, batch=1, capacity=64), partial(few, temperature=2.0)
    said, read = Sequence(PROMPTS[2], 7, eos={5}), 0
    for turn in range(4):
        for _ in generate(model, [said], draw, cache=cache, num_draft_tokens=guesses):
            pass
        assert read < cache.lengths[0] <= len(said.tokens)
        read = int(cache.lengths[0])
        said = Sequence([*said.tokens, 4, 3, turn], 7, eos={5}, num_cached=read)
        expected = Sequence(said.tokens, 7, eos={5})
        for _ in generate(model, [expected], draw):
            pass
        again, copy = Sequence(said.tokens, 7, eos={5}, num_cached=read), cache.map(torch.clone)
        for _ in generate(model, [again], draw, cache=copy, num_draft_tokens=guesses):
            pass
        assert again.tokens == expected.tokens


def test_several_samples_share_one_prefill(model, monkeypatch):
    prompts, read = [PROMPTS[0]] * 3 + [PROMPTS[2]], []
    monkeypatch.setattr(batch, "prefill", lambda *about: read.extend(about[1]) or prefill(*about))
    drawn = continued(model, prompts, 9, sample, rows=4)
    assert read == [PROMPTS[0], PROMPTS[2]] and len(set(map(tuple, drawn))) == 4
    assert drawn == continued(model, prompts, 9, sample)


def test_bf16_runs(model):
    for parameter in model.parameters():  # and no buffer, as where a checkpoint is loaded in bf16
        parameter.data = parameter.data.bfloat16()
    cache = model.new_cache(3, 16, torch.bfloat16, "cpu")
    assert feed(model, cache, TOKENS, (6, 1, 6)).isfinite().all()


def test_masks_are_made_once_and_none_for_plain_causal(model, monkeypatch):
    asked, visible = [], ForwardContext.visible
    monkeypatch.setattr(
        ForwardContext,
        "visible",
        lambda *about: asked.append((about[1:], visible(*about))) or asked[-1][1],
    )
    model(TOKENS)
    assert all((result.mask is None) == (not any(about)) for about, result in asked)
    assert len({id(result) for _, result in asked}) == len({about for about, _ in asked})
