"""Tokens are sampled from exactly the distribution that the options define."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from inference.batch import Sequence
from inference.engine import Engine
from inference.prompts import new_sequences
from inference.sampling import argmax, exponential_noise, sample
from run.instantiate import instantiate
from tests.conftest import compile_without_inductor, continued, greedy, redraw, tree_of
from tests.inference.recorded_graph import recorded_graphs

LOGITS = torch.tensor([[0.5, -8.0, 2.0, 0.0, 1.0, -1.0]])


def draws(logits: torch.Tensor, **options) -> torch.Tensor:
    """Sample the first token of each row; the rows have different seeds."""
    seeds = torch.arange(len(logits))
    return sample(logits, seeds, torch.zeros_like(seeds), **options)


def frequencies(**options) -> torch.Tensor:
    return draws(LOGITS.expand(40_000, -1), **options).bincount(minlength=6) / 40_000


def expected(kept: int, temperature: float = 1.0) -> torch.Tensor:
    """The expected probabilities: a softmax over the `kept` most likely tokens."""
    logits, tokens = LOGITS[0].topk(kept)
    return torch.zeros(6).index_copy(0, tokens, (logits / temperature).softmax(dim=0))


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, 6),
        ({"temperature": 0.5}, 6),
        ({"top_k": 3}, 3),
        ({"top_p": 0.5}, 1),  # the most likely token has a probability of 0.55
        ({"top_p": 0.6}, 2),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.2}, 3),  # e^0 1, e^-1 0.37, e^-1.5 0.22, e^-2 0.14
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.3}, 2),
    ],
)
def test_samples_follow_the_specified_distribution(options, kept):
    wanted = expected(kept, options.get("temperature", 1.0))
    got = frequencies(**options)
    assert (got - wanted).abs().max() < 0.01
    assert got[wanted == 0].sum() == 0


def test_top_p_keeps_the_smallest_set_with_this_probability():
    """Two of four equal tokens have a total probability of exactly 0.5, and so on."""
    for size, top_p, kept in ((4, 0.5, 2), (10, 0.6, 6), (7, 3 / 7, 3), (1000, 0.3, 300)):
        found = draws(torch.zeros(20_000, size), top_p=top_p).unique()
        assert len(found) == kept


@pytest.mark.parametrize("min_p", [0.1, 0.2, 0.3])
def test_min_p_keeps_a_token_exactly_at_the_bound(min_p):
    logits = torch.tensor([0.0, min_p, min_p * 0.999])
    logits[1:] = logits[1:].log()
    assert draws(logits.expand(5000, 3), min_p=min_p).unique().tolist() == [0, 1]


def test_ids_without_a_token_are_never_sampled():
    logits = torch.zeros(2000, 6)
    seen = torch.ones(2000, 6, dtype=torch.bool)
    for options in ({}, {"top_k": 5}, {"seen_tokens": seen, "repetition_penalty": 2.0}):
        assert draws(logits, vocab_size=4, **options).unique().tolist() == [0, 1, 2, 3]


def test_the_most_likely_token_is_the_same_with_top_k_and_without():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    assert draws(logits, top_k=1) == draws(logits, temperature=0) == 1


@pytest.mark.parametrize("temperature", [0, 1e-45])
def test_temperature_zero_is_greedy(temperature):
    assert draws(LOGITS, temperature=temperature).tolist() == [2]


def test_sampling_noise_is_exponential_and_independent():
    """Neighboring seeds, draws and tokens are uncorrelated, also along a diagonal."""
    seeds = torch.arange(60)[:, None].expand(-1, 3)
    draw_indices = torch.arange(3).expand(60, -1)
    tokens = torch.arange(1000).expand(60, 3, -1)
    uniform = (-exponential_noise(seeds, draw_indices, tokens)).exp()  # (seeds, draws, tokens)
    assert abs(uniform.mean() - 1 / 2) < 5e-3 and abs(uniform.var() - 1 / 12) < 2e-3
    assert 0 < uniform.min() < 1e-4 and 1 - 1e-4 < uniform.max() < 1
    for one, other in (
        (uniform[1:], uniform[:-1]),
        (uniform[:, 1:], uniform[:, :-1]),
        (uniform[:, :, 1:], uniform[:, :, :-1]),
        (uniform[1:, :-1], uniform[:-1, 1:]),
        (uniform[1:, :, :-1], uniform[:-1, :, 1:]),
        (uniform[:, 1:, :-1], uniform[:, :-1, 1:]),
    ):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 0.02


def test_a_repetition_penalty_lowers_negative_logits():
    seen = torch.tensor([[True, False]])
    logits = torch.tensor([[-1.0, -1.5]])
    assert draws(logits, seen_tokens=seen, repetition_penalty=2.0, temperature=0) == 1


@torch.no_grad()
def penalized(model: torch.nn.Module, prompt: list[int], window: list[int], most: int) -> list[int]:
    """Continue a prompt greedily with transformers' penalty; the model reads only a window."""
    from transformers import RepetitionPenaltyLogitsProcessor

    penalty = RepetitionPenaltyLogitsProcessor(PENALTY)
    text = [*prompt]
    window = [*window]
    for _ in range(most):
        if len(window) > model.context:
            del window[: model.context // 2]
        logits = model(torch.tensor([window]))[:, -1]
        token = penalty(torch.tensor([text]), logits).argmax().item()
        text.append(token)
        window.append(token)
    return text[len(prompt) :]


PENALTY = 3.0


@pytest.mark.parametrize("rows", [0, 2])
def test_a_repetition_penalty_includes_tokens_beyond_the_context(rows):
    """Tests decoding without a cache, and with a cache whose rows are reused."""
    model = redraw(instantiate(tree_of("gqa", "model.depth=1"))).double()
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(128, (n,), generator=draw).tolist() for n in (5, 60, 64)]
    sampler = partial(sample, temperature=0, repetition_penalty=PENALTY)
    expected = [penalized(model, prompt, prompt, 40) for prompt in prompts]
    assert continued(model, prompts, 40, sampler, rows) == expected


