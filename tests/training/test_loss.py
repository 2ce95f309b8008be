"""The loss and its gradients match torch, and activation checkpointing preserves training."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from data.loader import IGNORE_INDEX
from data.tasks import Recall
from model.build import build_model
from run import compilation
from tests.conftest import (
    EACH_MECHANISM,
    close,
    drawn,
    learn_by_heart,
    settings_of,
    tree_of,
    weights,
)
from train import take_step
from training import loss
from training.loss import HeadLoss, LanguageModelLoss
from training.parallel import configure_compiler


def saved_bytes(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """The number of bytes that a forward saves for its backward, excluding weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # Keeping the tensor in `saved` prevents its storage from being reused.
        saved[x.untyped_storage()._cdata] = x
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model.hidden_states(tokens)
    return sum(x.untyped_storage().nbytes() for key, x in saved.items() if key not in weights)


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 9, generator=generator, dtype=dtype).requires_grad_() for n in (23, 31)
    )
    targets = torch.randint(0, 31, (23,), generator=generator)
    targets[[0, 7, 22]] = IGNORE_INDEX
    return hidden, weight, targets


@pytest.mark.long  # seven calls of the C++ compiler
@pytest.mark.skipif(compilation.cpp_compiler() is None, reason="needs a compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_a_restart_loads_the_compiled_loss_from_the_cache():
    """Its gradients are correct, because constants in the autograd function are part of the key."""
    hidden, weight, targets = example(torch.float32)
    configure_compiler()
    hits = []
    for z_loss in (0.0, 0.3, 0.0, 0.3):
        torch.compiler.reset()  # simulate a new process, which has only the cache files
        counters.clear()
        arguments = (hidden, weight, targets, 2.5, z_loss)
        head_loss = HeadLoss()
        expected = torch.autograd.grad(head_loss(*arguments)[0], (hidden, weight))
        head_loss.compile(dynamic=False, fullgraph=True)
        close(torch.autograd.grad(head_loss(*arguments)[0], (hidden, weight)), expected)
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    torch.compiler.reset()
    assert hits[2:] == [1, 1]


@pytest.mark.parametrize("vocab_multiple", [1, 16])
@pytest.mark.parametrize("softcap, z_loss", [(None, 0.0), (2.5, 0.3)])
@pytest.mark.parametrize("max_logits", [31 * 5, 2**20])  # five rows at a time, all rows
def test_loss_and_gradients_match_a_computation_from_all_logits(
    monkeypatch, vocab_multiple, softcap, z_loss, max_logits
):
    monkeypatch.setitem(loss.MAX_LOGITS, "cpu", max_logits)
    monkeypatch.setitem(loss.VOCAB_MULTIPLE, "cpu", vocab_multiple)
    hidden, weight, targets = example(torch.float64)
    ours, scores = HeadLoss()(hidden, weight, targets, softcap, z_loss)
    grads = torch.autograd.grad(3 * ours, (hidden, weight))

    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    is_counted = targets != IGNORE_INDEX
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    squares = logits.logsumexp(-1)[is_counted].square().sum()
    total = nats + z_loss * squares
    close(ours, total)
    close(scores[0].sum(), nats)  # the reported loss excludes the z-loss
    close(grads, torch.autograd.grad(3 * total, (hidden, weight)))


@pytest.mark.parametrize("max_logits", [31 * 5, 2**20])
def test_scores_contain_the_nats_and_accuracy_of_each_target(monkeypatch, max_logits):
    monkeypatch.setitem(loss.MAX_LOGITS, "cpu", max_logits)
    hidden, weight, targets = example(torch.float64)
    logits = hidden @ weight.T
    targets[::3] = logits[::3].argmax(dim=-1)
    targets[1] = IGNORE_INDEX
    _, scores = HeadLoss()(hidden, weight, targets, 2.5, 0.3)
    capped = 2.5 * torch.tanh(logits / 2.5)
    is_counted = targets != IGNORE_INDEX
    close(scores[0], F.cross_entropy(capped, targets, ignore_index=IGNORE_INDEX, reduction="none"))
    is_likeliest = (logits.argmax(dim=-1) == targets) & is_counted
    assert 0 < is_likeliest.sum() < is_counted.sum()
    assert scores[1].tolist() == is_likeliest.tolist()
    assert scores[2].tolist() == is_counted.tolist()


def questions(model: torch.nn.Module) -> tuple[LanguageModelLoss, tuple, tuple]:
    """A loss, a task batch with targets at all positions, and the same batch with only answers."""
    context = model.context
    task = Recall(context=context, pairs=[2, 5], power=0.01, vocab_size=64)
    inputs, answers, positions = task.corpus().loader(context, 4, seed=0)(0)
    targets = torch.full_like(inputs, IGNORE_INDEX)
    for position, answer in zip(positions.tolist(), answers.flatten().tolist(), strict=True):
        if answer != IGNORE_INDEX:
            targets[divmod(position, context)] = answer
    module = LanguageModelLoss(model, z_loss=0.1, bos=None)
    return module, (inputs, targets), (inputs, answers, positions)


# dsa has an auxiliary loss.
@pytest.mark.parametrize(("variant", "is_compiled"), [("gqa", True), ("dsa", False)])
def test_the_loss_at_answer_positions_matches_the_masked_loss(variant, is_compiled):
    """Rows have 2 or 5 answers; padding after the 2 answers is not counted."""
    model = drawn(tree_of(variant, "context=24", "model.depth=1"), torch.float64)
    module, *batches = questions(model)
    found = []
    for batch in batches:
        if is_compiled and batch is batches[1]:
            torch._dynamo.reset()
            configure_compiler()
            module.compile(dynamic=False, fullgraph=True, backend="aot_eager")
        objective, metrics = module(*batch)
        objective.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        sums = {name: values.sum() for name, values in metrics.items()}
        found.append((objective.detach(), sums, gradients))
        model.zero_grad()
    assert found[0][1]["is_counted"] == 2 * (2 + 5)
    close(found[1], found[0])


def test_the_head_computes_logits_only_at_answer_positions():
    model = drawn(tree_of("gqa", "context=24"))
    module, *batches = questions(model)
    flops = []
    for batch in batches:
        with FlopCounterMode(display=False) as products:
            module(*batch)
        flops.append(products.get_total_flops())
    per_token = 3 * 2 * model.unembedding.numel()  # logits and their gradients
    assert flops[0] - flops[1] == per_token * 4 * (24 - 5)


def test_a_step_averages_gradients_over_the_targets_of_its_batch(run_of):
    norms = []
    for num_targets in (100, 400):
        run = run_of("clip=null", "seed=0")
        run.trainer.loader.num_targets = lambda step, num_targets=num_targets: num_targets
        take_step(run)
        norms.append(run.meter.grad_norm.item())
    assert norms[0] == pytest.approx(4 * norms[1], rel=1e-5)


def test_matrix_products_use_the_padded_vocabulary(monkeypatch):
    monkeypatch.setitem(loss.VOCAB_MULTIPLE, "cpu", 16)
    with FlopCounterMode(display=False) as products:
        HeadLoss()(*example(torch.float64), None, 0.0)
    assert products.get_total_flops() == 3 * 2 * 23 * 9 * 32


def test_the_loss_takes_a_third_of_the_flops_without_gradients():
    hidden, weight, targets = example(torch.float32)
    losses = []
    flops = []
    for needs_gradient in (True, False):
        hidden.requires_grad_(needs_gradient)
        with FlopCounterMode(display=False) as products:
            losses.append(HeadLoss()(hidden, weight, targets, 2.5, 0.3)[0])
        flops.append(products.get_total_flops())
    assert torch.equal(*losses)
    assert flops[0] == 3 * flops[1] > 0


def test_the_loss_of_huge_logits_is_finite():
    hidden, weight, targets = example(torch.float32)
    objective, _ = HeadLoss()(hidden * 1e4, weight, targets, None, 0.0)
    assert objective.isfinite()
    for grad in torch.autograd.grad(objective, (hidden, weight)):
        assert grad.isfinite().all()


def test_z_loss_changes_the_gradient_but_not_the_reported_loss(run_of):
    plain = run_of("z_loss=0")
    regularized = run_of("z_loss=1")
    for run in (plain, regularized):
        take_step(run)
    close(regularized.meter.loss_sum, plain.meter.loss_sum)
    assert regularized.meter.grad_norm > 1.1 * plain.meter.grad_norm


@pytest.mark.parametrize("variant", [*EACH_MECHANISM, "gqa attention.dropout=0.5 optimizer=adamw"])
def test_activation_checkpointing_preserves_training_and_reduces_memory(run_of, variant):
    words = ("model.depth=4", "document_mask=true", "batch_tokens=128")
    overrides = (*f"attention={variant}".split(), *words)
    plain = run_of(*overrides)
    lean = run_of(*overrides, "activation_checkpointing=true")
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    assert saved_bytes(lean.trainer.model, tokens) < saved_bytes(plain.trainer.model, tokens) / 4
    for run in (plain, lean):
        for _ in range(2):
            take_step(run)
    close(weights(lean), weights(plain))


def test_a_model_with_activation_checkpointing_learns_as_one_graph(run_of):
    overrides = ("attention=value_residual", "model.dim=64", "model.heads=4", "model.hidden=96")
    steps = ("steps=12", "batch_tokens=128", "schedule.warmup=2")
    run = run_of(*overrides, "z_loss=1e-4", "activation_checkpointing=true", *steps)
    torch._dynamo.reset()
    configure_compiler()
    run.trainer.loss_module.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    losses = learn_by_heart(run, 12)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("overrides", "keys"), [("gqa", 64.0), ("sliding_window attention.window=16", 16.0)]
)
def test_whole_attention_flops_are_counted_as_in_nanogpt(overrides, keys):
    """6 N + 12 L H Q T (PaLM, 2204.02311, appendix B); T is the window if any, as in nanochat."""
    tree = settings_of("model=tiny", "context=64", *f"attention={overrides}".split()).model
    model = build_model(tree | {"vocab_size": 100}, "meta")
    matrices = [p.numel() for name, p in model.named_parameters() if p.ndim == 2]
    num_weights = sum(matrices) - model.embed.weight.numel()
    heads = tree["heads"]
    head_dim = tree["dim"] // heads
    attention = 12 * tree["depth"] * heads * head_dim * keys
    assert model.training_flops(whole_attention=True) == 6 * num_weights + attention
    # This repository counts the mean number of keys that a token attends to.
    if keys == 64:
        halved = 6 * num_weights + attention * 65 / 2 / 64
        assert model.training_flops() == pytest.approx(halved)
