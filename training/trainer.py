"""One run: what it has learned, where it stands, and what it can do next."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from checkpoints import checkpoint
from common import compilation, config, errors, hardware, sharding
from common.hardware import to_device
from common.instantiate import instantiate
from common.progress import duration
from data.loader import Loader
from data.prepare import Corpus
from training import resume
from training.distributed import DistEnv
from training.evaluation import evaluate, sample_text
from training.logger import Logger
from training.optimizers import (
    handles_found_inf,
    load_state_by_name,
    set_learning_rates,
    state_by_name,
)
from training.parallel import build_parallel
from training.signals import Signals

WARMUP_STEPS, TIMED_FRACTION = (
    3,
    0.1,
)  # steps that compile and fill caches; of the time left, what tells how long a step takes
RESERVED_SECONDS = 5.0  # seconds for the last checkpoint, sample and picture
SAFETY_MARGIN = 0.03  # of the minutes left, for a machine that slows down
NEVER = 2**62  # a step that does not come


class Trainer:
    """`settings` is the resolved config; `started` the monotonic time of the process's begin. All ranks call alike."""

    def __init__(
        self,
        settings: dict,
        corpus: Corpus,
        loader: Loader,
        run: Path,
        ranks: DistEnv,
        precision: torch.dtype,
        signals: Signals,
        started: float,
    ):
        self.settings, self.corpus, self.loader, self.run, self.ranks = (
            settings,
            corpus,
            loader,
            run,
            ranks,
        )
        bos, self.sharded = (
            corpus.tokenizer.bos if settings["document_mask"] else None,
            settings["sharded"],
        )
        self.objective, self.parallel = build_parallel(settings, bos, ranks, precision)
        self.model = self.objective.model
        self.optimizers = instantiate(settings["optimizer"], "training")(self.model)
        self.schedule = instantiate(settings["schedule"], "training")
        self.precision, self.signals, self.exit_code = (
            precision,
            signals,
            0,
        )  # stopping: the exit code, once it is due
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=precision == torch.float16)
        self.log = Logger(run, settings, enabled=ranks.is_main)
        self.micro, self.compiled = config.micro_batch_size(settings, ranks.world_size), False
        self.flops, self.peak = self.model.training_flops(), hardware.peak_flops(ranks.device)

        self.step, self.steps = 0, settings["steps"] or math.inf
        self.fitted = settings["max_minutes"] is None
        self.norm = torch.zeros((), device=ranks.device)
        self.nats = torch.zeros(
            (), dtype=hardware.accumulation_dtype(ranks.device), device=ranks.device
        )  # since the last report
        self.diverged = torch.full(
            (), NEVER, device=ranks.device
        )  # the first step that was not finite
        self.found_inf = torch.zeros(
            (), device=ranks.device
        )  # 1 from then on: optimizer steps do nothing
        if not self.scaler.is_enabled():  # which has one of its own
            for optimizer in filter(handles_found_inf, self.optimizers):
                optimizer.grad_scale = None
                optimizer.found_inf = self.found_inf
        self.started, self.earlier_seconds, self.aside_seconds = started, 0.0, 0.0
        self.kept = {}  # of the log's files, when the run begins
        self.first = self.reported = self.saved = (
            0  # steps: where this process began, what metrics and disk have
        )
        self.summed_nats = 0.0  # what of this rank's nats is of all ranks already
        self.rate = 0.0  # tokens per second at the last look
        self.pending = []  # what this step still has to do: "eval", "sample"
        self.mark = self.warm = self._clock()  # when: the last report, the first timed step

    def restore_or_start(self, start: Path | None) -> None:
        """Goes on where this run's newest checkpoint ends, if it is to; else begins, with the weights of `start`."""
        found = self.ranks.on_rank0(
            lambda: checkpoint.prepare_run(self.run, self.model, self.settings["resume"])
        )
        if found is None:
            if start is not None:
                checkpoint.load_weights(self.model, start)
                self.log.info(
                    f"beginning with the weights of {start}, context {self.settings['context']}"
                )
                self.pending = ["eval"]
            if self.settings["resume"]:
                self.log.info(f"nothing to resume in {self.run}: a fresh start")
            return
        then = checkpoint.load_config(found)
        with errors.user_input():
            said = resume.check_resumed(then, self.identity(), found)
        state = checkpoint.load_state(found, set(self.state()))
        # fp16 may have skipped every step so far: then there is no optimizer state yet
        if state["optimizer"] or not state["scaler"]:
            load_state_by_name(self.optimizers, self.model, state["optimizer"])
        # after the optimizer's state, the making of which moves the weights
        checkpoint.load_weights(self.model, found)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.step = self.first = self.saved = state["step"]
        same = self.settings["steps"] == then["steps"]
        self.steps = state["steps"] if same else self.settings["steps"] or math.inf
        self.fitted, self.earlier_seconds = self.fitted or state["fitted"], state["seconds"]
        self.reported, self.pending, self.kept = state["reported"], state["pending"], state["log"]
        if self.ranks.is_main:
            self.nats.copy_(state["nats"])
            self.summed_nats = self.nats.item()
        self.log.info(f"resuming step {self.step}\n{said}".rstrip())

    def compile(self) -> None:
        torch.compiler.set_stance("default")  # an earlier run of a sweep may have gone on without
        torch._dynamo.config.recompile_limit = (
            64  # blocks that share their code but not their constants
        )
        for module in (
            self.model.blocks if self.sharded else [self.objective]
        ):  # between blocks, weights arrive
            module.compile(dynamic=False)
        self.compiled = True

    def compile_first_step(self) -> None:
        """Compile forward and backward now, on a batch that teaches nothing: later steps only run.

        Where compilation fails, training goes on without it; with compile=true the process ends
        with exit code 2. A signal ends the process at once.
        """
        problem = ""
        began = monotonic()
        losses = self.nats.clone()
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        alone = self.parallel is self.objective
        without_exchange = nullcontext() if alone else self.parallel.no_sync()
        seconds = compilation.expected_seconds(len(self.model.blocks), self.ranks.device)
        advice = "less where .cache/ has it from before; to begin at once: compile=false"
        wait = self.log.waiting("compiling the training step", seconds, advice)
        with compilation.exit_without_waiting(), self._aside(), wait, without_exchange:
            try:
                self._accumulate(self._micro_batches()[0])
            except RuntimeError as error:
                if not compilation.is_compile_error(error):
                    raise
                problem = compilation.first_error_line(error)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.nats.copy_(losses)
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.mark = self._clock()

        if not self.ranks.all_reduce_max(int(bool(problem))):
            self.log.info(f"compiled in {monotonic() - began:.0f} s")
            return
        self._go_on_without_compilation(problem)

    def _go_on_without_compilation(self, problem: str) -> None:
        """After a compilation that failed; where compile=true asked for it, end with exit code 2."""
        if self.settings["compile"] is True:
            fix = "compile=false, or another C++ compiler in $CXX"
            errors.exit_with(
                errors.INPUT, f"compilation failed ({problem}). fix: {fix}", rank0_only=True
            )
        self.log.info(f"warning: compilation failed, training goes on without it ({problem})")
        torch.compiler.set_stance("force_eager")
        self.compiled = False

    def due(self, every: str) -> bool:
        return self.step % self.settings[every] == 0 or self.step == self.steps

    def train_step(self) -> None:
        """One optimizer step over `batch_tokens` tokens of all ranks."""
        draw = (self.settings["seed"] * 2**32 + self.step) * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(draw % 2**63)  # of dropout
        set_learning_rates(self.optimizers, self.schedule(self.step, self.steps))
        micro_batches = self._micro_batches()
        for rows in micro_batches:
            last = rows == micro_batches[-1]  # copies exchange gradients once a step
            with (
                nullcontext()
                if last or self.parallel is self.objective
                else self.parallel.no_sync()
            ):
                self._accumulate(rows)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        clip = self.settings["clip"] or math.inf
        self.norm = sharding.full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        self._watch()
        for optimizer in self.optimizers:
            if not self._must_skip(optimizer):
                self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        self.step += 1
        self.signals.arm()  # from now on there is something to save
        self.check_signals()

    def _micro_batches(self) -> list[slice]:
        """The rows of a batch that this rank computes, as many at a time as a forward takes."""
        share = self.loader.batch // self.ranks.world_size
        first = self.ranks.rank * share
        return [
            slice(start, start + self.micro) for start in range(first, first + share, self.micro)
        ]

    def _watch(self) -> None:
        """Notes, on the device, the first step that is not finite: nobody waits for it."""
        finite = self.nats.isfinite()
        if (
            not self.scaler.is_enabled() or self.scaler.get_scale() < 1
        ):  # which has a remedy until then
            finite = finite & self.norm.isfinite()
        self.diverged.copy_(torch.where(finite, NEVER, self.step + 1).minimum(self.diverged))
        self.ranks.all_reduce_min_(self.diverged)
        self.found_inf.copy_(self.diverged < NEVER)

    def _must_skip(self, optimizer: Optimizer) -> bool:
        """Whether the host keeps this step, which is not finite, from the optimizer.

        An optimizer that handles `found_inf` does so on the device, and nobody waits. For any other
        the host waits for the number, and so it does in fp16, where an overflow of one gradient
        makes the norm infinite, and clipping by it spoils every gradient.
        """
        if self.scaler.is_enabled():
            return bool(self.found_inf) or not bool(self.norm.isfinite())
        return not handles_found_inf(optimizer) and bool(self.found_inf)

    def _accumulate(self, rows: slice) -> None:
        """Adds the gradient of these rows of the batch."""
        with hardware.autocast(self.ranks.device, self.precision):
            nats = self.parallel(*to_device(self.ranks.device, *self.loader(self.step, rows)))
        self.nats += nats.detach()
        mean = nats * (
            self.ranks.world_size / self.settings["batch_tokens"]
        )  # over the ranks, gradients are averaged
        self.scaler.scale(mean).backward()

    def check_signals(self) -> int:
        """The exit code, on all ranks alike, where a signal asked one of them to end."""
        self.exit_code = self.exit_code or self.ranks.all_reduce_max(self.signals.code)
        return self.exit_code

    def fit_steps_to_budget(self) -> None:
        """Decides, once, after a timed warm-up, how many steps fit into `max_minutes`."""
        if not self.fitted:
            fitting = self.ranks.on_rank0(self._fitting_steps)
            if fitting < self.steps < math.inf:
                self.log.info(
                    f"max_minutes={self.settings['max_minutes']} has room for {fitting} of {self.steps} steps"
                )
            self.steps, self.fitted = min(self.steps, fitting), fitting < math.inf

    def _fitting_steps(self) -> float:
        done, now, limit = self.step - self.first, self._clock(), 60 * self.settings["max_minutes"]
        if done == WARMUP_STEPS:
            self.warm = now
        left = limit - self.seconds
        if done <= WARMUP_STEPS or (now - self.warm < TIMED_FRACTION * left and left > 0.5 * limit):
            return math.inf
        each = (now - self.warm) / (done - WARMUP_STEPS)
        look = self._evaluation_seconds(self.settings["batch_tokens"] / each)
        left = (1 - SAFETY_MARGIN) * left - look - RESERVED_SECONDS
        return self.step + max(1, int(left / (each + look / self.settings["eval_every"])))

    def _evaluation_seconds(self, tokens_per_second: float) -> float:
        """How long an evaluation takes where training reads so many tokens a second."""
        # it is a forward over what is held out, in which the head makes its gradients too
        share = 0.4 + 0.6 * 6 * self.model.unembedding.numel() / self.flops
        return share * sum(map(len, self.corpus.validation)) / tokens_per_second

    def log_metrics(self) -> None:
        """What the steps since the last report did, for metrics.jsonl and for who watches."""
        self.check_finite()
        self._measure_rate()
        rate = self.rate
        tokens = (self.step - self.reported) * self.settings["batch_tokens"]
        values = self._where() | {
            "train_loss": self.ranks.all_reduce_sum(self.nats.item()) / tokens,
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "grad_norm": norm if math.isfinite(norm := self.norm.item()) else None,
            "tokens_per_second": rate,
            "flops_per_second": rate * self.flops,
            "mfu": None
            if self.peak is None
            else rate * self.flops / self.peak / self.ranks.world_size,
            "peak_memory_bytes": hardware.peak_memory(self.ranks.device),
        }
        self.log.write(self.step, **values)
        self.log.progress(self.step, self.steps, self._progress(values["train_loss"]))
        self.nats.zero_()
        self.summed_nats = 0.0
        self.reported, self.mark = self.step, self._clock()

    def show_progress(self) -> None:
        """Between reports, at most once a second: the loss of this rank's rows since the last one."""
        steps = self.step - self.reported
        if steps > 0 and self.log.wants_progress():
            self._measure_rate()
            own = self.nats.item() - self.summed_nats
            nats = self.summed_nats + own * self.ranks.world_size
            loss = nats / (steps * self.settings["batch_tokens"])
            self.log.progress(self.step, self.steps, self._progress(loss))

    def _measure_rate(self) -> None:
        """Tokens per second of this process's steps since the last report."""
        steps = self.step - max(self.reported, self.first)
        self.rate = steps * self.settings["batch_tokens"] / (self._clock() - self.mark)

    def _progress(self, loss: float) -> str:
        """Loss, rate, use of the device, memory and time left, for a line."""
        flops_per_second = self.rate * self.flops
        use = f"{flops_per_second / 1e9:,.0f} GFLOP/s"
        if self.peak is not None:
            use = f"mfu {flops_per_second / self.peak / self.ranks.world_size:.1%}"
        memory = f"{hardware.peak_memory(self.ranks.device) / 2**30:.1f} GiB"

        # until the number of steps is fitted, the clock tells when the run ends
        left = ""
        if self.steps < math.inf:
            seconds = (self.steps - self.step) * self.settings["batch_tokens"] / self.rate
            left = f"  {duration(seconds)} left"
        elif self.settings["max_minutes"] is not None:
            seconds = max(0.0, 60 * self.settings["max_minutes"] - self.seconds)
            left = f"  {duration(seconds)} left"
        return f"loss {loss:.3f}  {self.rate:,.0f} tokens/s  {use}  {memory}{left}"

    def check_finite(self) -> None:
        """Ends the run with exit code 4 where training did not stay finite. Nothing of that is in the weights."""
        step = int(self.diverged)
        if step < NEVER:
            self._diverged(f"at step {step}, whose batch is {self.loader.describe(step - 1)}")

    def _diverged(self, where: str) -> NoReturn:
        fix = f"a lower optimizer.lr, or precision=fp32; resume=true goes on from step {self.saved}"
        errors.exit_with(
            errors.DIVERGED, f"training diverged ({where}). fix: {fix}", rank0_only=True
        )

    def evaluate(self) -> None:
        """Leaves it pending where a signal comes."""
        seconds = self._evaluation_seconds(self.rate) if self.rate else None
        tokens = sum(map(len, self.corpus.validation))
        what = f"evaluating on {tokens:,} tokens that were held out"
        with self._aside(), self.log.waiting(what, seconds, "less often: eval_every"):
            how = (
                self.settings["context"],
                self.micro,
                self.precision,
                self.ranks,
                self.check_signals,
            )
            try:
                score = evaluate(self.objective, self.corpus, *how)
            except RuntimeError as error:  # a model with dropout is compiled anew for evaluation
                if not compilation.is_compile_error(error):
                    raise
                self._go_on_without_compilation(compilation.first_error_line(error))
                score = evaluate(self.objective, self.corpus, *how)
        if score is None:
            return
        self.pending = [what for what in self.pending if what != "eval"]
        if not math.isfinite(score["val_loss"]):
            self._diverged(f"step {self.step}: evaluation is not finite")
        self.log.write(self.step, **self._where(), **score)
        told = "" if score["val_bpb"] is None else f", {score['val_bpb']:.4f} bits per byte"
        self.log.info(f"step {self.step}  held out: {score['val_loss']:.4f} nats per token{told}")

    def sample(self) -> None:
        """Text from nothing, in samples.txt and on the screen. Leaves it pending where a signal comes."""
        with self._aside(), self.log.waiting("sampling text", advice="less often: sample_every"):
            stop, text = self.check_signals if self.sharded else lambda: self.signals.code, ""
            if (
                self.ranks.is_main or self.sharded
            ):  # shards need each other for every token, and come as products want
                with hardware.autocast(
                    self.ranks.device, self.precision if self.sharded else torch.float32
                ):
                    text = sample_text(self.model, self.corpus.tokenizer, self.step, stop)
        if self.check_signals():
            return
        self.pending = []
        self.log.append("samples.txt", f"--- step {self.step}\n{text}\n")
        self.log.info(f"--- a sample at step {self.step}\n{text}\n---")

    def state(self) -> dict:
        """All that a run knows beside its weights, as plain data."""
        return {
            "step": self.step,
            "steps": self.steps,
            "fitted": self.fitted,
            "seconds": self.seconds,
            "optimizer": state_by_name(self.optimizers, self.model, self.ranks),
            "scaler": self.scaler.state_dict(),
            "nats": self.nats.cpu(),
            "reported": self.reported,
            "pending": self.pending,
            "log": self.log.state(),
        }

    def identity(self) -> dict:
        """What a run that goes on is compared with: its settings, its text, and what decides on the last bits."""
        machine = resume.fingerprint(self.ranks, self.precision, self.compiled, self.micro)
        return self.settings | {"text": self.corpus.sha256[:16], "machine": machine}

    def save(self) -> None:
        if self.saved == self.step:
            return
        self.check_finite()
        finite = [sharding.full_tensor(p.isfinite().all()) for p in self.model.parameters()]
        if not all(finite):  # the step itself was too long
            self._diverged(f"step {self.step} made the weights infinite")
        nats = self.ranks.all_reduce_sum(self.nats.item())
        self.summed_nats = nats if self.ranks.is_main else 0.0
        self.nats.fill_(self.summed_nats)
        with (
            self._aside(),
            self.log.waiting("saving a checkpoint", advice="less often: save_every"),
        ):
            weights = {
                name: self.ranks.gather_to_rank0(p) for name, p in self.model.state_dict().items()
            }
            what = weights, self.identity(), self.corpus.tokenizer.proto, self.state()
            self.ranks.on_rank0(lambda: self._save(*what))
        self.saved = self.step

    def _save(self, *what) -> None:
        try:
            checkpoint.save(self.run, self.step, *what)
        except OSError as error:
            there = f"step {self.saved} is there" if self.saved else "nothing is"
            problem = f"step {self.step} cannot be saved, {there} ({self.run}: {error.strerror})"
            errors.exit_with(errors.STORAGE, f"{problem}. fix: make room, then resume=true")

    def finish(self) -> None:
        self.log.close()
        self.log.plot()
        self.log.info(f'done. Now try: python generate.py --run {self.run} "PROMPT"')

    def _where(self) -> dict[str, float]:
        return {
            "tokens": self.step * self.settings["batch_tokens"],
            "seconds": round(self.seconds, 3),
        }

    @property
    def seconds(self) -> float:
        """Of this run, earlier parts included."""
        return monotonic() - self.started + self.earlier_seconds

    def _clock(self) -> float:
        """Seconds that run only while it trains."""
        return monotonic() - self.aside_seconds

    @contextmanager
    def _aside(self) -> Iterator[None]:
        began = monotonic()
        yield
        self.aside_seconds += monotonic() - began
