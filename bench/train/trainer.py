"""Training loop of the embedded models: Muon and AdamW, scheduled by wall-clock time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from bench.train.data import WindowSampler

log = logging.getLogger(__name__)

# Maps a batch of ids [batch_size, length + 1] to the mean loss per token.
LossFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Phase:
    """Phase of training with windows of one length."""

    until: float  # share of the time budget at which the phase ends
    batch_size: int  # windows
    length: int  # tokens of each
    generated_rows: int = 0  # of them, windows from the target's own output


def larger(phases: tuple[Phase, ...], factor: int) -> tuple[Phase, ...]:
    """Return phases with `factor` times as many windows a batch: a GPU is idle with few."""
    return tuple(
        replace(p, batch_size=factor * p.batch_size, generated_rows=factor * p.generated_rows)
        for p in phases
    )


@dataclass(frozen=True)
class TrainOptions:
    """Training time, phases and learning rates."""

    minutes: float
    phases: tuple[Phase, ...]
    muon_lr: float | None = 0.02  # None: AdamW for all parameters
    adam_lr: float = 0.004
    warmup_steps: int = 60
    cooldown_share: float = 0.5  # of the time: linear to zero, after a constant rate
    checkpoint_every_s: float = 300.0

    def lr_scale(self, step: int, progress: float) -> float:
        """Return the learning-rate factor at a step and at a share (0 to 1) of the time budget."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return warmup * min(1.0, max(0.01, (1.0 - progress) / self.cooldown_share))

    def phase(self, progress: float) -> Phase:
        return next((p for p in self.phases if progress < p.until), self.phases[-1])


@dataclass
class TrainState:
    """State of a run for resuming, besides weights and optimizer state."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def build_optimizers(model: nn.Module, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embeddings and norms, or AdamW for all."""
    if options.muon_lr is None:
        return [_adamw(list(model.parameters()), options)]
    matrices: list[nn.Parameter] = []
    other_parameters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if inner else other_parameters).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=options.muon_lr, weight_decay=0.01, momentum=0.95, ns_steps=5
        ),
        _adamw(other_parameters, options),
    ]


def _adamw(parameters: list[nn.Parameter], options: TrainOptions) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=options.adam_lr, betas=(0.9, 0.97), weight_decay=0.0)


@dataclass
class Trainer:
    """Trainer of one model for a time budget; resumes from its checkpoint if there is one."""

    name: str
    model: nn.Module
    loss_function: LossFunction
    sampler: WindowSampler
    options: TrainOptions
    scratch: Path
    on_checkpoint: Callable[[TrainState], None] = lambda state: None
    generated: WindowSampler | None = None

    def run(self) -> TrainState:
        """Train until the time budget is used up."""
        optimizers = build_optimizers(self.model, self.options)
        state = self._resume(optimizers)
        base_rates = [group["lr"] for opt in optimizers for group in opt.param_groups]
        # The first save is early, so that a checkpoint is available during training.
        next_save_s = state.elapsed_s + min(240.0, self.options.checkpoint_every_s)
        average: float | None = None
        while (progress := state.elapsed_s / (60 * self.options.minutes)) < 1.0:
            started = time.monotonic()
            phase = self.options.phase(progress)
            self._set_rates(optimizers, base_rates, self.options.lr_scale(state.step, progress))
            loss = self._step(optimizers, self._batch(phase))
            state.step += 1
            state.tokens += phase.batch_size * phase.length
            state.elapsed_s += time.monotonic() - started
            average = loss if average is None else 0.98 * average + 0.02 * loss
            if state.step % 50 == 0:
                log.info(
                    "%s step %d  %.0f s  %.2f M tokens  window %d  loss %.3f",
                    self.name,
                    state.step,
                    state.elapsed_s,
                    state.tokens / 1e6,
                    phase.length,
                    average,
                )
            if state.elapsed_s >= next_save_s:
                next_save_s = state.elapsed_s + self.options.checkpoint_every_s
                self._save(optimizers, state)
        self._save(optimizers, state)
        return state

    def _batch(self, phase: Phase) -> torch.Tensor:
        n_generated = phase.generated_rows if self.generated else 0
        ids = self.sampler.next_batch(phase.batch_size - n_generated, phase.length)
        if self.generated and n_generated:
            ids = torch.cat([ids, self.generated.next_batch(n_generated, phase.length)])
        return ids

    def _step(self, optimizers: list[torch.optim.Optimizer], ids: torch.Tensor) -> float:
        loss = self.loss_function(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    @staticmethod
    def _set_rates(
        optimizers: list[torch.optim.Optimizer], base_rates: list[float], scale: float
    ) -> None:
        groups = [group for opt in optimizers for group in opt.param_groups]
        for group, rate in zip(groups, base_rates, strict=True):
            group["lr"] = rate * scale

    @property
    def _path(self) -> Path:
        return self.scratch / f"{self.name}.pt"

    def _save(self, optimizers: list[torch.optim.Optimizer], state: TrainState) -> None:
        partial = self._path.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": [opt.state_dict() for opt in optimizers],
                "state": asdict(state),
                "tokens_seen": self.sampler.tokens_seen,
            },
            partial,
        )
        partial.replace(self._path)  # an interrupted save must not cost the last good one
        self.on_checkpoint(state)

    def _resume(self, optimizers: list[torch.optim.Optimizer]) -> TrainState:
        if not self._path.exists():
            return TrainState()
        saved = torch.load(self._path, weights_only=True, map_location="cpu")
        self.model.load_state_dict(saved["model"])
        for optimizer, optimizer_state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
            # Rates are set from the schedule; the saved ones were already scaled.
            for group in optimizer.param_groups:
                muon = isinstance(optimizer, torch.optim.Muon)
                group["lr"] = self.options.muon_lr if muon else self.options.adam_lr
        self.sampler.tokens_seen = saved["tokens_seen"]
        log.info("%s resumes after %.0f s", self.name, saved["state"]["elapsed_s"])
        return TrainState(**saved["state"])
