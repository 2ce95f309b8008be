"""One run: what it has learned, where it stands, and what it can do next."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data.loader import Loader, documents
from data.prepare import Corpus
from model.build import build
from model.initialise import initialise
from model.sampling import generate, sample
from model.transformer import Transformer
from training import checkpoint, config, errors, hardware
from training.distributed import Ranks
from training.log import Log
from training.objective import Objective, evaluate, on
from training.optimizers import load_named_state, named_state, set_rates

COLD = 3  # steps that compile and fill caches
TIMED = 0.1  # of the time left: what tells how long a step takes
SPARE = 5.0  # seconds for the last checkpoint, sample and picture
MARGIN = 0.03  # of the minutes left, for a machine that slows down


class Trainer:
    """`settings` is the resolved config; `started` the monotonic time of the process's begin. All ranks call alike."""

    def __init__(
        self,
        settings: dict,
        corpus: Corpus,
        loader: Loader,
        run: Path,
        ranks: Ranks,
        precision: torch.dtype,
        started: float,
    ):
        self.settings, self.corpus, self.loader, self.run, self.ranks = settings, corpus, loader, run, ranks
        with ranks.device:
            self.model: Transformer = build(settings["model"])
        initialise(self.model, settings["seed"])
        self.objective = Objective(self.model)
        self.parallel = self.objective if ranks.world == 1 else DistributedDataParallel(self.objective)
        self.optimizers = build(settings["optimizer"], "training")(self.model)
        self.schedule = build(settings["schedule"], "training")
        self.precision = precision
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=precision == torch.float16)
        self.log = Log(run, settings, speaks=ranks.first)
        self.micro = config.micro_batch(settings, ranks.world)
        self.flops, self.peak = self.model.training_flops(), hardware.peak_flops(ranks.device)

        self.step, self.steps = 0, settings["steps"] or math.inf
        self.fitted = settings["max_minutes"] is None
        self.norm = torch.zeros((), device=ranks.device)
        self.nats = torch.zeros((), device=ranks.device)  # of the steps since the last report, on this rank
        self.started, self.earlier_seconds, self.aside_seconds = started, 0.0, 0.0
        self.metrics_bytes = 0  # that stand when the run begins
        self.first = self.reported = 0  # steps: where this process began, what metrics have
        self.mark = self.warm = self._clock()  # when: the last report, the first timed step

    def begin(self, found: Path | None, start: Path | None) -> None:
        """Goes on where this run's checkpoint `found` ends; or begins, with the weights of `start` if there is one."""
        if found is None:
            if start is not None:
                checkpoint.load_weights(self.model, start, self.ranks.device)
            return
        checkpoint.load_weights(self.model, found, self.ranks.device)
        state = checkpoint.load_state(found)
        load_named_state(self.optimizers, self.model, state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.step = self.first = self.reported = state["step"]
        self.steps = self.settings["steps"] or state["steps"] or math.inf
        self.fitted, self.earlier_seconds = self.fitted or state["fitted"], state["seconds"]
        self.metrics_bytes = state["metrics_bytes"]

    def compile(self) -> None:
        self.objective.compile(dynamic=False)

    def due(self, every: str) -> bool:
        return self.step % self.settings[every] == 0 or self.step == self.steps

    def optimize(self) -> None:
        """One optimizer step over `batch_tokens` tokens of all ranks."""
        draw = (self.settings["seed"] * 2**32 + self.step) * self.ranks.world + self.ranks.rank
        torch.manual_seed(draw % 2**63)  # of dropout
        set_rates(self.optimizers, self.schedule(self.step, self.steps))
        share = self.loader.batch // self.ranks.world
        starts = range(self.ranks.rank * share, (self.ranks.rank + 1) * share, self.micro)
        for start in starts:
            last = start == starts[-1]  # ranks exchange gradients once a step
            with nullcontext() if last or self.ranks.world == 1 else self.parallel.no_sync():
                self._accumulate(slice(start, start + self.micro))
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip"] or math.inf)
        overflows = self.scaler.is_enabled() and not self.norm.isfinite()  # then clipping spoils every gradient
        for optimizer in self.optimizers:
            if not overflows:
                self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        self.step += 1

    def _accumulate(self, rows: slice) -> None:
        """Adds the gradient of these rows of the batch."""
        inputs, targets = self.loader(self.step, rows)
        packed = documents(inputs, self.corpus.tokenizer.bos) if self.settings["document_mask"] else None
        with hardware.autocast(self.ranks.device, self.precision):
            nats = self.parallel(*on(self.ranks.device, inputs, targets, packed))
        self.nats += nats.detach()
        mean = nats * (self.ranks.world / self.settings["batch_tokens"])  # over the ranks, gradients are averaged
        self.scaler.scale(mean).backward()

    def fit(self) -> None:
        """Decides, once, after a timed warm-up, how many steps fit into `max_minutes`."""
        if not self.fitted:
            fitting = self.ranks.agree(self._fitting_steps())
            if fitting < self.steps < math.inf:
                self.log.say(f"max_minutes={self.settings['max_minutes']} has room for {fitting} of {self.steps} steps")
            self.steps, self.fitted = min(self.steps, fitting), fitting < math.inf

    def _fitting_steps(self) -> float:
        done, now, limit = self.step - self.first, self._clock(), 60 * self.settings["max_minutes"]
        if done == COLD:
            self.warm = now
        left = limit - self.seconds
        if done <= COLD or (now - self.warm < TIMED * left and left > 0.5 * limit):
            return math.inf
        each = (now - self.warm) / (done - COLD)
        # an evaluation is a forward over what is held out, of the time that a step with its backward takes
        look = 0.4 * each * sum(map(len, self.corpus.validation)) / self.settings["batch_tokens"]
        left = (1 - MARGIN) * left - look - SPARE
        return self.step + max(1, int(left / (each + look / self.settings["eval_every"])))

    def report(self) -> None:
        """What the steps since the last report did."""
        done = self.step - self.reported
        loss = self._finite_loss()
        rate = done * self.settings["batch_tokens"] / (self._clock() - self.mark)
        values = {
            "tokens": self.step * self.settings["batch_tokens"],
            "seconds": round(self.seconds, 3),
            "train_loss": loss,
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "grad_norm": norm if math.isfinite(norm := self.norm.item()) else None,
            "tokens_per_second": rate,
            "flops_per_second": rate * self.flops,
            "mfu": None if self.peak is None else rate * self.flops / self.peak / self.ranks.world,
        }
        self.log.write(self.step, **values)
        self.log.progress(self.step, self.steps, values, hardware.peak_memory(self.ranks.device))
        self.nats.zero_()
        self.reported, self.mark = self.step, self._clock()

    def _finite_loss(self) -> float:
        """The mean since the last report. Ends the run with exit code 4 where training did not stay finite."""
        done = (self.step - self.reported) * self.settings["batch_tokens"]
        loss = self.ranks.total(self.nats.item()) / max(1, done)
        if not math.isfinite(loss) or not (self.scaler.is_enabled() or self.norm.isfinite()):
            problem = f"training diverged (step {self.step}: loss {loss}, gradient norm {self.norm.item()})"
            errors.fail(errors.DIVERGED, f"{problem}. fix: a lower optimizer.lr, or precision=fp32", alike=True)
        return loss

    def evaluate(self) -> None:
        with self._aside():
            score = evaluate(self.objective, self.corpus, self.settings, self.micro, self.precision, self.ranks)
        self.log.write(
            self.step, tokens=self.step * self.settings["batch_tokens"], seconds=round(self.seconds, 3), **score
        )
        self.log.say(
            f"step {self.step}  held out: {score['val_loss']:.4f} nats per token, {score['val_bpb']:.4f} bits per byte"
        )

    def sample(self) -> None:
        """Text from nothing, in samples.txt and on the screen."""
        if not self.ranks.first:
            return
        with self._aside():
            generator = torch.Generator(self.ranks.device).manual_seed(self.step)
            tokenizer, capacity = self.corpus.tokenizer, min(192, self.settings["context"])
            cache = self.model.new_cache(1, capacity, torch.float32, self.ranks.device)

            def draw(logits: Tensor, seen: Tensor) -> Tensor:
                return sample(logits, seen, temperature=0.8, top_k=50, generator=generator)

            self.model.eval()
            tokens = (
                token.item() for token in generate(self.model, [[tokenizer.bos]], capacity - 1, draw, cache=cache)
            )
            text = tokenizer.decode(list(takewhile(lambda token: token != tokenizer.eos, tokens)))
            self.model.train()
            with (self.run / "samples.txt").open("a") as file:
                file.write(f"--- step {self.step}\n{text}\n")
        self.log.say(f"--- a sample at step {self.step}\n{text}\n---")

    def save(self) -> None:
        self._finite_loss()
        if not self.ranks.first:
            return
        state = {
            "step": self.step,
            "steps": None if self.steps == math.inf else self.steps,
            "fitted": self.fitted,
            "seconds": self.seconds,
            "optimizer": named_state(self.optimizers, self.model),
            "scaler": self.scaler.state_dict(),
            "metrics_bytes": self.log.nbytes,
        }
        with self._aside():
            trees = config.identity(self.settings)
            checkpoint.save(self.run, self.step, self.model, trees, self.corpus.tokenizer.proto, state)

    def finish(self) -> None:
        if self.ranks.first:
            self.log.close()
            self.log.say(f'done. Now try: python generate.py --run {self.run} "PROMPT"')

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
