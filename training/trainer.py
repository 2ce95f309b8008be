"""The state of a training run, and the operations of the training loop in train.py."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.corpus import Corpus
from data.loader import Loader
from run import checkpoint, compilation, config, errors, hardware, sharding
from run.distributed import DistEnv
from run.hardware import to_device
from run.instantiate import instantiate
from run.progress import duration
from run.signals import Signals
from tools.formats import converted_model
from training import resume
from training.budget import RESERVED_SECONDS, TimeBudget, count_epoch_steps
from training.compile_choice import COMPILED_OPTIONS, TIMED_STEPS, CompileRecord, is_long_run
from training.divergence import DivergenceGuard
from training.evaluation import evaluate, sample_text
from training.logger import Logger, is_evaluated
from training.optimizers import (
    handles_found_inf,
    load_state_by_name,
    set_learning_rates,
    state_by_name,
)
from training.parallel import build_parallel

# Tokens of an evaluation, as a fraction of those trained on between two evaluations.
EVALUATED_FRACTION = 0.1
MIN_EVAL_TOKENS = 8192  # even if that is a larger fraction


class Trainer:
    """The model, its optimizers and the position of a run. All ranks call the same methods.

    `settings` is the resolved config; `started` is the monotonic time at which the process began;
    `micro_batch_size` defaults to that of the config.
    """

    def __init__(
        self,
        settings: dict,
        corpus: Corpus,
        loader: Loader,
        run_dir: Path,
        ranks: DistEnv,
        precision: torch.dtype,
        signals: Signals,
        started: float,
        micro_batch_size: int | None = None,
    ):
        self.settings = settings
        self.corpus = corpus
        self.loader = loader
        self.run_dir = run_dir
        self.ranks = ranks
        self.precision = precision
        self.signals = signals
        self.log = Logger(run_dir, settings, is_enabled=ranks.is_main)
        self.batch_tokens = settings["batch_tokens"]
        if micro_batch_size is None:
            micro_batch_size = config.micro_batch_size(settings, ranks.world_size)
        self.micro_batch_size = micro_batch_size

        # Model and optimizers. `loss_module` maps tokens to the loss; `parallel` is what a training
        # step calls: DDP around the loss module, or else the loss module itself.
        bos = corpus.tokenizer.bos if settings["document_mask"] else None
        self.loss_module, self.parallel = build_parallel(settings, bos, ranks, precision)
        self.model = self.loss_module.model
        self.is_sharded = settings["sharded"]
        self.optimizers = instantiate(settings["optimizer"], "training")(self.model)
        self.schedule = instantiate(settings["schedule"], "training")
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=precision == torch.float16)
        self.guard = DivergenceGuard(ranks)
        if not self.scaler.is_enabled():  # a scaler tells the optimizers itself
            self.guard.attach(self.optimizers)

        # Compilation. With compile=auto, the first steps are not compiled, and one is timed.
        self.is_compiled = settings["compile"] is True
        machine = resume.fingerprint(ranks, precision, False, self.micro_batch_size)
        cold_seconds = compilation.expected_seconds(len(self.model.blocks), ranks.device)
        options = [settings[key] for key in COMPILED_OPTIONS]
        self.compile_record = CompileRecord([machine, settings["model"], options], cold_seconds)
        # On a GPU the first steps may not fit into memory before they are compiled.
        if settings["compile"] == "auto" and ranks.device.type == "cuda":
            self.is_compiled = cold_seconds < math.inf and is_long_run(settings)
        self.compile_seconds = 0.0  # that this process took
        self.eager_step_seconds = 0.0

        # Position, in optimizer steps.
        self.step = 0
        self.steps = settings["steps"] or math.inf
        if settings["steps"] is None and settings["max_epochs"] is not None:
            self.steps = count_epoch_steps(loader, settings["max_epochs"])
        self.first_step = 0  # where this process began, or has compiled
        self.saved_step = 0  # of the newest checkpoint
        self.reported_step = 0  # of the newest line of training metrics
        self.log_state = {}  # how far the log's files went before this step's sample and evaluation
        self.exit_code = 0  # other than 0 once a signal asks the run to end

        # Metrics since the last report. A checkpoint stores the loss summed over all ranks.
        dtype = hardware.accumulation_dtype(ranks.device)
        self.loss_sum = torch.zeros((), dtype=dtype, device=ranks.device)  # nats, of this rank
        self.grad_norm = torch.zeros((), device=ranks.device)
        self.tokens_per_second = 0.0
        self.flops_per_token = self.model.training_flops()
        self.peak_flops = hardware.peak_flops(ranks.device)

        # Time, in seconds.
        self.started = started  # earlier by the time of the processes that this one resumes
        self.paused_seconds = 0.0  # that were not spent on training
        self.last_report_time = self._clock()
        self.step_start = self.last_report_time

        self.budget = None  # None once the number of steps is known
        if settings["max_minutes"] is not None:
            self.budget = TimeBudget(settings["max_minutes"], self._evaluation_steps)

    # Starting and resuming

    def restore_or_start(self, pretrained: Path | None) -> None:
        """Restore the newest checkpoint of a run that is resumed, or start a new one."""
        resumes = self.settings["resume"]
        newest = self.ranks.on_rank0(
            lambda: checkpoint.prepare_run(self.run_dir, self.model, resumes)
        )
        if newest is not None:
            self._restore(newest)
            return
        if pretrained is not None:
            tree = self.settings["model"]
            changes = converted_model.load_converted(self.model, tree, pretrained)
            for line in converted_model.describe(changes):
                self.log.info(line)
            self.log.info(
                f"starting with the weights of {pretrained}, context {self.settings['context']}"
            )
        if resumes:
            self.log.info(f"nothing to resume in {self.run_dir}: a fresh start")

    def _restore(self, newest: Path) -> None:
        """Load all that `state` stores. Ends with exit code 2 where the config is another run's."""
        # An older run has neither of these: what is asked for now is no change.
        newer = {key: self.settings[key] for key in ("max_epochs", "distill_weight")}
        saved = newer | checkpoint.load_config(newest)
        if self.settings["compile"] == "auto":
            self.is_compiled = saved["machine"]["compiled"]
        if self.settings["micro_batch"] is None:
            self._keep_micro_batch(saved["machine"].get("micro_batch"))
        with errors.user_input():
            changes = resume.check_resumed(saved, self.saved_config(), newest)
        state = checkpoint.load_state(newest, set(self.state()))

        # The weights come last, since creating an optimizer's state moves them. In fp16 there is no
        # such state as long as every step was skipped.
        if state["optimizer"] or not state["scaler"]:
            load_state_by_name(self.optimizers, self.model, state["optimizer"])
        checkpoint.load_weights(self.model, newest)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

        # Keep the saved number of steps unless its bound has changed: `steps` or, where that is
        # null, `max_epochs`.
        self.step = state["step"]
        steps = self.settings["steps"]
        is_same_bound = steps == saved["steps"]
        if steps is None and self.settings["max_epochs"] != saved["max_epochs"]:
            is_same_bound = False
        # Older versions saved infinity until the number of steps was fitted.
        if is_same_bound and state["steps"] < math.inf:
            self.steps = state["steps"]
        if state["fitted"] and (is_same_bound or steps is not None):
            self.budget = None
        self.first_step = self.step
        self.saved_step = self.step
        self.reported_step = state["reported"]
        self.started -= state["seconds"]
        self.log_state = state["log"]
        self.loss_sum.copy_(state["nats"] / self.ranks.world_size)
        self.log.info(f"resuming step {self.step}\n{changes}".rstrip())

    def _keep_micro_batch(self, saved: int | None) -> None:
        """Keep the micro-batch size of the checkpoint if it fits here: it affects rounding."""
        rows_per_rank = self.loader.batch_size // self.ranks.world_size
        if saved is not None and saved < self.micro_batch_size and rows_per_rank % saved == 0:
            self.micro_batch_size = saved
            self.log.info(f"micro_batch={saved}, as before")

    def is_complete(self) -> bool:
        """Whether an earlier process has done the last step and all that belongs to it."""
        if self.step != self.steps:
            return self.step > self.steps  # a longer run than is asked for now
        return self.ranks.on_rank0(lambda: is_evaluated(self.run_dir, self.step))

    @property
    def is_finished(self) -> bool:
        """Whether there is no further step."""
        return self.step >= self.steps

    # Compilation

    def choose_compilation(self) -> None:
        """With compile=auto, after step TIMED_STEPS of a run on a CPU: compile if it saves time."""
        decides_here = self.settings["compile"] == "auto" and self.ranks.device.type != "cuda"
        if not decides_here or self.is_compiled or self.step > TIMED_STEPS:
            return
        self.loss_sum.item()  # waits for the device
        self.eager_step_seconds = self._clock() - self.step_start
        if self.step < TIMED_STEPS:
            return
        record = self.compile_record
        seconds_left = self._seconds_left(self.eager_step_seconds)
        self.is_compiled = self.ranks.on_rank0(lambda: record.pays(seconds_left))
        compiled_step_seconds = record.step_ratio * self.eager_step_seconds
        self.log.info(
            f"{'' if self.is_compiled else 'not '}compiling (compile=auto): it would take about "
            f"{record.seconds:.0f} s of the {seconds_left:.0f} s left, and bring steps from "
            f"{self.eager_step_seconds:.2f} s to about {compiled_step_seconds:.2f} s"
        )
        if self.is_compiled and not self.exit_code:
            self.compile_first_step()

    def compile(self) -> None:
        """Have torch.compile compile the training step when it runs for the first time."""
        compilation.use_cache()
        # An earlier run of a sweep may have gone on without compilation.
        torch.compiler.set_stance("default")
        # Blocks share their code but not their constants, and count as recompilations.
        torch._dynamo.config.recompile_limit = 64
        # The backward runs outside of autocast: what a layer computes in fp32 has fp32 gradients.
        torch._functorch.config.backward_pass_autocast = "off"
        # The weights of a sharded model arrive between its blocks, which are compiled one by one.
        modules = self.model.blocks if self.is_sharded else [self.loss_module]
        for module in modules:
            module.compile(dynamic=False)
        self.is_compiled = True

    def compile_first_step(self) -> None:
        """Compile forward and backward now, on a batch that teaches nothing: later steps only run.

        Where compilation fails, training goes on without it; with compile=true the process ends
        with exit code 2. A signal ends the process at once.
        """
        self.signals.disarm()
        problem = ""
        start = monotonic()
        self.compile()
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        pause = self._pause(
            "compiling the training step",
            self.compile_record.seconds,
            "less where .cache/ has it from before; to begin at once: compile=false",
        )
        with compilation.exit_without_waiting(), pause, self._no_sync():
            try:
                rows = self._micro_batches()[0]
                self._accumulate(rows)
                # Evaluation has another graph if it needs no gradients, or if there is dropout.
                self.loss_module.eval()
                if self.evaluates_with_gradients:
                    self._accumulate(rows)
                else:
                    with torch.no_grad():
                        self._forward(rows)
            except RuntimeError as error:
                if not compilation.is_compile_error(error):
                    raise
                problem = compilation.first_error_line(error)

        # Undo what the batch did.
        self.loss_module.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.first_step = self.step
        self.last_report_time = self._clock()

        # Go on without compilation where it has failed on any rank.
        if not self.ranks.all_reduce_max(int(bool(problem))):
            self.compile_seconds = monotonic() - start
            self.log.info(f"compiled in {self.compile_seconds:.0f} s")
            return
        if self.settings["compile"] is True:
            compilation.exit_failed(problem, "compile=false")
        self.log.info(f"warning: compilation failed, training goes on without it ({problem})")
        torch.compiler.set_stance("force_eager")
        self.is_compiled = False

    # The training step

    def is_due(self, interval: str) -> bool:
        """Whether `interval`, such as "save_every", ends at this step. All end at the last step.

        Before the first step only pretrained weights are evaluated.
        """
        if self.step == 0:
            return interval == "eval_every" and self.settings["init_from"] is not None
        return self.step % self.settings[interval] == 0 or self.step == self.steps

    def train_step(self) -> None:
        """One optimizer step over `batch_tokens` tokens of all ranks."""
        self.log_state = self.log.state()
        self.step_start = self._clock()

        # Dropout depends on seed, step and rank alone, so that a resumed run repeats it.
        draw = (self.settings["seed"] * 2**32 + self.step) * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(draw % 2**63)
        set_learning_rates(self.optimizers, self.schedule(self.step, self.steps))

        # Accumulate gradients; ranks exchange them once, with the last micro-batch.
        *micro_batches, last = self._micro_batches()
        for rows in micro_batches:
            with self._no_sync():
                self.loss_sum += self._accumulate(rows)
        self.loss_sum += self._accumulate(last)

        # Clip.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        max_norm = self.settings["clip"] or math.inf
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.grad_norm = sharding.full_tensor(grad_norm)

        # Update the weights, unless loss or gradient, and so their sum, is not finite. In fp16 an
        # infinite gradient is no divergence as long as the scaler has a smaller scale to try.
        value = self.loss_sum
        if not self.scaler.is_enabled() or self.scaler.get_scale() < 1:
            value = value + self.grad_norm
        self.guard.update(self.step + 1, value)
        for optimizer in self.optimizers:
            if not self._must_skip(optimizer):
                self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        self.step += 1

        # From now on there is something to save.
        self.signals.arm()
        self.check_signals()

    def _micro_batches(self) -> list[slice]:
        """The rows of a batch that this rank computes, as many at a time as a forward takes."""
        rows_per_rank = self.loader.batch_size // self.ranks.world_size
        first = self.ranks.rank * rows_per_rank
        starts = range(first, first + rows_per_rank, self.micro_batch_size)
        return [slice(start, start + self.micro_batch_size) for start in starts]

    def _forward(self, rows: slice) -> Tensor:
        """The loss of these rows of the batch, summed over targets."""
        batch = to_device(self.ranks.device, *self.loader(self.step, rows))
        with hardware.autocast(self.ranks.device, self.precision):
            loss_sum, _ = self.parallel(*batch)
        return loss_sum

    def _accumulate(self, rows: slice) -> Tensor:
        """Add the gradient of these rows of the batch -> their loss, summed over targets."""
        loss_sum = self._forward(rows)
        # The mean over the targets of the batch; gradients are averaged over ranks.
        loss = loss_sum * (self.ranks.world_size / self.loader.num_targets(self.step))
        self.scaler.scale(loss).backward()
        return loss_sum.detach()

    def _no_sync(self) -> AbstractContextManager:
        """Inside, backward does not exchange gradients between ranks."""
        if self.parallel is self.loss_module:
            return nullcontext()
        return self.parallel.no_sync()

    def _must_skip(self, optimizer: Optimizer) -> bool:
        """Whether to skip `optimizer.step()` on the host, as the loss or a gradient is not finite.

        An optimizer that handles `found_inf` does so on the device, without a wait. For any other
        the host waits for the number, as it does in fp16, where an overflow of one gradient
        makes the norm infinite, and clipping by it spoils every gradient.
        """
        if self.scaler.is_enabled():
            return bool(self.guard.found_inf) or not bool(self.grad_norm.isfinite())
        return not handles_found_inf(optimizer) and bool(self.guard.found_inf)

    def check_signals(self) -> int:
        """The exit code, equal on all ranks, once a signal has asked one of them to end; else 0."""
        self.exit_code = self.exit_code or self.ranks.all_reduce_max(self.signals.code)
        return self.exit_code

    def fit_steps_to_budget(self) -> None:
        """Decide, once, after some timed steps, how many steps fit into `max_minutes`."""
        if self.budget is None:
            return
        steps_done = self.step - self.first_step
        steps_left = self.ranks.on_rank0(
            lambda: self.budget.fit(steps_done, self._clock(), self.seconds)
        )
        if steps_left is None:
            return
        fitted_steps = self.step + steps_left
        text = f"max_minutes={self.settings['max_minutes']} has room for {fitted_steps} steps"
        if self.settings["steps"] is None and self.steps < math.inf:
            bound = "max_minutes" if fitted_steps < self.steps else "max_epochs"
            text += f", max_epochs={self.settings['max_epochs']} for {self.steps}: {bound} ends it"
        self.log.info(text)
        self.steps = min(self.steps, fitted_steps)
        self.budget = None

    # Metrics and progress

    def log_metrics(self) -> None:
        """Write the metrics of the steps since the last report, and show them."""
        self.check_finite()
        self._measure_throughput()
        if self.compile_seconds > 0 and self.ranks.is_main:
            step_seconds = self.batch_tokens / self.tokens_per_second
            self.compile_record.add(self.compile_seconds, step_seconds, self.eager_step_seconds)
            self.compile_seconds = 0.0
        loss_sum = self.ranks.all_reduce_sum(self.loss_sum.item())
        grad_norm = self.grad_norm.item()
        self._write_metrics(
            train_loss=loss_sum / self._unreported_targets(),
            lr=self.optimizers[0].param_groups[0]["lr"],
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            tokens_per_second=self.tokens_per_second,
            flops_per_second=self.tokens_per_second * self.flops_per_token,
            mfu=self.mfu,
            peak_memory_bytes=hardware.peak_memory(self.ranks.device),
        )
        self.log_state = self.log.state()
        self._draw_progress(loss_sum)

        # Begin the next report.
        self.loss_sum.zero_()
        self.reported_step = self.step
        self.last_report_time = self._clock()

    def _write_metrics(self, **values: float | dict | None) -> None:
        tokens = self.step * self.batch_tokens
        self.log.write(self.step, tokens=tokens, seconds=round(self.seconds, 3), **values)

    def show_progress(self) -> None:
        """Between reports, at most once a second: show the loss of this rank since the last one."""
        if self.step > self.reported_step and self.log.wants_progress():
            self._measure_throughput()
            self._draw_progress(self.loss_sum.item() * self.ranks.world_size)

    def _unreported_targets(self) -> int:
        steps = range(self.reported_step, self.step)
        return sum(self.loader.num_targets(step) for step in steps)

    def _measure_throughput(self) -> None:
        """Tokens per second of this process's steps since the last report."""
        steps = self.step - max(self.reported_step, self.first_step)
        seconds = self._clock() - self.last_report_time
        self.tokens_per_second = steps * self.batch_tokens / seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization: the fraction of the devices' peak, if that is known."""
        if self.peak_flops is None:
            return None
        peak_flops = self.peak_flops * self.ranks.world_size
        return self.tokens_per_second * self.flops_per_token / peak_flops

    def _draw_progress(self, loss_sum: float) -> None:
        """Show loss, throughput, utilization, memory and time left."""
        utilization = f"{self.tokens_per_second * self.flops_per_token / 1e9:,.0f} GFLOP/s"
        if self.mfu is not None:
            utilization = f"mfu {self.mfu:.1%}"
        seconds_left = self._seconds_left(self.batch_tokens / self.tokens_per_second)
        self.log.progress(
            self.step,
            self.steps,
            f"loss {loss_sum / self._unreported_targets():.3f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {utilization}  "
            f"{hardware.peak_memory(self.ranks.device) / 2**30:.1f} GiB  "
            f"{duration(seconds_left)} left",
        )

    def _seconds_left(self, step_seconds: float) -> float:
        """For steps: by the time that one takes or, before their number is fitted, the clock."""
        seconds = (self.steps - self.step) * step_seconds
        if self.budget is not None:
            clock_seconds = self.budget.limit - RESERVED_SECONDS - self.seconds
            seconds = min(seconds, max(0.0, clock_seconds))
        return seconds

    # Evaluation and samples

    def sample(self) -> None:
        """Write a sample of text to samples.txt and show it. A signal leaves it out."""
        if self.check_signals():
            return
        text = ""
        sample = partial(sample_text, self.model, self.corpus.tokenizer, self.step)
        with self._pause("sampling text", advice="less often: sample_every"):
            if self.is_sharded:  # then all ranks compute every token together
                # FSDP keeps the buffers of its first all-gather. If inference mode, in which text
                # is generated, had made them, training could not write to them.
                for module in (self.model, *self.model.blocks):
                    module.unshard()
                    module.reshard()
                with hardware.autocast(self.ranks.device, self.precision):
                    text = sample(self.check_signals)
            elif self.ranks.is_main:
                text = sample(lambda: self.signals.code)
        if self.check_signals():
            return
        self.log.append("samples.txt", f"--- step {self.step}\n{text}\n")
        self.log.info(f"--- a sample at step {self.step}\n{text}\n---")

    def eval_tokens(self, steps: float) -> int:
        """The number of held-out tokens that an evaluation reads, in a run of `steps` steps.

        By default it is EVALUATED_FRACTION of the tokens trained on between two evaluations. It
        does not depend on the model, so all runs of at least eval_every steps read the same text.
        """
        eval_tokens = self.settings["eval_tokens"]
        if eval_tokens is None:
            trained_tokens = min(self.settings["eval_every"], steps) * self.batch_tokens
            eval_tokens = max(MIN_EVAL_TOKENS, int(EVALUATED_FRACTION * trained_tokens))
        return min(eval_tokens, self.corpus.validation_tokens(self.settings["context"]))

    @property
    def evaluates_with_gradients(self) -> bool:
        """Whether evaluations run the graph that was compiled for training.

        Another one, without gradients, would take a CPU up to a minute to compile.
        """
        return self.is_compiled and self.ranks.device.type != "cuda"

    @property
    def evaluation_cost(self) -> float:
        """The time to evaluate a token, relative to that of training on one.

        On CPUs a forward pass was measured to take 0.4 of a training step. Where evaluations run
        the training graph, the head computes its gradients too and takes as long as in training.
        """
        if not self.evaluates_with_gradients:
            return 0.4
        head_flops = 6 * self.model.unembedding.numel()
        return 0.4 + 0.6 * head_flops / self.flops_per_token

    def _evaluation_steps(self, steps: int) -> float:
        """The training steps that take as long as all evaluations in a run of `steps`."""
        num_evaluations = math.ceil(steps / self.settings["eval_every"])
        eval_tokens = num_evaluations * self.eval_tokens(steps)
        return self.evaluation_cost * eval_tokens / self.batch_tokens

    def evaluate(self) -> None:
        """Log the loss on the held-out text. A signal leaves it out."""
        if self.check_signals():
            return
        eval_tokens = self.eval_tokens(self.steps)
        seconds = None
        if self.tokens_per_second:
            seconds = self.evaluation_cost * eval_tokens / self.tokens_per_second
        what = f"evaluating on {eval_tokens:,} tokens that were held out"
        with self._pause(what, seconds, "less often: eval_every"):
            score = evaluate(
                self.loss_module,
                self.corpus,
                eval_tokens,
                self.settings["context"],
                self.micro_batch_size,
                self.precision,
                self.ranks,
                self.check_signals,
                with_gradients=self.evaluates_with_gradients,
            )
        if score is None:
            return
        if not math.isfinite(score["val_loss"]):
            self._end_diverged(f"step {self.step}: evaluation is not finite")
        self._write_metrics(**score, eval_tokens=eval_tokens)
        text = f"step {self.step}  held out: {score['val_loss']:.4f} nats per token"
        if score["val_bpb"] is not None:
            text += f", {score['val_bpb']:.4f} bits per byte"
        for name, value in score.items():
            if name.endswith("_accuracy"):
                text += f", {name.replace('_', ' ')} {value:.1%}"
        self.log.info(text)

    # Saving

    def state(self) -> dict:
        """The state of a run besides its weights and its config, as plain data."""
        return {
            "step": self.step,
            "steps": self.steps,
            "fitted": self.budget is None,
            "seconds": self.seconds,
            "optimizer": state_by_name(self.optimizers, self.model, self.ranks),
            "scaler": self.scaler.state_dict(),
            "nats": self.loss_sum.cpu() * self.ranks.world_size,
            "reported": self.reported_step,
            "log": self.log_state,
        }

    def saved_config(self) -> dict:
        """The settings, the text and the machine, with which a resumed run is compared."""
        machine = resume.fingerprint(
            self.ranks, self.precision, self.is_compiled, self.micro_batch_size
        )
        return self.settings | {"text": self.corpus.sha256[:16], "machine": machine}

    def save(self) -> None:
        """Write a checkpoint, unless this step has one.

        Ends with exit code 4 where loss, gradient or weights are not finite.
        """
        if self.saved_step == self.step:
            return
        self.check_finite()
        # The update itself may have overflowed, though loss and gradient were finite.
        is_finite = [sharding.full_tensor(p.isfinite().all()) for p in self.model.parameters()]
        if not all(is_finite):
            self._end_diverged(f"step {self.step} made the weights infinite")

        # Each rank goes on with an equal share of the loss, as it will when the run is resumed.
        loss_sum = self.ranks.all_reduce_sum(self.loss_sum.item())
        self.loss_sum.fill_(loss_sum / self.ranks.world_size)

        with self._pause("saving a checkpoint", advice="less often: save_every"):
            weights = {
                name: self.ranks.gather_to_rank0(tensor)
                for name, tensor in self.model.state_dict().items()
            }
            state = self.state()
            self.ranks.on_rank0(lambda: self._write_checkpoint(weights, state))
        self.saved_step = self.step

    def _write_checkpoint(self, weights: dict[str, Tensor], state: dict) -> None:
        """Ends with exit code 74 where the disk does not take it."""
        tokenizer = self.corpus.tokenizer.files
        try:
            checkpoint.save(self.run_dir, self.step, weights, self.saved_config(), tokenizer, state)
        except OSError as error:
            saved = f"step {self.saved_step}" if self.saved_step else "no step"
            errors.exit_with(
                errors.STORAGE,
                f"step {self.step} cannot be saved, {saved} is there "
                f"({self.run_dir}: {error.strerror}). fix: make room, then resume=true",
            )

    def check_finite(self) -> None:
        """End with exit code 4 where a step was not finite. No weight has taken part in it."""
        step = self.guard.bad_step()
        if step is not None:
            self._end_diverged(f"at step {step}, whose batch is {self.loader.describe(step - 1)}")

    def _end_diverged(self, where: str) -> NoReturn:
        errors.exit_with(
            errors.DIVERGED,
            f"training diverged ({where}). fix: a lower optimizer.lr, or precision=fp32; "
            f"resume=true goes on from step {self.saved_step}",
            rank0_only=True,
        )

    def finish(self) -> None:
        """Close the log, draw loss.png and say how to generate text."""
        self.log.close()
        self.log.plot()
        command = f'python generate.py --run {self.run_dir} "PROMPT"'
        if not self.corpus.validation:  # a task has no text
            command = f"python -m tools.evaluate --run {self.run_dir} --slices"
        self.log.info(f"done. Now try: {command}")

    # Clocks

    @property
    def seconds(self) -> float:
        """Seconds of this run, earlier processes and pauses included."""
        return monotonic() - self.started

    def _clock(self) -> float:
        """Seconds, on a clock that stands still while something other than training goes on."""
        return monotonic() - self.paused_seconds

    @contextmanager
    def _pause(self, what: str, seconds: float | None = None, advice: str = "") -> Iterator[None]:
        """Stop the clock while something else goes on, and announce it; see progress.waiting."""
        start = monotonic()
        with self.log.waiting(what, seconds, advice):
            yield
        self.paused_seconds += monotonic() - start
