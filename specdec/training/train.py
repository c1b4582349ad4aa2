"""Training of a draft from options to a written folder: text, traces, steps, comparison."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from backends.contract.source import ModelSource
from offload.units import format_bytes
from specdec.models.eval_results import EvalResults, write_eval_results
from specdec.models.names import resolve_model
from specdec.models.opened import OpenedModel, open_model
from specdec.models.weight_files import weights_fingerprint
from specdec.planning.memory.base import budget_of_run
from specdec.run_options import CPU
from specdec.traces.format import bytes_per_token
from specdec.traces.reader import Traces
from specdec.training import corpus
from specdec.training.data import TrainingData
from specdec.training.destination import Destination
from specdec.training.generated import generated_sequences, interleaved
from specdec.training.kinds import check_draft, make_trainable
from specdec.training.measure import Quality
from specdec.training.options import TrainError, TrainOptions
from specdec.training.teacher import MAX_PASS_TOKENS, Teacher, open_teacher
from specdec.training.trainable import MAX_CHAIN, Trainable
from specdec.training.trainer import Result, Schedule, Trainer

MAX_BATCH_TOKENS = 2048
_MAX_LOGITS_BYTES = 2**28
"""Maximum size of a batch's logits, of which some copies are in memory at a time."""
_LOGITS_COPIES = 4
_TRAINED_BYTES = 4 * 4
"""Bytes of a trained weight: itself, its gradient, and two moments of AdamW, in float32."""
_RATE_PER_WIDTH = 0.25
_NEW_RATE = 5.0
"""Learning rate of new weights, in multiples of that of trained ones: an MTP head of pair:target
agrees after 3 minutes of one core with 0.424 at 2, with 0.455 at 5."""


class ProgressBar(Protocol):
    """Display of the parts of a training."""

    def generated(self, share: float) -> None:
        """Show how much of its time the target has written."""

    def scored(self, done: int, total: int) -> None:
        """Show how many tokens the target has scored."""

    def trained(self, share: float, loss: float, seconds: float) -> None:
        """Show how much of the training is done."""


class NoProgress:
    """Display that shows nothing."""

    def generated(self, share: float) -> None:
        pass

    def scored(self, done: int, total: int) -> None:
        pass

    def trained(self, share: float, loss: float, seconds: float) -> None:
        pass


