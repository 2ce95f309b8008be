"""Evaluation during training: the loss on held-out text, and samples of generated text."""

import math

import torch
from torch import nn

from data.corpus import Corpus
from data.loader import IGNORE_INDEX
from data.slices import NUM_BINS
from inference.text import stream_text
from run import hardware
from run.distributed import Ranks
from run.progress import print0
from run.settings import Settings
from run.signals import Signals
from training.environment import Environment
from training.logger import SAMPLE_END, SAMPLES, Logger
from training.loss import TARGET_METRICS
from training.metrics import corpus_metrics
from training.steps import Progress, end_diverged
from training.trainer import Trainer

# Default tokens in an evaluation, as a fraction of the training tokens since the last evaluation.
EVALUATED_FRACTION = 0.1
MIN_EVAL_TOKENS = 8192  # even if that is a larger fraction
SAMPLE_TOKENS = 192  # maximum, including BOS
SIGNAL_INTERVAL = 16  # tokens of a sample between two signal checks


def count_eval_tokens(settings: Settings, corpus: Corpus, steps: float) -> int:
    """Return the number of held-out tokens that an evaluation reads, in a run of `steps` steps.

    The number does not depend on the model, nor on `steps` if `steps` is at least eval_every.
    """
    eval_tokens = settings.eval_tokens
    if eval_tokens is None:
        trained_tokens = min(settings.eval_every, steps) * settings.batch_tokens
        eval_tokens = max(MIN_EVAL_TOKENS, int(EVALUATED_FRACTION * trained_tokens))
    return min(eval_tokens, corpus.validation_tokens(settings.context))


def evaluate(
    loss_module: nn.Module,
    corpus: Corpus,
    num_tokens: int,
    context: int,
    batch_size: int,
    precision: torch.dtype,
    ranks: Ranks,
    signals: Signals,
    *,
    with_gradients: bool,
) -> dict | None:
    """Evaluate on held-out tokens; return the metrics of the corpus, such as `val_loss`.

    Reads the first `num_tokens` tokens in windows of `context` tokens that do not overlap,
    `batch_size` windows at a time. Returns None if a signal asks the run to end. If
    `with_gradients`, the graph compiled for training is used, so that no graph without gradients
    has to be compiled; the gradients are discarded.
    """
    loss_module.eval()
    batches = list(corpus.evaluation(num_tokens, context, batch_size))
    scores = []
    cells = []
    for start in range(0, len(batches), ranks.world_size):
        # Ranks compute together, so a rank without a batch repeats the last one, without targets.
        number = start + ranks.rank
        batch = batches[min(number, len(batches) - 1)]
        targets = batch.targets
        if number >= len(batches):
            targets = torch.full_like(targets, IGNORE_INDEX)
        arguments = [batch.inputs, targets]
        if batch.positions is not None:
            arguments.append(batch.positions)
        arguments = hardware.to_device(ranks.device, *arguments)
        with hardware.autocast(ranks.device, precision), torch.set_grad_enabled(with_gradients):
            _, metrics = loss_module(*arguments)
        scores.append(torch.stack([metrics[name] for name in TARGET_METRICS]))
        cells.append(batch.cells.flatten())
        if signals.agree(ranks):
            loss_module.train()
            return None
    loss_module.train()

    # Sum nats, correct predictions and targets by cell, in fp64. The host synchronizes with the
    # device only here, not for each batch.
    values = torch.cat(scores, dim=1).cpu().double()
    totals = torch.zeros(len(TARGET_METRICS), corpus.num_classes * NUM_BINS, dtype=torch.float64)
    totals.index_add_(1, torch.cat(cells), values)
    totals = ranks.all_reduce(totals).view(len(TARGET_METRICS), -1, NUM_BINS)
    return corpus_metrics(corpus, totals.numpy(), num_tokens)


