"""Time to the first token of a chat's second turn, beside that of its new tokens alone.

    python -m bench.checks.second_turn -m MODEL --memory-budget 5GiB

Each measurement begins with an empty prefix cache. The first turn has a prompt of --prompt-tokens
and an answer; the second adds a message of --new-tokens. Its first token is compared with that of a
prompt of as many tokens as are new in it, and with that of the whole prompt. Prints a table, then
one JSON line with provenance; the exit code is 2 if the first ratio is above --limit, or if many
more tokens were computed than are new.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.process.provenance import collect
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

_WORDS = "Read this with care, for the question comes later. "
_KINDS = {"turn": "second turn", "alone": "its new tokens alone", "whole": "its whole prompt"}

_MORE_TOKENS = 32
"""Tokens besides the new ones that a second turn may compute: the answer's last one, and those that
a template writes otherwise in a history than before an answer."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class SlowTurn(SpecdecError):
    """A second turn takes longer than its new tokens."""


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    memory_budget: Annotated[str | None, typer.Option("--memory-budget")] = None,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 2048,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens")] = 768,
    new_tokens: Annotated[int, typer.Option("--new-tokens")] = 64,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Of the answer.")] = 32,
    n_turns: Annotated[int, typer.Option("--turns", help="Runs, whose median counts.")] = 3,
    limit: Annotated[float, typer.Option("--limit", help="Largest allowed ratio.")] = 1.2,
) -> None:
    """Measure the first token of a second turn."""
    import specdec

    load: dict[str, Any] = {"model": model, "draft_model": draft_model, "ctx_size": ctx_size}
    load |= {"memory_budget": memory_budget} if memory_budget else {}
    load |= {} if draft_model else {"spec_type": "none"}
    with specdec.load(**load) as llm:
        runs = [measure(llm, prompt_tokens, new_tokens, max_tokens) for _ in range(1 + n_turns)]
    result = summary(runs[1:])  # the first one warms up
    typer.echo(text_of([table_of(result)]))
    typer.echo(json.dumps({**result, "load": load, **collect(sys.argv)}))
    if result["computed_tokens"] > result["new_tokens"] + _MORE_TOKENS:
        raise SlowTurn(
            f"the second turn computed {result['computed_tokens']} tokens, of which "
            f"{result['new_tokens']} are new: its prefix was not reused as it should be"
        )
    if result["ratio"] > limit:
        raise SlowTurn(
            f"the second turn's first token takes {result['ratio']:.2f} x that of its new tokens "
            f"alone, more than {limit:g}: its prefix was not reused as it should be, or another "
            "program is running; measure again on an idle machine"
        )


def measure(llm: LLM, prompt_tokens: int, new_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Return the seconds to the first token of each kind, and the tokens that were computed."""
    llm.session.forget_prompt()
    messages = [{"role": "user", "content": _text(llm, prompt_tokens)}]
    first = llm.generate(messages, max_tokens=max_tokens, ignore_eos=True)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": _text(llm, new_tokens)},
    ]
    turn = llm.generate(messages, max_tokens=1).stats
    n_computed = turn.prompt_tokens - turn.reused_prompt_tokens
    ids = list(llm.tokenizer.encode_chat(messages))
    n_new = len(ids) - first.stats.prompt_tokens - first.stats.generated_tokens
    prompts = {"alone": ids[-n_new:], "whole": ids}
    seconds = {
        kind: llm.generate(prompt, max_tokens=1, cache_prompt=False).stats.time_to_first_token
        for kind, prompt in prompts.items()
    }
    return {
        "seconds": {"turn": turn.time_to_first_token, **seconds},
        "prompt_tokens": turn.prompt_tokens,
        "new_tokens": n_new,
        "computed_tokens": n_computed,
        "state_bytes": turn.state_bytes,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians, the ratio to the new tokens alone, and the runs."""
    seconds = {kind: statistics.median(run["seconds"][kind] for run in runs) for kind in _KINDS}
    names = ("prompt_tokens", "new_tokens", "computed_tokens", "state_bytes")
    counts = {name: runs[-1][name] for name in names}
    return {**counts, "seconds": seconds, "ratio": seconds["turn"] / seconds["alone"], "runs": runs}


def table_of(result: dict[str, Any]) -> Table:
    n_tokens = {
        "turn": result["computed_tokens"],
        "alone": result["new_tokens"],
        "whole": result["prompt_tokens"],
    }
    alone = result["seconds"]["alone"]
    rows = tuple(
        (name, str(n_tokens[kind]), f"{result['seconds'][kind]:.3f}",
         f"{result['seconds'][kind] / alone:.2f}")
        for kind, name in _KINDS.items()
    )  # fmt: skip
    return Table("prompt", ("prompt", "tokens computed", "first token s", "ratio"), rows)


def _text(llm: LLM, n_tokens: int) -> str:
    """Return a text of about so many tokens."""
    n_words = len(llm.tokenizer.encode(_WORDS * 8)) / 8
    return _WORDS * max(1, round(n_tokens / n_words))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.second_turn", sys.argv[1:]))
