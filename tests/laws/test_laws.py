"""The contract of every attention variant. A new yaml in configs/attention is tested automatically.

Results are computed in fp64, where different orders of summation agree to 1e-7, so a larger
difference is an error.
"""

import re
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from inference import quantize
from inference.sampling import sample
from model.context import ForwardContext
from model.init import initialize
from run import checkpoint
from run.checkpoint import load_model
from run.compilation import cpp_compiler
from tests.conftest import (
    CONFIGS,
    COVERED,
    EACH_MECHANISM,
    EXTRAS,
    ROOT,
    VARIANTS,
    assert_greedy,
    close,
    compile_without_inductor,
    continued,
    drawn,
    poisoned_memory,
    preset_case,
    tree_of,
)
from tests.inference.recorded_graph import recorded_graphs
from train import take_step


def compiled_cases() -> list:
    """A model and a backend for each mechanism.

    The first preset of each class, and tied weights, are compiled by AOTAutograd; decoding also
    applies Inductor's passes. Other presets only change the arguments of a class, so their graphs
    run as captured by Dynamo. This detects graph breaks in half the time. Equal layers compile to
    equal graphs, so a model has one layer of each kind. Its context is short, so that texts soon
    exceed it.
    """
    sizes = "model.depth=1 context=16"
    cases = []
    for extra in EXTRAS:
        backend = "aot_eager" if "tied=true" in extra else "eager"
        cases.append(pytest.param(f"{extra} {sizes}", backend, id=extra.partition("{")[0]))
    known = set()
    for name in VARIANTS:
        preset = CONFIGS / "attention" / f"{name}.yaml"
        classes = set(re.findall(r"_target_: (\S+)", preset.read_text(encoding="utf-8")))
        backend = "eager"
        if name not in COVERED and classes - known:
            backend = "aot_eager"
            known |= classes
        cases.append(preset_case(name, f"{name} {sizes}", backend))
    return cases


def inductor_passes(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_) -> Callable:
    """A backend that applies Inductor's passes and runs the graph without code generation.

    Unlike AOTAutograd alone, the passes may compare a dynamic size with a constant. Then the graph
    does not support the sizes that compare differently.
    """
    # Imported here, because importing torch._dynamo sets TORCHINDUCTOR_CACHE_DIR if it is not set.
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    def apply_passes(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_) -> Callable:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            compile_fx._recursive_post_grad_passes(graph, is_inference=True)
        return graph.forward

    return compile_fx.compile_fx(graph, inputs, inner_compile=apply_passes)


compiled_once = pytest.mark.parametrize("model, backend", compiled_cases(), indirect=["model"])
each_mechanism = pytest.mark.parametrize("model", [*EACH_MECHANISM, *EXTRAS], indirect=True)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
TOKENS = torch.randint(128, (3, 13), generator=torch.Generator().manual_seed(1))


def new_cache(model, batch=3, capacity=16):
    return model.new_cache(batch, capacity, torch.float64, "cpu")


def feed(model, cache, tokens, chunks, padding=None):
    """Read tokens (B, T) in chunks of these lengths after `padding` (B,) columns; return logits."""
    logits = []
    for part in tokens.split(chunks, dim=1):
        pad = None if padding is None else padding.clamp(max=part.shape[1])
        logits.append(model(part, cache, padding=pad))
        padding = None if padding is None else padding - pad
    return torch.cat(logits, dim=1)


def test_the_attention_of_every_layer_affects_the_logits(model):
    logits = model(TOKENS)
    for block in model.blocks:
        weight = block.attention.o_proj.weight.data
        kept = weight.clone()
        weight.zero_()
        assert (model(TOKENS) - logits).abs().max() > 1e-2
        weight.copy_(kept)


def test_future_tokens_do_not_affect_the_logits(model):
    changed = TOKENS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 128
    close(model(TOKENS)[:, :7], model(changed)[:, :7])


@pytest.mark.parametrize("chunks", [(1,) * 13, (5, 1, 1, 6)])
def test_cached_decoding_matches_the_full_forward(model, chunks):
    close(feed(model, new_cache(model), TOKENS, chunks), model(TOKENS))


@pytest.mark.parametrize("chunks", [(1,) * 13, (4, 1, 8)])
def test_each_row_of_a_ragged_batch_matches_the_same_row_alone(model, chunks):
    padding = torch.tensor([6, 0, 10])
    cache = new_cache(model)
    model(TOKENS, cache)
    cache.reset()  # the rows' earlier contents must be invisible
    together = feed(model, cache, TOKENS, chunks, padding)
    uncached = model(TOKENS, padding=padding)
    assert cache.lengths.tolist() == [7, 13, 3]
    for row, pad in enumerate(padding):
        alone = model(TOKENS[row : row + 1, pad:])[0]
        close(together[row, pad:], alone)
        close(uncached[row, pad:], alone)


