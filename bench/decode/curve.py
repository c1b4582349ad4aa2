"""Speedup curves: real passes of a real target, and a drafter whose accuracy is known.

A speedup depends on the machine, on the target and on the acceptance rate of the draft. The first
two are measured here, the third is set, so that readers can place a pair of their own:

    python -m bench.decode.curve SPEC.json RESULT.json

For every prompt the target first decodes plainly: the drafter knows that output. Then, for every
rate, plain decoding and chains of every length take turns, beginning with another one each time,
so that a drift of the storage's speed affects all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bench.checks.equal_outputs import are_exact
from bench.checks.near_ties import examine
from bench.decode.curve_figures import summarise
from bench.decode.known_drafter import KnownAccuracyDrafter
from bench.process.child import measure_for_parent, result_of_child
from bench.process.provenance import collect
from bench.process.results import Record, append_line
from bench.prompts.workloads import Prompt
from bench.results import first_mismatch
from offload.errors import SpecdecError
from specdec.config import SpecConfig

if TYPE_CHECKING:
    from specdec.api import LLM
    from specdec.metrics.stats import GenerationStats

_PLAIN = 0  # draft tokens
_PLAIN_SHARE = 4  # plain decoding has no variance to average out: part of the tokens will do
_MIN_PLAIN_TOKENS = 9


class CurveError(SpecdecError):
    """A curve cannot be measured as asked."""


@dataclass(frozen=True)
class CurveSettings:
    """Settings of a curve."""

    rates: tuple[float, ...]
    """Probabilities that a draft token is right."""
    lengths: tuple[int, ...]
    """Draft tokens of a chain."""
    max_tokens: int = 64
    """Tokens of each decoding with a draft, which ends with the step that reaches them."""
    ignore_eos: bool = False
    seed: int = 0
    """Seed of the simulated drafts."""

    @property
    def text_tokens(self) -> int:
        """Length of the output that the drafter knows, so that no chain is cut off."""
        return self.max_tokens + max(self.lengths)

    def requested_tokens(self, n_drafted: int) -> int:
        """Return the tokens to decode with so many draft tokens."""
        if n_drafted != _PLAIN:
            return self.max_tokens
        return min(self.max_tokens, max(_MIN_PLAIN_TOKENS, self.max_tokens // _PLAIN_SHARE))


@dataclass(frozen=True)
class CurveSpec:
    """Specification of a measurement; written as JSON for the process that does it."""

    load: dict[str, Any]
    """Keywords of `specdec.load` without a draft; "model" is a local path."""
    prompts: list[Prompt]
    settings: CurveSettings
    log: str | None = None
    """JSON Lines file to which each record is appended."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> CurveSpec:
        """Return the specification from JSON values."""
        settings = values["settings"]
        settings |= {name: tuple(settings[name]) for name in ("rates", "lengths")}
        prompts = [Prompt(**prompt) for prompt in values["prompts"]]
        return cls(values["load"], prompts, CurveSettings(**settings), values["log"])


def run_curve(spec: CurveSpec, argv: Sequence[str], *, enforce: bool) -> dict[str, Any]:
    """Measure in a process of its own, inside the memory budget if enforced.

    Returns the keys of `measure_curve`, and model, enforced, provenance.
    """
    provenance = collect(argv, Path(spec.load["model"]))
    limit = spec.load["memory_budget"] if enforce else None
    result = result_of_child("bench.decode.curve", spec, limit)
    return {**result, "model": spec.load["model"], "enforced": enforce, "provenance": provenance}


def load_keywords(load: dict[str, Any], settings: CurveSettings) -> dict[str, Any]:
    """Return keywords of `specdec.load`: capacity for the longest chain, and no draft model."""
    return {**load, "spec_type": ("ngram",), "num_draft_tokens": max(settings.lengths)}


def measure_curve(
    llm: LLM,
    prompts: Sequence[Prompt],
    settings: CurveSettings,
    out: TextIO = sys.stderr,
    log: Path | None = None,
) -> dict[str, Any]:
    """Measure with a loaded target (`specdec.load(**load_keywords(...))`).

    log: JSON Lines file to which each record is appended.

    Returns:
        the keys of `curve_figures.summarise`, and
        is_exact        outputs must be plain decoding's to the bit (`bench.checks.equal_outputs`)
        differences     outputs that are not plain decoding's: prompt, rate, n_draft_tokens,
                        position; for a target that is not exact also the near tie's fields
        num_seqs        number of outputs that were compared
        plan, n_prompts, max_tokens, memory_budget_bytes
        records         `bench.process.results.Record`s with rate and n_draft_tokens (0: plain)

    Raises:
        CurveError: a prompt and its output do not fit in the context.
    """
    progress = _Progress(out, len(prompts) * len(settings.rates) * (1 + len(settings.lengths)))
    records: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        turns = _Turns(llm, prompt, index, settings)
        turns.warm_up()
        made = []
        for mode in turns.order():
            made.append(turns.decode(*mode))
            if log is not None:
                append_line(made[-1], log)
            progress.say(made[-1])
        differences += turns.differences(made)
        records += made
    return {
        **summarise(records),
        "is_exact": are_exact(records),
        "differences": differences,
        "num_seqs": len(records),
        "plan": llm.plan.to_dict(),
        "n_prompts": len(prompts),
        "max_tokens": settings.max_tokens,
        "memory_budget_bytes": llm.plan.budget_bytes,
        "records": records,
    }


