"""Check that every mode of decoding gives the same tokens.

    python -m bench.checks.equality TARGET DRAFT --memory-budgets 1.5GiB,2.5GiB,3.5GiB

The reference is plain decoding with the whole model in memory. Each prompt is then decoded in some
of the MODES at some of the budgets, in turns. At the end of each budget the process starts again
from the prompt cache folder, where reading its last sequence is quicker than computing it. Prints
how many tokens of each mode equal the reference, and exits with 2 if one does not.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import options
from bench.checks.equal_outputs import OutputsDiffer, percent_equal
from bench.prompts.workloads import BUILT_IN, Prompt, read_prompts
from bench.results import first_mismatch
from bench.table import Table, text_of
from specdec.cli.errors import run_app
from specdec.config import SpecConfig
from specdec.metrics.stats import ratio

if TYPE_CHECKING:
    from specdec.api import LLM

GREEDY, SAMPLED, SECOND_TURN, BEAMS = "greedy", "sampled", "second turn", "beams"
N_BEAMS = 4
TEMPERATURE = 0.7
FROM_PROMPT_CACHE = "greedy, after a restart with a prompt cache"
_NEXT_TURN = "\n\n# The same again, with another name:\n"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Outputs = dict[tuple[str, str], list[int]]
"""(prompt's name, kind of output) -> token ids."""


@dataclass(frozen=True)
class Mode:
    """Mode of decoding a kind of output; the reference has the same kinds."""

    name: str
    kind: str
    spec: Mapping[str, Any] = field(default_factory=dict)


_CHAIN = {"num_draft_tokens": 8, "draft_depth": 8, "tree_width": 1}
MODES = (
    Mode("greedy", GREEDY),
    Mode("T = 0.7", SAMPLED),
    Mode("greedy, trees of 16", GREEDY, {"num_draft_tokens": 16, "draft_depth": 8}),
    Mode("T = 0.7, chains of 8", SAMPLED, _CHAIN),
    Mode("second turn", SECOND_TURN),
    Mode("greedy, n-grams alone", GREEDY, {"spec_type": ("ngram",)}),
    Mode(
        "T = 0.7, trees of 16 drafted ahead",
        SAMPLED,
        {"num_draft_tokens": 16, "draft_depth": 8, "draft_ahead": "on"},
    ),
    Mode("beams", BEAMS),
    Mode("greedy, chains of 8", GREEDY, _CHAIN),
    Mode("greedy, trees of 64", GREEDY, {"num_draft_tokens": 64, "draft_depth": 16}),
)


Task = tuple[Prompt, Mode]


@dataclass
class Equal:
    """Count of tokens of one mode that equal the reference at the same position."""

    num_seqs: int = 0
    n_tokens: int = 0
    n_equal: int = 0

    def add(self, reference: Sequence[int], token_ids: Sequence[int]) -> None:
        at = first_mismatch(reference, token_ids)
        self.num_seqs += 1
        self.n_tokens += max(len(reference), len(token_ids))
        self.n_equal += len(reference) if at is None else at


def tasks_of(prompts: Sequence[Prompt], n_budgets: int, num_modes: int) -> list[list[Task]]:
    """Return the tasks of each budget, with every prompt decoded in `num_modes` modes."""
    tasks: list[list[Task]] = [[] for _ in range(n_budgets)]
    for number, prompt in enumerate(prompts):
        for turn in range(num_modes * number, num_modes * (number + 1)):
            tasks[turn % n_budgets].append((prompt, MODES[turn % len(MODES)]))
    return [some for some in tasks if some]


def generate(llm: LLM, prompt: Prompt, mode: Mode, max_tokens: int, **more: Any) -> list[int]:
    """Return the token ids of one output; for a second turn those of both turns."""
    keywords: dict[str, Any] = {"max_tokens": max_tokens, **more}
    if mode.kind == BEAMS:
        keywords["num_beams"] = N_BEAMS
    if mode.kind == SAMPLED:
        keywords.update(temperature=TEMPERATURE, seed=len(prompt.text))
    result = llm.generate(prompt.text, **keywords)
    ids = list(result.token_ids)
    if mode.kind == SECOND_TURN:
        follow = llm.tokenizer.encode(prompt.text) + ids + llm.tokenizer.encode(_NEXT_TURN)
        ids += llm.generate(follow, **keywords).token_ids
    return ids


def reference(load: Mapping[str, Any], tasks: Sequence[Task], n: int) -> Outputs:
    """Decode every output once, plainly, with the model in memory; second turns without a cached
    prefix."""
    import specdec

    outputs: Outputs = {}
    with specdec.load(**{**load, "draft_model": None}, num_beams=N_BEAMS) as llm:
        for prompt, mode in tasks:
            key = (prompt.name, mode.kind)
            if key not in outputs:
                cache = mode.kind != SECOND_TURN
                outputs[key] = generate(llm, prompt, mode, n, speculative=False, cache_prompt=cache)
                _say(f"reference: {prompt.name}, {mode.kind}: {len(outputs[key])} tokens")
    return outputs


def decode(
    load: Mapping[str, Any], tasks: Sequence[Task], n: int
) -> Iterator[tuple[Prompt, Mode, list[int]]]:
    """Decode every task within one load, and the last prompt again after reloading."""
    import specdec

    with tempfile.TemporaryDirectory() as folder:
        load = {**load, "num_beams": N_BEAMS, "prompt_cache_dir": folder}
        load["num_draft_tokens"] = max(mode.spec.get("num_draft_tokens", 0) for mode in MODES)
        with specdec.load(**load) as llm:
            for prompt, mode in tasks:
                spec = SpecConfig(**{"spec_type": llm.spec.spec_type, **mode.spec})
                yield prompt, mode, generate(llm, prompt, mode, n, spec=spec)
        last = tasks[-1][0]
        with specdec.load(**load) as llm:
            yield last, Mode(FROM_PROMPT_CACHE, GREEDY), generate(llm, last, MODES[0], n)


@app.command()
def main(
    target: Annotated[str, typer.Argument(help="Model, as for `specdec run -m`.")],
    draft: Annotated[str, typer.Argument(help="Draft model, as for `specdec run -md`.")],
    memory_budgets: Annotated[str, typer.Option("--memory-budgets", metavar="SIZE,...")],
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.NPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    modes_per_prompt: Annotated[int, typer.Option("--modes-per-prompt", min=1, max=len(MODES))] = 1,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 1024,
) -> None:
    """Compare sequences decoded in many modes with plain decoding in memory."""
    load = {"model": target, "draft_model": draft, "ctx_size": ctx_size, "exact": "on"}
    budgets = memory_budgets.split(",")
    tasks = tasks_of(read_prompts(prompts, n_prompts), len(budgets), modes_per_prompt)
    last = [(some[-1][0], MODES[0]) for some in tasks]
    expected = reference(load, [task for some in (*tasks, last) for task in some], max_tokens)
    result: dict[tuple[str, str], Equal] = defaultdict(Equal)
    for budget, some in zip(budgets, tasks, strict=False):
        streamed = {**load, "memory_budget": budget}
        for prompt, mode, ids in decode(streamed, some, max_tokens):
            reference_ids = expected[prompt.name, mode.kind]
            result[mode.name, budget].add(reference_ids, ids)
            at = first_mismatch(reference_ids, ids)
            verdict = "equal" if at is None else f"differs from token {at} on"
            _say(f"{budget}: {prompt.name}, {mode.name}: {verdict}")
    typer.echo(text_of([table(result)]))
    n_different = sum(equal.n_tokens - equal.n_equal for equal in result.values())
    if n_different:
        raise OutputsDiffer(f"{n_different} tokens are not the reference's: please report it")


def table(result: Mapping[tuple[str, str], Equal]) -> Table:
    """Return a row for each mode and budget."""
    rows = [
        (mode, budget, str(item.num_seqs), str(item.n_tokens), percent_equal(_match(item)))
        for (mode, budget), item in sorted(result.items())
    ]
    return Table("Outputs", ("mode", "budget", "outputs", "tokens", "equal"), tuple(rows))


def _match(item: Equal) -> float:
    return ratio(item.n_equal, item.n_tokens)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.equality", sys.argv[1:]))
