"""What the first rounds of a text bring, beside a tree of a fixed size in the same places.

    export XDG_CACHE_HOME=$(mktemp -d)
    python -m bench.decode.first_rounds -m MODEL -md DRAFT --memory-budget 3.5GiB \
        --prompts human_eval.jsonl --fresh
    specdec run -m MODEL -md DRAFT --memory-budget 3.5GiB -p "def main():" -n 256
    python -m bench.decode.first_rounds ...    the same without --fresh

Every text begins as the first one of a process does: with `--fresh` with nothing learnt, else with
what earlier processes have kept of the pair. Nothing of a measurement is kept. A round may be as
large as the policy wants: no text comes near its last token. The fixed tree is asked by a second
load of the models, into all memory that there is: its tokens depend on no budget, which may have no
room for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import options
from bench.checks.equal_texts import TextsDiffer
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.table import Table, cell, text_of
from specdec.cli.errors import run_app
from specdec.config import DEFAULT_DRAFT_DEPTH, SpecConfig
from specdec.decoding.rounds.stats import ratio
from specdec.policy.costs import MOST_TIMED_ROWS
from specdec.policy.experience import experience_of

N_ROUNDS = 4

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Rounds:
    """The tokens of a text's pass over its prompt, which are one, and of each round behind it.

    nodes: that each of these rounds verified.
    """

    tokens: list[list[int]]
    nodes: list[int]

    @property
    def n_tokens(self) -> list[int]:
        """That each round brought."""
        return [len(tokens) for tokens in self.tokens[1:]]


@dataclass(frozen=True)
class Text:
    """One text: places (tokens of the context where each round began), what the policy's rounds
    brought there with so many nodes, and what the fixed tree brought."""

    prompt: str
    places: list[int]
    chosen: list[int]
    chosen_nodes: list[int]
    fixed: list[int]


def most_tokens(n_rounds: int) -> int:
    """More than so many rounds can bring: the end of the text cuts none of them short."""
    return n_rounds * (DEFAULT_DRAFT_DEPTH + 1) + 1 + DEFAULT_DRAFT_DEPTH


def rounds_of(llm: Any, prompt_ids: Sequence[int], n_rounds: int, spec: SpecConfig) -> Rounds:
    """Of a text of which no more is decoded."""
    tokens: list[list[int]] = []
    max_tokens = most_tokens(n_rounds)
    stream = llm.stream(list(prompt_ids), max_tokens=max_tokens, spec=spec, ignore_eos=True)
    for chunk in stream:
        tokens.append(list(chunk.token_ids))
        if len(tokens) > n_rounds:
            stream.cancel()
    nodes = [one.n_rows - 1 for one in stream.result.stats.pass_times]
    return Rounds(tokens[: n_rounds + 1], nodes[:n_rounds])


def contexts(prompt_ids: Sequence[int], rounds: Rounds) -> list[list[int]]:
    """What each round behind the prompt's pass began with, its pending token the last."""
    found, context = [], [*prompt_ids]
    for tokens in rounds.tokens[:-1]:
        context += tokens
        found.append([*context])
    return found


def chosen_rounds(llm: Any, prompts: Sequence[Sequence[int]], kept: Any) -> list[Rounds]:
    """The automatic policy's, each text beginning with what was `kept` of the pair (or None)."""
    plan, found = llm.plan, []
    for ids in prompts:
        llm.session.experience = experience_of(
            plan.pass_cost, plan.draft_cost, plan.n_draft_tokens, kept, max_rows=MOST_TIMED_ROWS
        )
        found.append(rounds_of(llm, ids, N_ROUNDS, SpecConfig()))
    return found


def fixed_round(llm: Any, context: Sequence[int], spec: SpecConfig) -> int:
    """Tokens of one round in this place: a prompt's pass gives its pending token once more."""
    rounds = rounds_of(llm, context[:-1], 1, spec)
    if rounds.tokens[0] != list(context[-1:]):
        raise TextsDiffer(
            f"token {len(context) - 1} of a text is {context[-1]}, but as the first one behind a "
            f"prompt {rounds.tokens[0]}: the rounds of a target that is not exact have no places "
            "in common"
        )
    return rounds.n_tokens[0]


def summarise(texts: Sequence[Text]) -> dict[str, Any]:
    """By round and of all: tokens, nodes, and the ratio of the policy's tokens to the fixed
    tree's."""
    rounds = []
    for i in range(N_ROUNDS):
        chosen = sum(text.chosen[i] for text in texts)
        fixed = sum(text.fixed[i] for text in texts)
        nodes = ratio(sum(text.chosen_nodes[i] for text in texts), len(texts))
        rounds.append(
            {
                "round": i + 1,
                "chosen_tokens": chosen,
                "fixed_tokens": fixed,
                "mean_chosen_nodes": nodes,
                "ratio": ratio(chosen, fixed),
            }
        )
    n_chosen = sum(sum(text.chosen) for text in texts)
    n_fixed = sum(sum(text.fixed) for text in texts)
    return {
        "n_texts": len(texts),
        "chosen_tokens": n_chosen,
        "fixed_tokens": n_fixed,
        "ratio": ratio(n_chosen, n_fixed),
        "rounds": rounds,
        "texts": [asdict(text) for text in texts],
    }