@dataclass(frozen=True)
class TrainReport:
    """Result of a training."""

    path: Path
    before: Quality
    after: Quality
    steps: int
    minutes: float
    train_tokens: int
    is_new: bool
    """Whether the draft did not exist before: what `before` says is of random weights."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        before, after = self.before, self.after
        title = "new" if self.is_new else "before"
        return [
            f"{self.path}: {self.steps} steps in {self.minutes:.1f} min, on {self.train_tokens} "
            f"tokens; measured on {after.n_tokens} others",
            f"{'':<18}{title:>8}{'after':>8}",
            f"{'agreement':<18}{before.agreement:>8.3f}{after.agreement:>8.3f}",
            f"{'tokens per pass':<18}{before.tokens_per_pass:>8.2f}{after.tokens_per_pass:>8.2f}",
        ]


def train_draft(options: TrainOptions, progress: ProgressBar | None = None) -> TrainReport:
    """Train a draft, and write it if it got better.

    The same call again continues a training that was interrupted.

    Raises:
        SpecdecError: one line; a draft that got worse is not written.
    """
    bar = progress or NoProgress()
    destination = Destination(options.out)
    target_path = resolve_model(options.target.model)
    check_draft(options, target_path)
    if options.target.threads is not None:
        torch.set_num_threads(options.target.threads)
    target = open_model(options.target.model, options.target.backend)
    n_tokens = min(len(target.vocabulary.tokens), target.vocabulary.num_tokens)
    torch.manual_seed(options.seed)
    draft = make_trainable(options, target_path, n_tokens)
    _check_memory(draft, options, n_tokens)
    length = min(options.length, draft.max_length, target.source.max_context)
    lesson = _lesson(options, target, n_tokens, length)
    with destination.work_of(_settings(options, target_path, lesson)):
        traces = lesson.traces
        if traces is None:
            lesson = _with_output(options, destination, lesson, length, bar)
        if traces is None or draft.hidden_layers:
            _teach(options, target.source, destination, draft, lesson, bar)
            traces = Traces(destination.traces)
        data = TrainingData(traces, length, _batch_size(length, n_tokens))
        schedule, device = _schedule(options, draft, data), _device(options)
        result = Trainer(draft, data, schedule, destination.checkpoint, device).run(bar.trained)
        _refuse_worse(result, destination)
        results = _eval_results(options, target_path, result.after)

        def save(folder: Path) -> None:
            draft.save(folder)
            write_eval_results(folder, results)

        destination.complete(save)
    return TrainReport(
        destination.folder,
        result.before,
        result.after,
        result.steps,
        result.seconds / 60,
        sum(window.end - window.start for window in data.training),
        draft.is_new,
    )


class Lesson(NamedTuple):
    """Tokens to train on."""

    sequences: list[list[int]]
    digest: str
    traces: Traces | None
    """Traces of runs, where the tokens come from there."""


def _lesson(options: TrainOptions, target: OpenedModel, n_tokens: int, length: int) -> Lesson:
    if options.traces is not None:
        traces = Traces(options.traces.expanduser())
        _check_vocabulary(traces, n_tokens)
        sequences = [traces.token_ids(number).tolist() for number in range(len(traces))]
        pieces = (ids[i : i + length] for ids in sequences for i in range(0, len(ids), length))
        return Lesson(list(pieces), f"{traces.folder.absolute()}, {traces.n_tokens} tokens", traces)
    documents = corpus.read_documents(options.text)
    sequences = corpus.token_sequences(
        documents,
        target.tokenizer,
        length=length,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    return Lesson(sequences, corpus.digest(documents), None)


def _with_output(
    options: TrainOptions, destination: Destination, lesson: Lesson, length: int, bar: ProgressBar
) -> Lesson:
    """Return the lesson with output of the target."""
    if not options.generate:
        return lesson
    output = generated_sequences(
        replace(options.target, draft_model=options.draft),
        lesson.sequences,
        destination.generated,
        length=length,
        minutes=options.generate,
        progress=bar.generated,
    )
    return lesson._replace(sequences=interleaved(lesson.sequences, output))


def _check_vocabulary(traces: Traces, n_tokens: int) -> None:
    if traces.header.vocab_size != n_tokens:
        raise TrainError(
            f"{traces.folder} has traces over {traces.header.vocab_size} tokens, the target has "
            f"{n_tokens}: name the target that they were recorded with"
        )
    if traces.n_tokens < corpus.MIN_TOKENS:
        raise TrainError(
            f"{traces.folder} has traces of {traces.n_tokens} tokens, at least "
            f"{corpus.MIN_TOKENS} are needed: record more runs"
        )


def _settings(options: TrainOptions, target: Path, lesson: Lesson) -> dict[str, Any]:
    """Return what an interrupted training must share with the one that continues it."""
    draft = None if options.draft is None else weights_fingerprint(resolve_model(options.draft))
    return {
        "target": weights_fingerprint(target),
        "draft": draft,
        "kind": options.kind,
        "intermediate_size": options.intermediate_size,
        "head_layers": options.head_layers,
        "text": lesson.digest,
        "max_tokens": options.max_tokens,
        "generate": options.generate,
        "length": options.length,
        "epochs": options.epochs,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
    }


def _eval_results(options: TrainOptions, target: Path, quality: Quality) -> EvalResults:
    """Return what is written beside the weights. Names are without the folders of this machine."""
    text = options.text if options.traces is None else (options.traces,)
    return EvalResults(
        quality.agreement,
        quality.tokens_per_pass,
        MAX_CHAIN,
        quality.n_tokens,
        tuple(path.expanduser().absolute().name for path in text),
        str(options.target.model) if options.target.model != str(target) else target.name,
        weights_fingerprint(target),
    )


def _device(options: TrainOptions) -> torch.device:
    has_gpu = options.target.device != CPU and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def _check_memory(draft: Trainable, options: TrainOptions, n_tokens: int) -> None:
    """Raise TrainError where the draft's training would exceed the memory budget."""
    n_weights = sum(parameter.numel() for parameter in draft.module.parameters())
    logits_bytes = min(_MAX_LOGITS_BYTES, 4 * MAX_BATCH_TOKENS * n_tokens)
    n_bytes = _TRAINED_BYTES * n_weights + draft.frozen_bytes + _LOGITS_COPIES * logits_bytes
    budget, _ = budget_of_run(options.target.memory_budget)
    if n_bytes > budget:
        raise TrainError(
            f"training {n_weights / 1e6:.0f} million weights takes {format_bytes(n_bytes)}, the "
            f"memory budget is {format_bytes(budget)}: train a smaller draft, or on a machine with "
            "more memory"
        )


def _teach(
    options: TrainOptions,
    target: ModelSource,
    destination: Destination,
    draft: Trainable,
    lesson: Lesson,
    bar: ProgressBar,
) -> None:
    """Write the target's traces of the lesson, unless they are there already."""
    n_tokens = sum(map(len, lesson.sequences))
    if destination.n_traced == len(lesson.sequences):
        return
    width = len(draft.hidden_layers) * draft.hidden_size
    destination.check_space(n_tokens * bytes_per_token(width))
    limit = min(MAX_PASS_TOKENS, target.max_tree_leaves or MAX_PASS_TOKENS)
    longest = max(map(len, lesson.sequences))
    with open_teacher(options.target, longest, limit) as llm:
        teacher = Teacher(llm, weights_fingerprint(target.path), draft.hidden_layers)
        teacher.record(lesson.sequences, destination.traces, bar.scored)


def _batch_size(length: int, n_tokens: int) -> int:
    num_rows = min(MAX_BATCH_TOKENS, _MAX_LOGITS_BYTES // (4 * n_tokens))
    return max(1, num_rows // length)


def _schedule(options: TrainOptions, draft: Trainable, data: TrainingData) -> Schedule:
    rate = options.learning_rate
    if rate is None:
        rate = _RATE_PER_WIDTH / draft.hidden_size * (_NEW_RATE if draft.is_new else 1.0)
    steps = max(1, math.ceil(options.epochs * data.steps_per_epoch))
    return Schedule(steps, options.minutes, rate, options.seed)


def _refuse_worse(result: Result, destination: Destination) -> None:
    before, after = result.before, result.after
    if after.rank >= before.rank:
        return
    destination.forget_weights()
    raise TrainError(
        f"the draft got worse on the held-out text and is not written: "
        f"{before.tokens_per_pass:.3f} tokens per pass before and {after.tokens_per_pass:.3f} "
        f"after, agreement {before.agreement:.3f} and {after.agreement:.3f}: give more text, more "
        f"--minutes or another --learning-rate; {destination.work} keeps the target's traces, "
        "remove it if you do not try again"
    )