class _Turns:
    """One prompt: its plain output, and the decodings that repeat it."""

    def __init__(self, llm: LLM, prompt: Prompt, index: int, settings: CurveSettings) -> None:
        self._llm, self._prompt, self._index = llm, prompt, index
        self._settings = settings
        self._prompt_ids = llm.tokenizer.encode(prompt.text)
        requested = len(self._prompt_ids) + settings.text_tokens
        if requested > llm.max_context:
            raise CurveError(
                f"{prompt.name} takes {len(self._prompt_ids)} tokens and its output "
                f"{settings.text_tokens} (-n and the longest chain), together more than the "
                f"context of {llm.max_context}: give -c {requested}, shorter chains or a smaller -n"
            )
        # All decodings, this first one too, reuse the cached KV of the prompt.
        self._run(1, None, speculative=False)
        self._text, _ = self._run(settings.text_tokens, None, speculative=False)

    def order(self) -> list[tuple[float, int]]:
        """Return (rate, draft tokens), rate by rate, beginning with another length each time."""
        lengths = [_PLAIN, *self._settings.lengths]
        modes = []
        for i, rate in enumerate(self._settings.rates):
            first = (self._index + i) % len(lengths)
            modes += [(rate, n) for n in lengths[first:] + lengths[:first]]
        return modes

    def warm_up(self) -> None:
        """Run a pass of the largest size, which allocates scratch memory."""
        self._decode(1.0, max(self._settings.lengths), num_requested=2)

    def decode(self, rate: float, n_drafted: int) -> dict[str, Any]:
        num_requested = self._settings.requested_tokens(n_drafted)
        tokens, stats = self._decode(rate, n_drafted, num_requested)
        record = Record(
            self._prompt.name,
            token_ids=tokens,
            stats=stats.to_dict(),
            pass_times=[list(item) for item in stats.pass_times],
        )
        return {**asdict(record), "rate": rate, "n_draft_tokens": n_drafted}

    def differences(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the outputs that differ from plain decoding; with near ties if inexact."""
        known: dict[tuple[int, int], dict[str, Any]] = {}  # by position and token
        result = []
        for record in records:
            tokens = record["token_ids"]
            at = first_mismatch(self._text[: len(tokens)], tokens)
            if at is None:
                continue
            where = {key: record[key] for key in ("prompt", "rate", "n_draft_tokens")}
            if are_exact([record]):  # an error
                result.append({**where, "position": at})
                continue
            place = (at, tokens[at])
            if place not in known:
                tie = examine(self._llm.target, self._prompt_ids, self._text, tokens)
                assert tie is not None, "the sequences differ"
                known[place] = tie.to_dict()
            result.append({**where, **known[place]})
        return result

    def _decode(
        self, rate: float, n_drafted: int, num_requested: int
    ) -> tuple[list[int], GenerationStats]:
        if n_drafted == _PLAIN:
            return self._run(num_requested, self._text, speculative=False)
        tokenizer, target = self._llm.tokenizer, self._llm.target
        drafter = KnownAccuracyDrafter(
            [*self._prompt_ids, *self._text],
            rate,
            min(tokenizer.n_tokens, target.vocab_size),
            (self._settings.seed, self._index, round(1e6 * rate), n_drafted),
        )
        chain = SpecConfig(
            ("ngram",), n_drafted, tree_width=1, draft_depth=n_drafted, draft_ahead="off"
        )
        return self._run(num_requested, self._text, spec=chain, drafter=drafter)

    def _run(
        self, num_requested: int, text: Sequence[int] | None, **how: Any
    ) -> tuple[list[int], GenerationStats]:
        """Decode at least so many tokens, greedily, unless the sequence ends.

        Also ends where it differs from `text`, the plain output: the drafter knows no further. The
        engine's thread cancels it itself: until a busy reader does, passes with shorter chains
        would follow.
        """
        stream = self._llm.stream(
            self._prompt_ids,
            max_tokens=self._settings.text_tokens,
            ignore_eos=self._settings.ignore_eos,
            **how,
        )

        def end_in_time() -> None:
            tokens = list(stream.outputs[0].token_ids)
            is_other = text is not None and tokens != text[: len(tokens)]
            if len(tokens) >= num_requested or is_other:
                stream.cancel_soon()

        stream.start(on_output=end_in_time)
        for _ in stream:
            pass
        stream.cancel()
        result = stream.result
        return list(result.outputs[0].token_ids), result.stats


class _Progress:
    """Printer of a line for each decoding."""

    def __init__(self, out: TextIO, n_total: int) -> None:
        self._out, self._n_total, self._n_done = out, n_total, 0
        self._began = time.monotonic()

    def say(self, record: dict[str, Any]) -> None:
        self._n_done += 1
        seconds = (time.monotonic() - self._began) / self._n_done * (self._n_total - self._n_done)
        n, stats = record["n_draft_tokens"], record["stats"]
        mode = f"rate {record['rate']:.2f} chain {n}" if n else "plain"
        print(
            f"{self._n_done}/{self._n_total} ({record['prompt']}) {mode}: "
            f"{stats['tokens_per_second']:.2f} tok/s, "
            f"{stats['mean_acceptance_length']:.2f} tokens per pass | {seconds:.0f} s left",
            file=self._out,
            flush=True,
        )


def measure(spec: CurveSpec, out: TextIO) -> dict[str, Any]:
    """Load the target and measure; progress goes to `out`."""
    from specdec.api import load
    from specdec.cli.progress import loading_progress

    with loading_progress(f"loading {spec.load['model']}") as progress:
        llm = load(**load_keywords(spec.load, spec.settings), progress=progress)
    with llm:
        log = Path(spec.log) if spec.log else None
        return measure_curve(llm, spec.prompts, spec.settings, out, log)


if __name__ == "__main__":
    sys.exit(
        measure_for_parent(sys.argv[1:], lambda values: measure(CurveSpec.of(values), sys.stderr))
    )
