"""What the first rounds of a text bring, beside a tree of a fixed size in the same places.

    XDG_CACHE_HOME=$(mktemp -d) python -m bench.decode.first_rounds -m MODEL -md DRAFT \
        --memory-budget 3.5GiB --prompts human_eval.jsonl

With an empty cache the pair is one that nobody knows, and each text is the next that it learns
from; the same command again, with that cache, shows a pair that is known. The fixed tree, of the
draft alone, is asked only after all texts: so they learn nothing from it.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from bench import options
from bench.prompts.workloads import BUILT_IN, read_prompts
from specdec.cli.errors import run_app
from specdec.config import SpecConfig
from specdec.decoding.stats import ratio

N_ROUNDS = 4
_DEEPEST = 64
"""Levels of a tree, and more than any has: rounds are not to be cut short by the end."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def rounds_of(llm: Any, prompt_ids: list[int], n_rounds: int, spec: SpecConfig) -> list[list[int]]:
    """Tokens of the prompt's pass, which are one, and of each of so many rounds behind it."""
    found: list[list[int]] = []
    most = n_rounds * (_DEEPEST + 1) + 1
    stream = llm.stream(prompt_ids, max_tokens=most, spec=spec, ignore_eos=True)
    for chunk in stream:
        found.append(list(chunk.token_ids))
        if len(found) > n_rounds:
            stream.cancel()
    return found[: n_rounds + 1]


def places(prompt_ids: list[int], rounds: list[list[int]]) -> list[list[int]]:
    """What each round behind the prompt's pass began with, but for its last token, which a prompt's
    pass gives once more."""
    found, context = [], [*prompt_ids]
    for tokens in rounds[:-1]:
        context += tokens
        found.append(context[:-1])
    return found


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str, typer.Option("-md", "--draft-model")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")] = "auto",
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.NPrompts = 16,
    n_fixed: Annotated[int, typer.Option("--num-draft-tokens", min=1, help="Of the tree.")] = 64,
    depth: Annotated[int, typer.Option("--draft-depth", min=1, help="Of the tree.")] = 16,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 1024,
) -> None:
    """Tokens of the first rounds, beside those of a fixed tree in the same places."""
    import specdec

    with specdec.load(
        model,
        draft_model,
        memory_budget=memory_budget,
        ctx_size=ctx_size,
        num_draft_tokens=n_fixed,
    ) as llm:
        fixed = SpecConfig(num_draft_tokens=n_fixed, draft_depth=depth, spec_type=("draft",))
        texts = [llm.tokenizer.encode(one.text) for one in read_prompts(prompts, n_prompts)]
        chosen = [rounds_of(llm, ids, N_ROUNDS, SpecConfig()) for ids in texts]
        asked = [
            [rounds_of(llm, place, 1, fixed)[1] for place in places(ids, rounds)]
            for ids, rounds in zip(texts, chosen, strict=True)
        ]
    n_chosen = [[len(tokens) for tokens in rounds[1:]] for rounds in chosen]
    n_asked = [[len(tokens) for tokens in rounds] for rounds in asked]
    result = {
        "chosen": n_chosen,
        "fixed": n_asked,
        "share": ratio(sum(map(sum, n_chosen)), sum(map(sum, n_asked))),
    }
    typer.echo(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.decode.first_rounds", sys.argv[1:]))