def test_a_repetition_penalty_includes_the_truncated_part_of_a_prompt(tokenizer):
    tree = tree_of("gqa", "model.depth=1", f"data.vocab_size={tokenizer.vocab_size}")
    model = redraw(instantiate(tree)).double()
    prompt = "".join(map(chr, range(40, 250)))
    (sequence,) = new_sequences(tokenizer, [prompt], model.context, max_new_tokens=20)
    assert sequence.eos == tokenizer.eos_ids
    sequence.eos = ()
    sampler = partial(sample, temperature=0, repetition_penalty=PENALTY)
    cache = model.new_cache(1, model.context, torch.float64, "cpu")
    for _ in Engine(model, sampler, cache).generate([sequence]):
        pass
    tokens = tokenizer.encode_prompt(prompt)
    assert sequence.tokens[-20:] == penalized(model, tokens, tokens[1 - model.context :], 20)


def test_argmax_finds_the_first_largest_value():
    """Tests ties, infinities and NaN, which counts as the largest value."""
    for special in (0.0, torch.inf, -torch.inf, torch.nan):
        x = torch.randint(-3, 3, (2, 3, 500)).float()
        x[..., 1::4] = special
        assert torch.equal(argmax(x), x.argmax(dim=-1))


ALL_OPTIONS = {
    "temperature": 2.0,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
}


PROMPTS = [[1, 2, 3] * n for n in (1, 9, 16)]  # three texts for two rows; one exceeds the context


def test_compiled_decoding_matches_an_uncached_loop(monkeypatch):
    """Calls share one compiled step, without guards on the model, which never changes."""
    torch._dynamo.reset()
    counters.clear()
    compile_without_inductor(monkeypatch, "eager")
    engine = engine_of_two_rows(partial(sample, **ALL_OPTIONS))
    expected = continued(engine.model, PROMPTS, 20, engine.sampler)
    engine.compile()
    engine.model.requires_grad_(False)  # guards on the parameters would fail
    engine.compiled_step = mock.Mock(wraps=engine.compiled_step)
    for _ in range(2):
        sequences = [Sequence([*prompt], 20, seed=n) for n, prompt in enumerate(PROMPTS)]
        drawn = {sequence: [] for sequence in sequences}
        for sequence in engine.generate(sequences):
            drawn[sequence].append(sequence.tokens[-1])
        assert [*drawn.values()] == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert engine.compiled_step.call_count > 2 * 20


def test_engines_share_no_compiled_step(monkeypatch):
    """Without guards on the model, a step would also accept a model of another width or dtype."""
    compile_without_inductor(monkeypatch, "eager")
    torch._dynamo.reset()
    for override, dtype in (("dim=32", torch.float64), ("dim=64", torch.float32)):
        tree = tree_of("gqa", "model.depth=1", f"model.{override}")
        model = redraw(instantiate(tree)).to(dtype).eval()
        compiled = continued(model, [[1, 2, 3]], 8, rows=1, compiled=True)
        assert compiled == continued(model, [[1, 2, 3]], 8, rows=1)


def engine_of_two_rows(sampler=greedy) -> Engine:
    model = redraw(instantiate(tree_of("gqa", "model.depth=1"))).double().eval()
    return Engine(model, sampler, model.new_cache(2, 64, torch.float64, "cpu"))


def test_captured_decoding_matches_eager_decoding_without_calling_the_model():
    engine = engine_of_two_rows(partial(sample, **ALL_OPTIONS))
    expected = continued(engine.model, PROMPTS, 20, engine.sampler)
    with recorded_graphs():
        captured = continued(engine.model, PROMPTS, 20, engine.sampler, rows=2, captured=True)
        engine.capture()
    assert captured == expected
    calls = []
    engine.model.register_forward_hook(lambda *_: calls.append(1))
    for _ in engine.generate([Sequence([1, 2], 10) for _ in range(3)]):
        pass
    assert not calls
    # Each text has 10 new tokens, the first of which comes from the prefill.
    assert engine.graph.num_replays == 2 * 9
    assert not engine.can_capture


def test_a_prompt_of_several_contexts_is_cut_until_it_fits():
    model = engine_of_two_rows().model
    prompts = [[1, 2, 3, 4, 5] * 7, [6, 7] * 81]
    assert len(prompts[1]) > 2 * model.context
    assert continued(model, prompts, 20, rows=2) == continued(model, prompts, 20)


def test_a_model_that_reads_values_on_the_host_is_not_captured(capsys):
    engine = engine_of_two_rows()
    engine.model.embed.register_forward_hook(lambda *about: about[-1] * about[-1].max().item())
    with recorded_graphs():
        stream = torch.cuda.current_stream()
        engine.capture()
        assert torch.cuda.current_stream() is stream
    assert engine.graph is None and not engine.cache.lengths.any()
    (line,) = capsys.readouterr().err.splitlines()
    assert "operation not permitted when stream is capturing" in line
    *_, sequence = engine.generate([Sequence([1, 2], 10)])
    assert len(sequence.tokens) == 12


def test_only_copies_to_and_from_a_gpu_do_not_wait():
    """On MPS, nothing would wait for a copy to the host before its values are read."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert not (kwargs or {}).get("non_blocking"), function
            return function(*args, **(kwargs or {}))

    model = redraw(instantiate(tree_of("gqa")))
    with Copies():
        continued(model, [[1, 2], [3]], 3, greedy)
