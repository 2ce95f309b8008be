"""The state of a training run, and the operations of the loop in train.py."""

import math
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from data.corpus import Corpus
from data.loader import Loader
from inference.text import generate_text
from run import checkpoint, compilation, errors, hardware, progress, sharding
from run.distributed import DistEnv
from run.hardware import to_device
from run.instantiate import instantiate
from run.progress import duration
from run.settings import Settings
from run.signals import Signals
from training import resume
from training.budget import Clock, TimeBudget, count_epoch_steps
from training.evaluation import evaluate
from training.logger import Logger
from training.memory import choose_micro_batch
from training.optimizer_state import optimizer_state, set_learning_rates
from training.parallel import build_parallel

# Tokens of an evaluation, as a fraction of those trained on between two evaluations.
EVALUATED_FRACTION = 0.1
MIN_EVAL_TOKENS = 8192  # even if that is a larger fraction
SAMPLE_TOKENS = 192  # at most, BOS included
EVALUATION_COST = 0.5  # time to evaluate a token, relative to training on it: 0.4 to 0.6 on CPUs


class Trainer:
    """The model, its optimizers and the position of a run. All ranks call the same methods."""

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        loader: Loader,
        run_dir: Path,
        ranks: DistEnv,
        signals: Signals,
        clock: Clock,
    ):
        self.settings = settings
        self.corpus = corpus
        self.loader = loader
        self.run_dir = run_dir
        self.ranks = ranks
        self.signals = signals
        self.clock = clock
        self.log = Logger(run_dir, settings, is_enabled=ranks.is_main)
        self.precision = hardware.pick_precision(settings.precision, ranks.device)

        # Model and optimizers. `loss_module` maps tokens to the loss; `parallel` is what a training
        # step calls: DDP around the loss module, or else the loss module itself.
        bos = corpus.tokenizer.bos if settings.document_mask else None
        self.loss_module, self.parallel = build_parallel(settings, bos, ranks, self.precision)
        self.model = self.loss_module.model
        self.optimizers = instantiate(settings.optimizer, "training")(self.model)
        self.schedule = instantiate(settings.schedule, "training")
        is_fp16 = self.precision == torch.float16
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=is_fp16)

        # Position, in optimizer steps.
        self.step = 0
        self.steps = settings.steps or math.inf
        if settings.steps is None and settings.max_epochs is not None:
            self.steps = count_epoch_steps(loader, settings.max_epochs)
        self.first_step = 0  # where this process began
        self.saved_step = 0  # of the newest checkpoint
        self.reported_step = 0  # of the newest line of training metrics
        self.exit_code = 0  # other than 0 once a signal asks the run to end
        self.log_state = {}  # how far the log's files went before this step's sample and evaluation
        self.budget = None  # None once the number of steps is known
        if settings.max_minutes is not None:
            self.budget = TimeBudget(settings.max_minutes, clock)

        # How a step is computed.
        is_long = compilation.is_long_run(self.steps, settings.max_minutes)
        self.is_compiled = compilation.pick_compile(settings.compile, ranks.device, is_long)
        self.micro_batch_size = choose_micro_batch(self)

        # Metrics since the last report. `loss_sum` (1 + L,) has the cross-entropy and the auxiliary
        # losses, summed over the targets of this rank, in nats; a checkpoint, the sum of all ranks.
        self.loss_names = ("train_loss", *self.model.loss_names)
        self.loss_sum = torch.zeros(len(self.loss_names), device=ranks.device)
        self.grad_norm = torch.zeros((), device=ranks.device)
        self.is_finite = torch.ones((), dtype=torch.bool, device=ranks.device)  # of all gradients
        self.flops_per_token = self.model.training_flops()
        self.timed_step = 0  # steps after it are timed, from `timed_from` on
        self.timed_from = clock.training()

    # Starting and resuming

    def restore_or_start(self, pretrained: Path | None) -> None:
        """Restore the newest checkpoint of a run that is resumed, or start a new one."""
        resumes = self.settings.resume
        newest = self.ranks.on_rank0(lambda: checkpoint.prepare_run(self.run_dir, resumes))
        if newest is not None:
            resume.restore(self, newest)
        elif pretrained is not None:
            checkpoint.load_weights(self.model, pretrained)
            progress.say(f"starting with the weights of {pretrained}")
        elif resumes:
            progress.say(f"nothing to resume in {self.run_dir}: a fresh start")
        self.log.open(self.log_state)

    @property
    def is_finished(self) -> bool:
        """Whether there is no further step."""
        return self.step >= self.steps

    def is_due(self, interval: int) -> bool:
        """Whether an interval of so many steps ends at this step. All end at the last step."""
        return self.step > 0 and (self.step % interval == 0 or self.is_finished)

    def check_signals(self) -> int:
        """The exit code, equal on all ranks, once a signal has asked one of them to end; else 0."""
        self.exit_code = self.ranks.all_reduce_max(self.signals.code)
        return self.exit_code

    # The training step

    def train_step(self) -> None:
        """One optimizer step over `batch_tokens` tokens of all ranks."""
        set_learning_rates(self.optimizers, self.schedule(self.step, self.steps))
        if self.is_compiled and self.step == self.first_step:
            self.loss_sum += self.compile_gradients()
        else:
            self.loss_sum += self.compute_gradients()

        # Clip.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        max_norm = self.settings.clip or math.inf
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.grad_norm = sharding.full_tensor(grad_norm)

        # Update the weights. An infinite gradient in fp16 asks for a smaller scale: clipping by it
        # has spoiled every gradient, so the step is skipped.
        has_overflowed = self.scaler.is_enabled() and not self.grad_norm.isfinite()
        if not has_overflowed:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)

        # Record on the device, without a wait, whether the run diverges here. An overflow is no
        # divergence as long as there is a smaller scale to try.
        if not has_overflowed or self.scaler.get_scale() < 1:
            self.is_finite &= self.grad_norm.isfinite()
        self.scaler.update()
        self.model.zero_grad()
        self.step += 1
        self.log.advance(self.step, self.steps)

        # From now on there is something to save.
        self.log_state = self.log.state()
        self.signals.is_armed = True
        self.check_signals()

    def compute_gradients(self) -> Tensor:
        """Set the gradients of this step's batch -> this rank's losses, summed over targets."""
        # Dropout depends on seed, step and rank alone, so that a resumed run repeats it.
        draw = (self.settings.seed * 2**32 + self.step) * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(draw % 2**63)
        self.model.zero_grad()  # a compilation that failed may have left some

        # The rows of this rank, as many at a time as a forward takes. Ranks exchange gradients
        # once, with the last micro-batch.
        rows_per_rank = self.loader.batch_size // self.ranks.world_size
        first = self.ranks.rank * rows_per_rank
        end = first + rows_per_rank
        loss_sum = torch.zeros_like(self.loss_sum)
        for start in range(first, end, self.micro_batch_size):
            rows = slice(start, start + self.micro_batch_size)
            loss_sum += self.accumulate(rows, is_last=rows.stop == end)
        return loss_sum

    def accumulate(self, rows: slice, *, is_last: bool) -> Tensor:
        """Add the gradient of these rows of the batch -> their losses, summed over targets."""
        batch = to_device(self.ranks.device, *self.loader(self.step, rows))
        # What DDP's no_sync sets too; it means nothing to another module.
        self.parallel.require_backward_grad_sync = is_last
        with hardware.autocast(self.ranks.device, self.precision):
            loss_sum, _ = self.parallel(*batch)
        # The mean over the targets of the batch; gradients are averaged over ranks.
        loss = loss_sum[0] * (self.ranks.world_size / self.loader.num_targets(self.step))
        self.scaler.scale(loss).backward()
        return loss_sum.detach()

    def compile_gradients(self) -> Tensor:
        """`compute_gradients` while forward and backward are compiled.

        Where that fails, training goes on without it; with compile=true, the process ends with exit
        code 2. The time that this takes is not that of a step.
        """
        self.compile()
        with progress.waiting(
            "compiling the training step, which .cache/ keeps (to begin at once: compile=false)"
        ):
            loss_sum = compilation.compile_and_run(
                self.compute_gradients,
                is_required=self.settings.compile is True or self.ranks.world_size > 1,
                option="compile=false",
            )
        if loss_sum is None:
            torch.compiler.set_stance("force_eager")  # from now on
            self.is_compiled = False
            loss_sum = self.compute_gradients()
        self.timed_step = self.step + 1
        self.timed_from = self.clock.training()
        return loss_sum

    def compile(self) -> None:
        """Have torch.compile compile the training step when it runs for the first time."""
        # The weights of a sharded model arrive between its blocks, which are compiled one by one,
        # and its loss is not. On a CPU, blocks and loss apart save a third of the compiler's time,
        # since most blocks share their code; a teacher's would not be compiled then.
        modules = [self.loss_module]
        if self.settings.sharded:
            modules = self.model.blocks
        elif self.ranks.device.type == "cpu" and self.settings.distill is None:
            modules = [*self.model.blocks, self.loss_module.head_loss]
        compilation.clean_cache()
        # Blocks share their code but not their constants, and count as recompilations.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.trace_autograd_ops = True  # of a forward that computes gradients
        # The backward runs outside of autocast: what a layer computes in fp32 has fp32 gradients.
        torch._functorch.config.backward_pass_autocast = "off"
        for module in modules:
            module.compile(dynamic=False)

    # Fitting the steps to the time

    def fit_steps(self) -> None:
        """Decide, once, after some timed steps, how many steps fit into `max_minutes`."""
        if self.budget is None:
            return
        steps_left = self.ranks.on_rank0(self.budget.count_steps)
        if steps_left is None:
            return
        # Every evaluation takes the time of some steps.
        eval_tokens = self.eval_tokens(self.step + steps_left)
        eval_steps = EVALUATION_COST * eval_tokens / self.settings.batch_tokens
        steps_left = (steps_left - eval_steps) / (1 + eval_steps / self.settings.eval_every)
        fitted_steps = self.step + max(1, int(steps_left))
        self.steps = min(self.steps, fitted_steps)
        self.budget = None
        progress.say(
            f"max_minutes={self.settings.max_minutes:g} has room for {fitted_steps} steps: "
            f"the run ends at step {self.steps}"
        )

    # Metrics

    def report(self) -> None:
        """Write the metrics of the steps since the last report, and show them."""
        self.check_finite()
        loss_sum = self.ranks.all_reduce(self.loss_sum.cpu())
        steps = range(self.reported_step, self.step)
        loss = loss_sum / sum(map(self.loader.num_targets, steps))

        # Throughput and, where the peak of the device is known, model FLOP utilization; without
        # numbers where no step was timed, as while the first one is compiled.
        now = self.clock.training()
        tokens_per_second = None
        mfu = None
        seconds_left = math.inf
        text = f"loss {loss[0]:.3f}  "
        if self.step > self.timed_step:
            steps_per_second = (self.step - self.timed_step) / (now - self.timed_from)
            seconds_left = (self.steps - self.step) / steps_per_second
            tokens_per_second = steps_per_second * self.settings.batch_tokens
            text += f"{tokens_per_second:,.0f} tokens/s  "
            peak_flops = hardware.peak_flops(self.ranks.device)
            if peak_flops is not None:
                mfu = tokens_per_second * self.flops_per_token / peak_flops / self.ranks.world_size
                text += f"mfu {mfu:.1%}  "

        memory = hardware.peak_memory(self.ranks.device)
        grad_norm = self.grad_norm.item()
        self._write_metrics(
            **dict(zip(self.loss_names, loss.tolist(), strict=True)),
            lr=self.optimizers[0].param_groups[0]["lr"],
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            tokens_per_second=tokens_per_second,
            mfu=mfu,
            peak_memory_bytes=memory,
        )
        # Before the number of steps is fitted, the clock may end the run earlier.
        if self.budget is not None:
            seconds_left = min(seconds_left, self.budget.seconds_left())
        self.log.progress(f"{text}{memory / 2**30:.1f} GiB  {duration(seconds_left)} left")

        # Begin the next report.
        self.log_state = self.log.state()
        self.loss_sum.zero_()
        self.reported_step = self.step
        self.timed_step = self.step
        self.timed_from = now

    def _write_metrics(self, **values: float | dict | None) -> None:
        tokens = self.step * self.settings.batch_tokens
        self.log.write(self.step, tokens=tokens, seconds=round(self.clock.total(), 3), **values)

    # Evaluation and samples

    def sample(self) -> None:
        """Write a sample of text to samples.txt and show it. A signal leaves it out."""
        if self.check_signals():
            return
        # All ranks compute the same text; those of a sharded model compute every token together.
        precision = torch.float32
        with self.clock.pause(), progress.waiting("sampling text (less often: sample_every)"):
            if self.settings.sharded:
                # FSDP keeps the buffers of its first all-gather. If inference mode, in which text
                # is generated, had made them, training could not write to them.
                for module in (self.model, *self.model.blocks):
                    module.unshard()
                    module.reshard()
                precision = self.precision
            # Blocks that were compiled for training would be compiled again for single tokens.
            eager = torch.compiler.set_stance("force_eager")
            self.model.eval()
            with eager, hardware.autocast(self.ranks.device, precision):
                (text,) = generate_text(
                    self.model,
                    self.corpus.tokenizer,
                    "",
                    max_new_tokens=min(SAMPLE_TOKENS, self.model.context) - 1,
                    temperature=0.8,
                    top_k=50,
                    seed=self.step,
                    stop=self.check_signals,
                )
            self.model.train()
        if self.check_signals():
            return
        self.log.append("samples.txt", f"--- step {self.step}\n{text}\n")
        progress.say(f"--- a sample at step {self.step}\n{text}\n---")

    def eval_tokens(self, steps: float) -> int:
        """The number of held-out tokens that an evaluation reads, in a run of `steps` steps.

        It does not depend on the model, so all runs of at least eval_every steps read the same.
        """
        eval_tokens = self.settings.eval_tokens
        if eval_tokens is None:
            trained_tokens = min(self.settings.eval_every, steps) * self.settings.batch_tokens
            eval_tokens = max(MIN_EVAL_TOKENS, int(EVALUATED_FRACTION * trained_tokens))
        return min(eval_tokens, self.corpus.validation_tokens(self.settings.context))

    def evaluate(self) -> None:
        """Log the loss on the held-out text. A signal leaves it out."""
        if self.check_signals():
            return
        eval_tokens = self.eval_tokens(self.steps)
        what = f"evaluating on {eval_tokens:,} held-out tokens (less often: eval_every)"
        with self.clock.pause(), progress.waiting(what):
            score = evaluate(
                self.loss_module,
                self.corpus,
                eval_tokens,
                self.settings.context,
                self.micro_batch_size,
                self.precision,
                self.ranks,
                self.check_signals,
                # A graph without gradients would take a CPU up to a minute to compile. At the step
                # where a process begins, nothing is compiled yet.
                with_gradients=self.step > self.first_step
                and self.is_compiled
                and self.ranks.device.type != "cuda",
            )
        if score is None:
            return
        if not math.isfinite(score["val_loss"]):
            self._end_diverged(f"step {self.step}: evaluation is not finite")
        self._write_metrics(**score, eval_tokens=eval_tokens)
        numbers = [
            f"{name} {value:.4f}" for name, value in score.items() if isinstance(value, float)
        ]
        progress.say(f"step {self.step}  held out: {', '.join(numbers)}")

    # Saving

    def state(self) -> dict:
        """The state of a run besides its weights and its config, as plain data."""
        return {
            "step": self.step,
            "steps": self.steps,
            "is_fitted": self.settings.max_minutes is not None and self.budget is None,
            "seconds": self.clock.total(),
            "optimizer": optimizer_state(self.model, self.optimizers),
            "scaler": self.scaler.state_dict(),
            "loss_sum": self.loss_sum.cpu() * self.ranks.world_size,
            "reported_step": self.reported_step,
            "log": self.log_state,
        }

    def saved_config(self) -> dict:
        """The settings, the text and the machine, with which a resumed run is compared."""
        made_with = {"text": self.corpus.sha256, "machine": resume.fingerprint(self)}
        return self.settings.model_dump() | made_with

    def save(self) -> None:
        """Write a checkpoint, unless this step has one. Ends with exit code 4 if it diverged."""
        if self.saved_step == self.step:
            return
        self.check_finite()
        # Each rank goes on with an equal share of the loss, as it will when the run is resumed.
        loss_sum = self.ranks.all_reduce(self.loss_sum.cpu())
        self.loss_sum.copy_(loss_sum / self.ranks.world_size)

        with self.clock.pause(), progress.waiting("saving a checkpoint (less often: save_every)"):
            weights = {
                name: self.ranks.gather_to_rank0(tensor)
                for name, tensor in self.model.state_dict().items()
            }
            state = self.state()
            self.ranks.on_rank0(lambda: self._write_checkpoint(weights, state))
        self.saved_step = self.step

    def _write_checkpoint(self, weights: dict[str, Tensor], state: dict) -> None:
        """Ends with exit code 4 for what is not finite."""
        # The update itself may have overflowed, though loss and gradient were finite.
        parameters = [weights[name] for name, _ in self.model.named_parameters()]
        for value in tree_leaves([parameters, state["optimizer"]]):
            if isinstance(value, Tensor) and not value.isfinite().all():
                self._end_diverged(f"step {self.step} made weights or optimizer infinite")
        tokenizer = self.corpus.tokenizer.files
        checkpoint.save(self.run_dir, self.step, weights, self.saved_config(), tokenizer, state)

    def check_finite(self) -> None:
        """End with exit code 4 where a step was not finite. No checkpoint is of such weights."""
        is_finite = self.is_finite & self.loss_sum.isfinite().all()
        if self.ranks.all_reduce_max(int(not is_finite)):
            self._end_diverged(f"by step {self.step}")

    def _end_diverged(self, where: str) -> NoReturn:
        errors.exit_with(
            errors.DIVERGED,
            f"training diverged ({where}). fix: a lower optimizer.lr, or precision=fp32; "
            f"resume=true goes on from step {self.saved_step}",
            rank0_only=True,
        )
