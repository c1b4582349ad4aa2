"""Is a text the same in every way of decoding it, token for token?

    python -m bench.checks.equality TARGET DRAFT --memory-budgets 1.5GiB,2.5GiB,3.5GiB

The reference is plain decoding with the whole model in memory. Each prompt is then decoded in some
of the WAYS at some of the budgets: both take turns. At the end of each budget the process starts
again from the prompt cache file of its last text. Prints how many tokens of each way are the
reference's, and exits with 2 where one is not.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import options
from bench.checks.equal_texts import TextsDiffer, percent_equal
from bench.figures import first_mismatch
from bench.prompts.workloads import BUILT_IN, Prompt, read_prompts
from bench.table import Table, text_of
from specdec.cli.errors import run_app
from specdec.config import SpecConfig
from specdec.metrics.stats import ratio

if TYPE_CHECKING:
    from specdec.api import LLM

GREEDY, SAMPLED, SECOND_TURN, BEAMS = "greedy", "sampled", "second turn", "beams"
N_BEAMS = 4
TEMPERATURE = 0.7
RESTORED = "greedy, restored from a prompt cache file"
_NEXT_TURN = "\n\n# The same again, with another name:\n"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Texts = dict[tuple[str, str], list[int]]
"""(prompt's name, kind of text) -> token ids."""


@dataclass(frozen=True)
class Way:
    """One way of decoding a kind of text; the reference has the same kinds."""

    name: str
    kind: str
    spec: Mapping[str, Any] = field(default_factory=dict)


_CHAIN = {"num_draft_tokens": 8, "draft_depth": 8, "tree_width": 1}
WAYS = (
    Way("greedy", GREEDY),
    Way("T = 0.7", SAMPLED),
    Way("greedy, trees of 16", GREEDY, {"num_draft_tokens": 16, "draft_depth": 8}),
    Way("T = 0.7, chains of 8", SAMPLED, _CHAIN),
    Way("second turn", SECOND_TURN),
    Way("greedy, n-grams alone", GREEDY, {"spec_type": ("ngram",)}),
    Way(
        "T = 0.7, trees of 16 drafted ahead",
        SAMPLED,
        {"num_draft_tokens": 16, "draft_depth": 8, "draft_ahead": "on"},
    ),
    Way("beams", BEAMS),
    Way("greedy, chains of 8", GREEDY, _CHAIN),
    Way("greedy, trees of 64", GREEDY, {"num_draft_tokens": 64, "draft_depth": 16}),
)


Task = tuple[Prompt, Way]


@dataclass
class Equal:
    """Tokens of one way that are the reference's, at the same place."""

    n_texts: int = 0
    n_tokens: int = 0
    n_equal: int = 0

    def add(self, wanted: Sequence[int], found: Sequence[int]) -> None:
        at = first_mismatch(wanted, found)
        self.n_texts += 1
        self.n_tokens += max(len(wanted), len(found))
        self.n_equal += len(wanted) if at is None else at


def tasks_of(prompts: Sequence[Prompt], n_budgets: int, n_ways: int) -> list[list[Task]]:
    """For each budget its tasks, when every prompt is decoded in `n_ways` ways."""
    tasks: list[list[Task]] = [[] for _ in range(n_budgets)]
    for number, prompt in enumerate(prompts):
        for turn in range(n_ways * number, n_ways * (number + 1)):
            tasks[turn % n_budgets].append((prompt, WAYS[turn % len(WAYS)]))
    return [some for some in tasks if some]


def generate(llm: LLM, prompt: Prompt, way: Way, max_tokens: int, **more: Any) -> list[int]:
    """Token ids of one text; of a second turn those of both."""
    keywords: dict[str, Any] = {"max_tokens": max_tokens, **more}
    if way.kind == BEAMS:
        keywords["num_beams"] = N_BEAMS
    if way.kind == SAMPLED:
        keywords.update(temperature=TEMPERATURE, seed=len(prompt.text))
    found = llm.generate(prompt.text, **keywords)
    ids = list(found.token_ids)
    if way.kind == SECOND_TURN:
        follow = llm.tokenizer.encode(prompt.text) + ids + llm.tokenizer.encode(_NEXT_TURN)
        ids += llm.generate(follow, **keywords).token_ids
    return ids


def reference(load: Mapping[str, Any], tasks: Sequence[Task], n: int) -> Texts:
    """Every text once, one token per pass, with the model in memory; second turns without any
    key of the first."""
    import specdec

    texts: Texts = {}
    with specdec.load(**{**load, "draft_model": None}, num_beams=N_BEAMS) as llm:
        for prompt, way in tasks:
            key = (prompt.name, way.kind)
            if key not in texts:
                cache = way.kind != SECOND_TURN
                texts[key] = generate(llm, prompt, way, n, speculative=False, cache_prompt=cache)
                _say(f"reference: {prompt.name}, {way.kind}: {len(texts[key])} tokens")
    return texts


def decode(
    load: Mapping[str, Any], tasks: Sequence[Task], n: int
) -> Iterator[tuple[Prompt, Way, list[int]]]:
    """Decode every task in turn within one load, and the last prompt again after another."""
    import specdec

    with tempfile.TemporaryDirectory() as folder:
        load = {**load, "num_beams": N_BEAMS, "prompt_cache_file": str(Path(folder) / "kv")}
        load["num_draft_tokens"] = max(way.spec.get("num_draft_tokens", 0) for way in WAYS)
        with specdec.load(**load) as llm:
            for prompt, way in tasks:
                spec = SpecConfig(**{"spec_type": llm.spec.spec_type, **way.spec})
                yield prompt, way, generate(llm, prompt, way, n, spec=spec)
        last = tasks[-1][0]
        with specdec.load(**load) as llm:
            yield last, Way(RESTORED, GREEDY), generate(llm, last, WAYS[0], n)


@app.command()
def main(
    target: Annotated[str, typer.Argument(help="As `specdec run -m` takes it.")],
    draft: Annotated[str, typer.Argument(help="As `specdec run -md` takes it.")],
    memory_budgets: Annotated[str, typer.Option("--memory-budgets", metavar="SIZE,...")],
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.NPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    ways_per_prompt: Annotated[int, typer.Option("--ways-per-prompt", min=1, max=len(WAYS))] = 1,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 1024,
) -> None:
    """Compare texts decoded in many ways with plain decoding in memory."""
    load = {"model": target, "draft_model": draft, "ctx_size": ctx_size, "exact": "on"}
    budgets = memory_budgets.split(",")
    tasks = tasks_of(read_prompts(prompts, n_prompts), len(budgets), ways_per_prompt)
    last = [(some[-1][0], WAYS[0]) for some in tasks]
    wanted = reference(load, [one for some in (*tasks, last) for one in some], max_tokens)
    found: dict[tuple[str, str], Equal] = defaultdict(Equal)
    for budget, some in zip(budgets, tasks, strict=False):
        streamed = {**load, "memory_budget": budget}
        for prompt, way, ids in decode(streamed, some, max_tokens):
            text = wanted[prompt.name, way.kind]
            found[way.name, budget].add(text, ids)
            at = first_mismatch(text, ids)
            verdict = "equal" if at is None else f"differs from token {at} on"
            _say(f"{budget}: {prompt.name}, {way.name}: {verdict}")
    typer.echo(text_of([table(found)]))
    n_different = sum(one.n_tokens - one.n_equal for one in found.values())
    if n_different:
        raise TextsDiffer(f"{n_different} tokens are not the reference's: please report it")


def table(found: Mapping[tuple[str, str], Equal]) -> Table:
    """A row for each way and budget."""
    rows = [
        (way, budget, str(one.n_texts), str(one.n_tokens), percent_equal(_match(one)))
        for (way, budget), one in sorted(found.items())
    ]
    return Table("Texts", ("way", "budget", "texts", "tokens", "equal"), tuple(rows))


def _match(one: Equal) -> float:
    return ratio(one.n_equal, one.n_tokens)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.equality", sys.argv[1:]))
