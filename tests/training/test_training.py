"""The effects of training steps on the weights, and their reports."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from run import compilation
from tests.conftest import (
    EACH_MECHANISM,
    TINY,
    VARIANTS,
    close,
    learn_by_heart,
    settings_of,
    weights,
)
from tests.tools.test_evaluate import nats_of
from tests.training.test_train_command import metrics
from train import report, take_step
from training.evaluation import count_eval_tokens
from training.parallel import configure_compiler
from training.schedules import cosine, wsd


def test_gradient_accumulation_matches_the_whole_batch(run_of):
    """This includes auxiliary losses, activation checkpointing and a gradient scaler."""
    attention = "dsa attention.topk=8 attention.index_weight=5.0"
    ends = []
    ways = ("micro_batch=8", "micro_batch=4", "micro_batch=1", "activation_checkpointing=true")
    for way in ways:
        words = f"attention={attention} {way} optimizer=adamw optimizer.lr=1e-3 clip=null".split()
        run = run_of(*words)
        if way == "micro_batch=4":
            run.trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            take_step(run)
        ends.append((weights(run), run.meter.loss_sum / 3 / 512, run.meter.grad_norm))
    expected, *expected_sums = ends[0]
    for found, *sums in ends[1:]:
        close(sums, expected_sums, rtol=1e-4, atol=1e-5)
        # AdamW turns the rounding error of a tiny gradient into a large one of a single weight.
        for name, weight in expected.items():
            assert (found[name] - weight).norm() <= 1e-3 * weight.norm(), name


def test_clipping_bounds_the_gradient(run_of):
    free = run_of("clip=null", "optimizer=adamw")
    clipped = run_of("clip=1e-9", "optimizer=adamw", "optimizer.weight_decay=0")
    before = weights(free)
    moved = []
    for run in (free, clipped):
        take_step(run)
        changes = [(p - before[name]).abs().max() for name, p in weights(run).items()]
        moved.append(max(changes))
    assert free.meter.grad_norm == clipped.meter.grad_norm > 0.1  # the norm before clipping
    assert moved[1] < moved[0] / 5


def test_schedules_match_their_formulas():
    constant = [wsd(step, 100, warmup=10, cooldown=0.5, floor=0.1) for step in (0, 9, 10, 50)]
    assert constant == pytest.approx([0.1, 1, 1, 1])
    cooldown = [wsd(step, 100, warmup=10, cooldown=0.5, floor=0.1) for step in (75, 100)]
    assert cooldown == pytest.approx([0.55, 0.1])
    rates = [cosine(step, 110, warmup=10, floor=0.1) for step in (0, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.1, 1, 1, 0.55, 0.1])
    # The end is not known yet.
    assert wsd(10**6, math.inf, warmup=10, cooldown=0.5, floor=0) == 1
    assert cosine(10**6, math.inf, warmup=10, floor=0) == 1


@pytest.mark.parametrize("eval_tokens", [50, "null"])
def test_evaluation_matches_a_loop_over_windows(run_of, eval_tokens):
    run = run_of(f"eval_tokens={eval_tokens}", "micro_batch=3")
    for _ in range(2):
        take_step(run)
    run.evaluator.evaluate(run.progress)
    (line,) = metrics(run.env.run_dir)
    corpus = run.env.corpus
    tokens = corpus.validation[: 50 if eval_tokens == 50 else None]
    nats = nats_of(run.trainer.model, tokens.tolist())
    assert line["val_loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    bits = nats / math.log(2)
    assert line["val_bpb"] == pytest.approx(bits / corpus.tokenizer.nbytes(tokens), rel=1e-5)
    decoded = corpus.tokenizer.decode(tokens.tolist()).encode()
    assert line["val_bpb"] == pytest.approx(bits / len(decoded), rel=1e-2)


@pytest.mark.parametrize(
    "steps, eval_every, expected",
    [
        (100, 1000, 100 * 512 // 10),  # one evaluation, at the end
        (math.inf, 30, 30 * 512 // 10),
        (100, 1, 640),  # the minimum
    ],
)
def test_evaluations_read_a_tenth_of_the_training_tokens(monkeypatch, steps, eval_every, expected):
    monkeypatch.setattr("training.evaluation.MIN_EVAL_TOKENS", 640)
    settings = settings_of(*TINY, f"eval_every={eval_every}")
    corpus = SimpleNamespace(validation_tokens=lambda context: 1_000_000)
    assert count_eval_tokens(settings, corpus, steps) == expected
    settings.eval_tokens = 2_000_000
    assert count_eval_tokens(settings, corpus, steps) == 1_000_000


@pytest.mark.parametrize("variant", EACH_MECHANISM)
def test_every_variant_learns(run_of, variant):
    words = ("document_mask=true", "steps=12", "batch_tokens=128", "schedule.warmup=2")
    run = run_of(f"attention={variant}", *words)
    run.trainer.precision = torch.bfloat16
    losses = learn_by_heart(run, 12)
    # Over 5 seeds per variant, the last losses are at most 0.12 times the first.
    assert max(losses[-4:]) < losses[0] / 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_the_same_when_compiled(run_of, variant):
    eager, compiled = (run_of(f"attention={variant}", "batch_tokens=256") for _ in range(2))
    torch._dynamo.reset()
    configure_compiler()
    compiled.trainer.loss_module.compile(dynamic=False, fullgraph=True)
    for _ in range(3):
        take_step(eager)
        take_step(compiled)
    close(compiled.meter.loss_sum, eager.meter.loss_sum, rtol=1e-3, atol=0)


def test_a_report_has_the_mean_loss_and_the_speed_since_the_last_report(run_of, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("training.clock.monotonic", lambda: clock[0])
    each = run_of()
    together = run_of()
    together.env.clock.started = together.meter.timed_from = 0.0
    for _ in range(3):
        take_step(each)
        take_step(together)
        clock[0] += 2.0
        report(each)
    report(together)
    losses = [line["train_loss"] for line in metrics(each.env.run_dir)]
    (whole,) = metrics(together.env.run_dir)
    assert whole["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert whole["tokens_per_second"] == 256
    keys = "step tokens seconds lr grad_norm mfu mfu_whole_attention peak_memory_bytes"
    assert {*keys.split()} <= whole.keys()
    rows = together.trainer.loader.rows_per_epoch
    assert whole["epoch"] == pytest.approx(3 * together.trainer.loader.batch_size / rows, abs=1e-4)


def test_document_mask_changes_training_and_evaluation(run_of):
    plain = run_of("data.holdout=4", "document_mask=false")
    masked = run_of("data.holdout=4", "document_mask=true")
    for run in (plain, masked):
        for _ in range(4):  # zero-initialized parameters must become nonzero first
            take_step(run)
        run.evaluator.evaluate(run.progress)
    assert plain.meter.grad_norm != masked.meter.grad_norm
    masked.trainer.loss_module.bos = None
    masked.evaluator.evaluate(masked.progress)
    scores = [line["val_loss"] for each in (plain, masked) for line in metrics(each.env.run_dir)]
    assert len({*scores}) == 3  # a model trained with the mask is evaluated with it


def test_a_run_ends_after_max_epochs_and_can_be_extended(run_of):
    """Epochs are limited only if no number of steps is given."""
    assert run_of("max_epochs=1").progress.total_steps == 6
    assert run_of("steps=null", "max_epochs=null").progress.total_steps == math.inf
    run = run_of("steps=null", "max_epochs=1", folder="run")
    take_step(run)
    run.checkpointer.save(run.progress)
    extended = run_of("steps=null", "max_epochs=3", "resume=true", folder="run")
    for epochs, each in ((1, run), (3, extended)):
        rows = epochs * each.trainer.loader.rows_per_epoch
        batch_size = each.trainer.loader.batch_size
        num_read = each.progress.total_steps * batch_size
        assert num_read <= rows < num_read + batch_size


def test_wandb_receives_the_same_metrics_and_its_failure_does_not_end_the_run(run_of, monkeypatch):
    logged = []
    fake = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: None, id="one"
    )
    fake.init = lambda **_: fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = run_of("wandb=online")
    take_step(run)
    report(run)
    (line,) = metrics(run.env.run_dir)
    assert logged == [(1, {key: value for key, value in line.items() if key != "step"})]

    def refuse(**_):
        raise RuntimeError("no account")

    fake.init = refuse
    take_step(run_of("wandb=online"))


def test_an_fp16_overflow_skips_the_step_and_is_not_reported_as_divergence(run_of):
    run = run_of()
    run.trainer.scaler = OverflowingScaler()
    before = weights(run)
    take_step(run)
    close(weights(run), before, rtol=0, atol=0)
    run.meter.check_finite(run.progress)
    run.trainer.scaler.scale_factor = 0.5  # so that the scale cannot shrink further
    take_step(run)
    with pytest.raises(SystemExit):
        run.meter.check_finite(run.progress)


class OverflowingScaler:
    """A gradient scaler that reports one overflow."""

    scale_factor = 2.0**16

    def is_enabled(self):
        return True

    def get_scale(self):
        return self.scale_factor

    def scale(self, loss):
        return loss * torch.tensor(math.inf)

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass


@pytest.mark.skipif(compilation.cpp_compiler() is None, reason="needs a compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_the_first_step_compiles_the_evaluation_graph_and_is_not_timed(run_of, monkeypatch):
    graphs = []
    compile_with = torch.nn.Module.compile
    options = {"dynamic": False, "backend": lambda graph, _: graphs.append(graph) or graph}
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compile_with(self, **options))
    torch._dynamo.reset()
    eager = run_of("micro_batch=4")
    run = run_of("micro_batch=4", "compile=true")
    assert run.trainer.is_compiled and not eager.trainer.is_compiled
    for _ in range(3):
        for each in (eager, run):
            take_step(each)
        # Graphs of the first block (with the rotary tables), of the other blocks, and of the loss.
        assert len(graphs) == 3 and run.meter.timed_step == 1
    close(run.meter.loss_sum, eager.meter.loss_sum, rtol=1e-3, atol=0)
    for _ in range(2):
        run.evaluator.evaluate(run.progress)
        run.evaluator.sample(run.progress)
        take_step(run)
    assert len(graphs) == 3


@pytest.mark.parametrize(
    "steps, minutes, missing, compiles",
    [
        (40, None, None, False),
        (4000, None, None, True),
        (4000, None, "a compiler", False),
        (4000, 1, None, False),
        (math.inf, 10, None, True),
    ],
)
def test_only_long_runs_are_compiled_automatically(monkeypatch, steps, minutes, missing, compiles):
    monkeypatch.setattr(compilation, "missing_for_compilation", lambda device: missing)
    is_long = compilation.is_long_run(steps, minutes)
    assert compilation.pick_compile("auto", torch.device("cpu"), is_long) == compiles
