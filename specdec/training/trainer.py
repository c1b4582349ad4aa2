"""Training loop: AdamW with a cosine schedule, by steps and by a limit of time, resumable."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backends.contract.backend import one_line
from offload.process.signals import handling
from specdec.training.data import TrainingData
from specdec.training.measure import Quality, measure
from specdec.training.options import TrainError
from specdec.training.trainable import Trainable

_WARMUP_STEPS = 20
_MIN_RATE_SHARE = 0.05
_MAX_GRADIENT_NORM = 1.0
_SAVE_SECONDS = 60.0
_AVERAGE_STEPS = 20
_BETAS = (0.9, 0.97)


@dataclass(frozen=True)
class Schedule:
    """Length of a training and its learning rates.

    Attributes:
        max_steps: steps, unless the time is over before.
        minutes: time limit of the training alone, all parts of an interrupted one together.
        learning_rate: the highest one.
    """

    max_steps: int
    minutes: float
    learning_rate: float
    seed: int = 0

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the training that is done, from 0 to 1."""
        return min(1.0, max(step / self.max_steps, seconds / (60 * self.minutes)))

    def rate(self, step: int, seconds: float) -> float:
        """Return the learning rate of a step: a linear rise, then half a cosine."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step, seconds)))
        warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
        return self.learning_rate * warmup * (_MIN_RATE_SHARE + (1 - _MIN_RATE_SHARE) * cosine)


@dataclass
class TrainState:
    """State of a training beside weights and optimiser."""

    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)
    """Quality before the first step."""


@dataclass(frozen=True)
class Result:
    """Qualities before and after, and how far the training came."""

    before: Quality
    after: Quality
    steps: int
    seconds: float


TrainProgress = Callable[[float, float, float], None]
"""Called with (share done, mean loss of the last steps, seconds of training)."""


@contextmanager
def whole() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the program after the block, not within it."""
    received: list[int] = []
    with handling((signal.SIGINT, signal.SIGTERM), lambda number, frame: received.append(number)):
        yield
    if signal.SIGTERM in received:
        raise SystemExit(128 + signal.SIGTERM)
    if received:
        raise KeyboardInterrupt


class Trainer:
    """Trainer of one draft; continues from `checkpoint` if the file exists.

    A training that is continued has the weights of one that was not interrupted, unless the limit
    of time ended it.
    """

    def __init__(
        self,
        draft: Trainable,
        data: TrainingData,
        schedule: Schedule,
        checkpoint: Path,
        device: torch.device,
    ) -> None:
        self._draft, self._data, self._schedule = draft, data, schedule
        self._checkpoint, self._device = checkpoint, device
        draft.to(device)
        self._parameters = [p for p in draft.module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=schedule.learning_rate, betas=_BETAS, weight_decay=0.0
        )
        self.state = TrainState()
        if checkpoint.exists():
            self._resume()

    def run(self, progress: TrainProgress = lambda share, loss, seconds: None) -> Result:
        """Train to the end, round the weights and measure them.

        Ctrl-C leaves a checkpoint. Raises TrainError if the loss is not finite, OSError.
        """
        state, schedule = self.state, self._schedule
        if not state.before:
            state.before = asdict(measure(self._draft, self._data, self._device))
        try:
            self._train(progress)
        finally:
            self._save()
        self._draft.round_weights()
        after = measure(self._draft, self._data, self._device)
        progress(schedule.progress(schedule.max_steps, state.seconds), math.nan, state.seconds)
        return Result(Quality(**state.before), after, state.step, state.seconds)

    def _train(self, progress: TrainProgress) -> None:
        state, schedule = self.state, self._schedule
        average, saved_at = math.nan, state.seconds
        while (share := schedule.progress(state.step, state.seconds)) < 1.0:
            started = time.monotonic()
            with whole():  # half a step could not be continued
                loss = self._step()
            state.step += 1
            state.seconds += time.monotonic() - started
            average = loss if math.isnan(average) else average + (loss - average) / _AVERAGE_STEPS
            progress(share, average, state.seconds)
            if state.seconds - saved_at >= _SAVE_SECONDS:
                saved_at = state.seconds
                self._save()

    def _step(self) -> float:
        state, schedule = self.state, self._schedule
        for group in self._optimizer.param_groups:
            group["lr"] = schedule.rate(state.step, state.seconds)
        batch = self._data.training_batch(state.step, schedule.seed).to(self._device)
        loss = self._draft.loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._parameters, _MAX_GRADIENT_NORM)
        if not math.isfinite(norm.item()):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainError(
                f"the loss is not finite after {state.step} steps: lower --learning-rate "
                f"({schedule.learning_rate:g})"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _save(self) -> None:
        partial = self._checkpoint.with_suffix(".partial")
        values = {
            "weights": self._draft.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "state": asdict(self.state),
        }
        try:
            torch.save(values, partial)
            partial.replace(self._checkpoint)  # an interrupted save must not cost the last one
        except (OSError, RuntimeError) as error:  # the second: torch's own, for a full disk
            partial.unlink(missing_ok=True)
            raise TrainError(f"cannot write {self._checkpoint}: {one_line(error)}") from error

    def _resume(self) -> None:
        try:
            saved = torch.load(self._checkpoint, weights_only=True, map_location="cpu")
            self._draft.module.load_state_dict(saved["weights"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.state = TrainState(**saved["state"])
        except Exception as error:  # whatever a broken file makes torch raise
            raise TrainError(
                f"{self._checkpoint} cannot be continued from: remove it to train from the start"
            ) from error