def test_a_cache_is_never_reallocated(model):
    cache = new_cache(model)
    addresses = [tensor.data_ptr() for tensor in (cache.lengths, *cache.buffers())]
    feed(model, cache, TOKENS, (6, 1, 6))
    assert addresses == [tensor.data_ptr() for tensor in (cache.lengths, *cache.buffers())]


def test_tokens_of_a_chunk_occupy_distinct_slots():
    padding = torch.tensor([2, 12, 0])
    slots = ForwardContext(TOKENS, torch.tensor([0, 0, 50]), padding).cache_slots(5)
    for row in slots:  # on a GPU, the order of two writes to the same slot is undefined
        assert row.sort().values.tolist() == [0, 1, 2, 3, 4]


def test_packed_documents_match_separate_documents(model):
    documents = torch.tensor([0] * 6 + [1] * 7).expand(3, -1)
    apart = torch.cat((model(TOKENS[:, :6]), model(TOKENS[:, 6:])), dim=1)
    close(
        model(TOKENS, documents=documents), apart, rtol=1e-4, atol=1e-4
    )  # rotary angles differ, and their tables are fp32


@pytest.mark.parametrize(
    "dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 0.006), (torch.int8, 0.0135)]
)
def test_a_low_precision_cache_is_nearly_exact(model, dtype, error):
    for module in model.modules():
        if hasattr(module, "topk"):  # the selection among nearly equal keys may differ
            module.topk = 16
    logits = feed(model, model.new_cache(3, 16, dtype, "cpu"), TOKENS, (6, 1, 1, 5))
    assert (logits - model(TOKENS)).std() < error * logits.std()


def test_cache_rows_can_be_reset_and_copied(model):
    cache = new_cache(model)
    model(TOKENS[:, :7], cache)
    cache.rows(slice(1, 2)).reset()
    cache.gather_rows(torch.tensor([0, 1, 0]))
    logits = model(TOKENS[:, 7:9], cache)
    close(logits[1], model(TOKENS[1:2, 7:9])[0])
    close(logits[2], model(torch.cat((TOKENS[:1, :7], TOKENS[2:, 7:9]), dim=1))[0, 7:])


def test_every_block_is_the_identity_at_initialization(model):
    initialize(model, 0)
    close(model.hidden_states(TOKENS)[0], model.norm(model.embed(TOKENS)))


