"""Lines in, records out, on the models that this process loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from offload.errors import SpecdecError
from specdec.api import LLM
from specdec.batch.lines import Line, LineKey
from specdec.batch.records import to_line
from specdec.batch.request import LineError, LineRequest, Rules, read_request
from specdec.engine.outputs import GenerationResult
from specdec.metrics.stats import EngineStats
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """The record of one line, and what there is to tell of it meanwhile."""

    key: LineKey
    record: bytes
    """A line of JSON."""
    is_error: bool
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    model: str | None = None
    """That the line asked for."""


Answered = Callable[[Answer], None]


def answer_lines(llm: LLM, lines: Iterable[Line], rules: Rules, answered: Answered) -> EngineStats:
    """Answer all lines; `answered` is called with each as it is finished, in this thread.
    Returns the figures of the models.

    Lines are drawn only as there is room for them in the passes. What is wrong with one line is
    its record; what concerns all of them (storage that fails, say) is raised.
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