def table_of(result: dict[str, Any]) -> Table:
    rows = [
        (
            str(one["round"]),
            str(one["chosen_tokens"]),
            cell(one["mean_chosen_nodes"], "{:.1f}"),
            str(one["fixed_tokens"]),
            cell(one["ratio"]),
        )
        for one in result["rounds"]
    ]
    total = (str(result["chosen_tokens"]), "", str(result["fixed_tokens"]), cell(result["ratio"]))
    about = (
        f"{result['n_texts']} texts, pair {result['pair']}, fixed tree {result['fixed_tree']}; "
        f"the plan has room for {result['planned_most_nodes']} nodes"
    )
    return Table(
        "round",
        ("round", "tokens", "mean nodes", "tokens of the fixed tree", "ratio"),
        (*rows, ("all", *total)),
        about=(about,),
    )


def measure(
    load: dict[str, Any], path: Path, n_prompts: int, fixed: SpecConfig, is_fresh: bool
) -> dict[str, Any]:
    """The policy's rounds, and behind them the fixed tree in their places."""
    import specdec

    prompts = read_prompts(path, n_prompts)
    with specdec.load(**load) as llm:
        _check_draft(llm)
        kept = None if is_fresh else kept_of(llm)
        ids = [llm.tokenizer.encode(one.text) for one in prompts]
        _check_room(prompts, ids, llm.plan.ctx_size)
        most_nodes = llm.plan.n_draft_tokens
        chosen = chosen_rounds(llm, ids, kept)
    texts = []
    roomy = {**load, "memory_budget": "auto", "num_draft_tokens": fixed.num_draft_tokens}
    with specdec.load(**roomy) as llm:
        _check_draft(llm)
        _take_no_notes(llm)
        for prompt, one, rounds in zip(prompts, ids, chosen, strict=True):
            places = contexts(one, rounds)
            asked = [fixed_round(llm, place, fixed) for place in places]
            n_context = [len(place) for place in places]
            texts.append(Text(prompt.name, n_context, rounds.n_tokens, rounds.nodes, asked))
            typer.echo(f"{prompt.name}: {rounds.n_tokens}, fixed tree {asked}", err=True)
    return {"planned_most_nodes": most_nodes, **summarise(texts)}


def kept_of(llm: Any) -> Any:
    """What earlier processes have kept of the pair, as this one found it."""
    kept = llm.session.experience.kept()
    if not kept["lessons"]:
        raise options.UsageMistake(
            "nothing is known of this pair with this budget on this processor: decode a text with "
            "`specdec run` first, or measure a pair that nobody knows with --fresh"
        )
    return kept


def _take_no_notes(llm: Any) -> None:
    """What rounds of the fixed tree teach goes nowhere."""
    plan = llm.plan
    llm.session.experience = experience_of(plan.pass_cost, plan.draft_cost, plan.n_draft_tokens)


def _check_draft(llm: Any) -> None:
    if llm.draft is None:
        raise options.UsageMistake(
            "the plan leaves the draft out, as not worth its memory: there is nothing to measure; "
            "give another --memory-budget"
        )


def _check_room(prompts: Sequence[Any], ids: Sequence[Sequence[int]], ctx_size: int) -> None:
    for prompt, one in zip(prompts, ids, strict=True):
        if len(one) + most_tokens(N_ROUNDS) > ctx_size:
            raise options.UsageMistake(
                f"{prompt.name} has {len(one)} tokens, and {N_ROUNDS} rounds may bring "
                f"{most_tokens(N_ROUNDS)}: more than the context of {ctx_size}; give a larger -c"
            )


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str, typer.Option("-md", "--draft-model")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")] = "auto",
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.NPrompts = 16,
    is_fresh: Annotated[
        bool, typer.Option("--fresh", help="As if nothing was known of the pair.")
    ] = False,
    n_fixed: Annotated[int, typer.Option("--num-draft-tokens", min=1, help="Of the tree.")] = 64,
    depth: Annotated[int, typer.Option("--draft-depth", min=1, help="Of the tree.")] = 16,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 1024,
    output_file: options.OutputFile = None,
) -> None:
    """Tokens of the first rounds, beside those of a fixed tree in the same places."""
    from bench.process.provenance import collect
    from bench.process.results import write_json

    options.check_writable("--output-file", output_file)
    load = {
        "model": model,
        "draft_model": draft_model,
        "memory_budget": memory_budget,
        "ctx_size": ctx_size,
    }
    fixed = SpecConfig(num_draft_tokens=n_fixed, draft_depth=depth)
    result = {
        "pair": "fresh" if is_fresh else "known",
        "fixed_tree": f"{n_fixed}x{depth}",
        **measure(load, prompts, n_prompts, fixed, is_fresh),
        "provenance": collect(["bench.decode.first_rounds", *sys.argv[1:]]),
    }
    if output_file is not None:
        write_json(result, output_file)
    typer.echo(text_of([table_of(result)]))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.decode.first_rounds", sys.argv[1:]))