class Evaluator:
    """Evaluates a trainer's model, samples text from it, and logs the results.

    All ranks call `evaluate` and `sample` together. If a signal that asks the run to end interrupts
    an evaluation or a sample, nothing is logged, and a resumed run repeats it. `batch_size` is in
    sequences.
    """

    def __init__(self, env: Environment, trainer: Trainer, log: Logger, batch_size: int):
        self.settings = env.settings
        self.corpus = env.corpus
        self.ranks = env.ranks
        self.signals = env.signals
        self.clock = env.clock
        self.trainer = trainer
        self.log = log
        self.batch_size = batch_size

    def plan_tokens(self, progress: Progress) -> int:
        """Return the number of held-out tokens per evaluation.

        It stays the same, even if the run is extended, unless the setting `eval_tokens` changes.
        """
        if progress.eval_tokens is None:
            steps = progress.total_steps
            progress.eval_tokens = count_eval_tokens(self.settings, self.corpus, steps)
        return progress.eval_tokens

    def evaluate(self, progress: Progress) -> None:
        """Log the loss on the held-out text. Exits with code 4 if it is not finite."""
        if self.signals.agree(self.ranks) or self.log.has("evaluation", progress.step):
            return
        eval_tokens = self.plan_tokens(progress)
        # Before a process's first step, nothing is compiled, and uncompiled attention may store all
        # scores. A micro-batch that fits only in compiled steps may then be too large for a GPU, so
        # evaluate row by row.
        will_compile = self.trainer.is_compiled and progress.step == progress.first_step
        is_cuda = self.ranks.device.type == "cuda"
        batch_size = 1 if will_compile and is_cuda else self.batch_size
        # A CPU would take up to a minute to compile a graph without gradients, so use the graph
        # that was compiled for training.
        with_gradients = self.trainer.is_compiled and not will_compile and not is_cuda
        with self.clock.pause():
            metrics = evaluate(
                self.trainer.loss_module,
                self.corpus,
                eval_tokens,
                self.settings.context,
                batch_size,
                self.trainer.precision,
                self.ranks,
                self.signals,
                with_gradients=with_gradients,
            )
        if metrics is None:
            return
        if not math.isfinite(metrics["val_loss"]):
            end_diverged(f"step {progress.step}: the held-out loss is not finite", progress)

        self.log.write(progress, metrics | {"eval_tokens": eval_tokens})
        numbers = []
        for name, value in metrics.items():
            if isinstance(value, float):
                numbers.append(f"{name} {value:.4f}")
        held_out = self.corpus.validation_tokens(self.settings.context)
        numbers.append(f"from {eval_tokens:,} of {held_out:,} held-out tokens")
        print0(f"step {progress.step}  held out: {', '.join(numbers)}")

    def sample(self, progress: Progress) -> None:
        """Write a text sample to samples.txt and to standard error."""
        if self.signals.agree(self.ranks) or self.log.has("sample", progress.step):
            return
        with self.clock.pause():
            if self.settings.sharded:
                text = self.generate(seed=progress.step)
            else:
                text = self.ranks.on_rank0(self.generate, progress.step)
        if self.signals.agree(self.ranks):
            return
        self.log.append(SAMPLES, f"--- step {progress.step}\n{text}{SAMPLE_END}")
        print0(f"--- a sample at step {progress.step}\n{text}\n---")

    def generate(self, seed: int) -> str:
        """Generate text from the start of a document.

        With a sharded model, all ranks compute each token together, and a signal to any rank cuts
        the text short. Otherwise, only rank 0 calls this, because ranks on different hardware might
        generate texts of different lengths, and only a signal to rank 0 cuts the text short.
        """
        model = self.trainer.model
        precision = torch.float32
        if self.settings.sharded:
            precision = self.trainer.precision
            gather_once(model)
        text = ""
        # Blocks that were compiled for training would be recompiled for single tokens.
        eager = torch.compiler.set_stance("force_eager")
        model.eval()
        with eager, hardware.autocast(self.ranks.device, precision):
            stream = stream_text(
                model,
                self.corpus.tokenizer,
                "",
                max_new_tokens=min(SAMPLE_TOKENS, model.context) - 1,
                temperature=0.8,
                top_k=50,
                seed=seed,
            )
            for num_tokens, streaming in enumerate(stream, start=1):
                text = streaming.text
                if num_tokens % SIGNAL_INTERVAL == 0 and self.is_stopping():
                    break
        model.train()
        return text

    def is_stopping(self) -> bool:
        """Whether a signal to this rank or, with a sharded model, to any rank ends the run."""
        if self.settings.sharded:
            return self.signals.agree(self.ranks) != 0
        return self.signals.received != 0


def gather_once(model: nn.Module) -> None:
    """Gather all weights once, so that FSDP allocates its buffers outside inference mode.

    FSDP keeps these buffers, and training cannot write to buffers that were allocated in inference
    mode, in which text is generated.
    """
    for module in (model, *model.blocks):
        module.unshard()
        module.reshard()