def test_every_parameter_learns_from_its_initial_value(model):
    """The head and the last projections start at zero; nothing before them may do so, too."""
    initialize(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        hidden, losses = model.hidden_states(TOKENS[:, :-1])
        logits = model.logits(hidden).flatten(0, 1)
        objective = F.cross_entropy(logits, TOKENS[:, 1:].flatten())
        for loss in losses.values():
            objective = objective + loss.objective.mean()
        objective.backward()
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("capacity", [3, 64])
def test_cache_bytes_equal_the_allocated_bytes(model, capacity):
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        stated = model.cache_bytes(capacity, dtype)
        assert model.new_cache(5, capacity, dtype, "cpu").nbytes == 5 * stated


def num_graphs(model) -> int:
    """The number of decode graphs: two if the first step reads fewer slots than a layer selects."""
    chosen = [getattr(block.attention, "keys_per_query", 0) for block in model.blocks]
    return 1 + any(4 <= number < model.context for number in chosen)


@compiled_once
def test_a_decode_step_compiles_once(model, backend, monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    compile_without_inductor(monkeypatch, inductor_passes if backend == "aot_eager" else backend)
    compiled = continued(model, PROMPTS, 20, rows=3, compiled=True)
    assert counters["stats"]["unique_graphs"] == num_graphs(model)
    assert compiled == continued(model, PROMPTS, 20)  # beyond the context


@each_mechanism
def test_a_captured_decode_step_matches_the_eager_step(model):
    """Replays the same operations on the same memory, beyond the context and with reused rows."""
    with recorded_graphs():
        captured = continued(model, PROMPTS, 20, rows=2, captured=True)
    assert captured == continued(model, PROMPTS, 20)


@each_mechanism
def test_eight_ragged_fp32_rows_generate_the_same_tokens_as_each_row_alone(model):
    model = model.float()
    quantize.load_matvec(ROOT / ".cache", cpp_compiler())  # only if there is a compiler
    quantize.optimize_for_decoding(model, int8=False)
    prompts = TOKENS.flatten().split([1, 2, 3, 4, 5, 6, 7, 11])
    prompts = [prompt.tolist() for prompt in prompts]
    for prompt, together in zip(prompts, continued(model, prompts, 8, rows=8), strict=True):
        assert_greedy(model, prompt, together, continued(model, [prompt], 8, rows=1)[0])


@pytest.mark.long
def test_a_thousand_tokens_cause_no_recompilation(model):
    torch._dynamo.reset()
    counters.clear()
    model = model.float()
    quantize.optimize_for_decoding(model, int8=False)
    compiled = continued(model, PROMPTS, 1000, rows=3, compiled=True)
    assert (
        counters["stats"]["unique_graphs"] == num_graphs(model)
        and not counters["graph_break"]
        and not counters["recompiles"]
    )
    for prompt, text in zip(PROMPTS, compiled, strict=True):
        assert_greedy(model, prompt, text[:40], continued(model, [prompt], 40, rows=1)[0])


@each_mechanism
def test_generated_text_does_not_depend_on_batching_or_the_cache(model):
    """Texts exceed the context, and there are fewer rows than texts."""
    draw = partial(sample, temperature=2.0, repetition_penalty=1.2)
    random = Random(0)
    prompts = [random.choices(range(128), k=length) for length in (1, 40, 63, 7, 61)]
    expected = continued(model, prompts, 9, draw, eos=range(10))
    for rows in (2, 5):
        found = continued(model, prompts, 9, draw, rows, eos=range(10))
        assert found == expected


@compiled_once
def test_training_compiles_without_graph_breaks(model, backend):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    logits = compiled(TOKENS)
    close(logits, model(TOKENS))
    logits.square().mean().backward()


@pytest.mark.parametrize("variant", EACH_MECHANISM)
def test_a_trained_variant_decodes_from_its_checkpoint(run_of, variant):
    with poisoned_memory():
        run = run_of(f"attention={variant}", "batch_tokens=256", "micro_batch=4")
    for _ in range(3):
        take_step(run)
    run.checkpointer.save(run.progress)
    with poisoned_memory():
        loaded = load_model(checkpoint.newest_checkpoint(run.env.run_dir), "cpu")
    tokens, _ = run.trainer.loader(3)
    run.trainer.model.eval()
    with torch.no_grad():
        trained = run.trainer.model(tokens)
        close(loaded(tokens), trained, rtol=0, atol=0)
        cache = loaded.new_cache(len(tokens), tokens.shape[1], torch.float32, "cpu")
        cached = [loaded(chunk, cache) for chunk in tokens.split([31, 1, 1, 31], dim=1)]
    close(torch.cat(cached, dim=1), trained, rtol=1e-4, atol=1e-4)  # a different order of summation


@pytest.mark.parametrize("model", ["gqa", "mla", "gdn"], indirect=True)
def test_samples_of_the_same_prompt_share_its_prefill(model, monkeypatch):
    prompts = [PROMPTS[0]] * 3 + [PROMPTS[2]]
    expected = continued(model, prompts, 9, sample)
    original = type(model).hidden_states
    shapes = []

    def counted(self, tokens, *about):
        shapes.append(tuple(tokens.shape))
        return original(self, tokens, *about)

    monkeypatch.setattr(type(model), "hidden_states", counted)
    drawn = continued(model, prompts, 9, sample, rows=4)
    assert shapes == [(2, len(PROMPTS[2])), *[(4, 1)] * 8]
    assert drawn == expected and len(set(map(tuple, drawn))) == 4


@pytest.mark.parametrize("variant", [*VARIANTS, *EXTRAS])
def test_every_variant_runs_in_bf16(variant):
    """Vectors stay in fp32, as in a model loaded in bf16."""
    model = drawn(tree_of(*variant.split()), torch.bfloat16)
    cache = model.new_cache(3, 16, torch.bfloat16, "cpu")
    with torch.no_grad():
        assert feed(model, cache, TOKENS, (6, 1, 6)).isfinite().all()


def test_layers_share_their_masks_and_plain_causal_attention_has_no_mask(monkeypatch):
    original = ForwardContext.mask
    masks = []

    def recorded(*arguments):
        result = original(*arguments)
        masks.append(result.dense)
        return result

    monkeypatch.setattr(ForwardContext, "mask", recorded)
    drawn(tree_of("local_global", "model.depth=4"))(TOKENS)
    assert masks[0] is masks[2] is not None
    assert masks[1] is masks[3] is None
