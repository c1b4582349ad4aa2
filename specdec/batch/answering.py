"""Answer the lines of a batch on the models that this process loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from offload.errors import SpecdecError
from specdec.api import LLM
from specdec.batch.lines import Line, LineKey
from specdec.batch.records import to_line
from specdec.batch.request import LineError, LineRequest, Rules, read_request
from specdec.engine.sequences.outputs import GenerationResult
from specdec.metrics.stats import EngineStats
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """Record of one line, with the counts that the progress display needs."""

    key: LineKey
    record: bytes
    """A line of JSON."""
    is_error: bool
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    model: str | None = None
    """Model that the line names."""


Answered = Callable[[Answer], None]


def answer_lines(llm: LLM, lines: Iterable[Line], rules: Rules, answered: Answered) -> EngineStats:
    """Answer all lines and return the engine's metrics.

    `answered` is called with each answer as it is finished, in this thread. Lines are drawn only
    as the scheduler has capacity for them. An error of one line becomes its record; an error that
    concerns all of them (storage that fails, say) is raised.
    """
    in_hand: dict[int, tuple[LineKey, LineRequest]] = {}

    def requests() -> Iterator[tuple[Prompt, SamplingParams]]:
        n_drawn = 0
        for line in lines:
            try:
                request = read_request(line, rules)
            except LineError as error:
                record = error.form.failed(line.key, str(error))
                answered(Answer(line.key, to_line(record), is_error=True))
                continue
            in_hand[n_drawn] = line.key, request
            n_drawn += 1
            yield request.prompt, request.params

    for index, outcome in llm.generate_each(requests()):
        answered(_answer(llm, *in_hand.pop(index), outcome, rules.model))
    return llm.stats


def _answer(
    llm: LLM,
    key: LineKey,
    request: LineRequest,
    outcome: GenerationResult | SpecdecError,
    model: str,
) -> Answer:
    if isinstance(outcome, SpecdecError):
        record = request.form.failed(key, str(outcome))
        return Answer(key, to_line(record), is_error=True, model=request.model)
    record = request.form.answered(key, outcome, llm.tokenizer, model)
    n_generated = sum(len(output.token_ids) for output in outcome.outputs)
    n_prompt = outcome.stats.prompt_tokens
    return Answer(key, to_line(record), False, n_prompt, n_generated, request.model)
