"""The training step: gradients of a batch, clipping, and the update of the weights."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from run import compilation, hardware
from run.distributed import full_tensor
from run.hardware import to_device
from run.instantiate import instantiate
from training.environment import Environment
from training.parallel import build_parallel, compile_model
from training.rates import LearningRates
from training.steps import Progress


@dataclass(frozen=True)
class StepResult:
    """The results of a step. Tensors are on the device, so reading one synchronizes with it."""

    loss_sums: Tensor  # (1 + L,), one per name in `Trainer.loss_names`, over this rank's targets
    grad_norm: Tensor  # (), before clipping
    is_finite: Tensor  # (), false if the run has diverged
    learning_rates: dict[str, float]  # by their names in metrics.jsonl
    has_compiled: bool  # whether the time of the step includes compilation


class Trainer:
    """The model, its optimizers, and the step. All ranks call the same methods."""

    def __init__(self, env: Environment, is_compiled: bool):
        settings = self.settings = env.settings
        ranks = self.ranks = env.ranks
        self.loader = env.loader
        self.is_compiled = is_compiled
        self.precision = hardware.pick_precision(settings.precision, ranks.device)

        # `loss_module` maps tokens to the loss. `parallel` is the module that a step calls: DDP
        # around the loss module, or else the loss module itself.
        # With document_mask, tokens attend only to tokens of their document, which begins with bos.
        bos = env.corpus.tokenizer.bos if settings.document_mask else None
        self.loss_module, self.parallel = build_parallel(settings, ranks, self.precision, bos=bos)
        self.is_ddp = self.parallel is not self.loss_module
        self.model = self.loss_module.model
        # Names of the reported losses: the cross-entropy and the model's L auxiliary losses.
        self.loss_names = ("train_loss", *self.model.loss_names)

        # Optimizers, learning rates, and a loss scale that keeps gradients within fp16's range.
        new_optimizers = instantiate(settings.optimizer, "training")
        self.optimizers = new_optimizers(self.model)
        self.rates = LearningRates(
            self.optimizers,
            new_optimizers.keywords.get("reference"),
            dim=settings.model["dim"],
            depth=settings.model["depth"],
            batch_tokens=settings.batch_tokens,
        )
        self.schedule = instantiate(settings.schedule, "training")
        is_fp16 = self.precision == torch.float16
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=is_fp16)

    def step(self, progress: Progress, micro_batch_size: int) -> StepResult:
        """Take an optimizer step over `batch_tokens` tokens across all ranks.

        A forward pass takes `micro_batch_size` rows. If the model is compiled, a process's first
        step compiles it.
        """
        scheduled = self.schedule(progress.step, progress.total_steps)
        self.rates.set_rates(scheduled, progress.expected_steps)
        compiles = self.is_compiled and progress.step == progress.first_step
        if compiles:
            loss_sums = self.compile_gradients(progress.step, micro_batch_size)
        else:
            loss_sums = self.compute_gradients(progress.step, micro_batch_size)

        # Clip.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        max_norm = self.settings.clip or math.inf
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        grad_norm = full_tensor(grad_norm)

        # Update the weights. After a non-finite gradient in fp16, the scale is reduced and the step
        # is skipped, because clipping by a non-finite norm has spoiled every gradient.
        has_overflowed = self.scaler.is_enabled() and not grad_norm.isfinite()
        if not has_overflowed:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)

        # Record on the device whether the run has diverged. Only fp16 synchronizes with the device.
        # An overflow does not count as divergence as long as a smaller scale can be tried.
        is_finite = grad_norm.isfinite()
        if has_overflowed and self.scaler.get_scale() >= 1:
            is_finite = torch.ones_like(is_finite)
        self.scaler.update()
        self.model.zero_grad()
        return StepResult(
            loss_sums=loss_sums,
            grad_norm=grad_norm,
            is_finite=is_finite,
            learning_rates=self.rates.by_name(),
            has_compiled=compiles,
        )

    def compute_gradients(self, step: int, micro_batch_size: int) -> Tensor:
        """Compute the gradients of a step's batch; return the sums of `loss_names` (1 + L,)."""
        # Dropout is seeded with seed, step, rank and world size, so that a resumed run repeats it.
        draw = (self.settings.seed * 2**32 + step) * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(draw % 2**63)
        self.model.zero_grad()  # a failed compilation may have left gradients

        # The rows of this rank, one micro-batch at a time. DDP exchanges gradients once, with the
        # last micro-batch, and FSDP with each.
        rows_per_rank = self.loader.batch_size // self.ranks.world_size
        first = self.ranks.rank * rows_per_rank
        end = first + rows_per_rank
        loss_sums = torch.zeros(len(self.loss_names), device=self.ranks.device)
        for start in range(first, end, micro_batch_size):
            rows = slice(start, start + micro_batch_size)
            loss_sums += self.accumulate(step, rows, is_last=rows.stop == end)
        return loss_sums

    def accumulate(self, step: int, rows: slice, *, is_last: bool) -> Tensor:
        """Add the gradient of these rows of a batch; return the sums of `loss_names` (1 + L,)."""
        batch = to_device(self.ranks.device, *self.loader(step, rows))
        sync = nullcontext()
        if self.is_ddp and not is_last:
            sync = self.parallel.no_sync()
        with sync:
            with hardware.autocast(self.ranks.device, self.precision):
                objective, metrics = self.parallel(*batch)
            # The mean over the targets of the batch; gradients are averaged over ranks.
            mean = objective * (self.ranks.world_size / self.loader.num_targets(step))
            self.scaler.scale(mean).backward()
        sums = [metrics["nats"].sum()]
        for name in self.model.loss_names:
            sums.append(metrics[name].sum())
        return torch.stack(sums)

    def compile_gradients(self, step: int, micro_batch_size: int) -> Tensor:
        """Turn on compilation and run `compute_gradients`, which then compiles.

        If compilation fails, training continues without it; with compile=true or several processes,
        the run exits with code 2.
        """
        compile_model(self.loss_module, self.settings, self.ranks)
        compute = partial(self.compute_gradients, step, micro_batch_size)
        loss_sums = compilation.compile_and_run(
            compute,
            "the training step",
            is_required=self.settings.compile is True or self.ranks.world_size > 1,
            option="compile=false",
        )
        if loss_sums is None:
            torch.compiler.set_stance("force_eager")  # from now on
            self.is_compiled = False
            loss_sums = compute()
        return loss_sums
