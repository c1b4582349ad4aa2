"""Check that a streamed model's logits are bit for bit those of the same model in memory.

    python -m bench.checks.identity MODEL --memory-budget 3.5GiB

Runs the same passes twice (a prompt, a tree, a token after a commit and after a rollback): first
streamed within the budget, then with the whole model in memory in the layout of its file (which
takes as much memory as the model). Prints the passes and exits with 1 if a bit differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from backends.contract.backend import PREFIX, Backend
from offload.errors import SpecdecError
from specdec.cli.errors import run_app

PROMPT = "def fibonacci(n):\n    "
N_NODES = 8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class NotStreamed(SpecdecError):
    """Nothing streams, so that the comparison would be of a model with itself."""


def passes(target: Backend, prompt_ids: list[int]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (name, logits) of passes over a prompt, a tree, and after a commit and a rollback."""
    kv = target.new_sequence()
    yield f"prompt of {len(prompt_ids)} tokens", kv.prefill(prompt_ids)
    chain = [(7 * i + 11) % target.vocab_size for i in range(N_NODES)]
    first = kv.next_node_id
    tree = [PREFIX, *(first + i // 2 for i in range(N_NODES - 1))]
    ids, logits = kv.extend(chain, tree)
    yield f"tree of {N_NODES} nodes", logits
    kv.commit([ids[0], ids[1]])
    yield "one node after a commit", kv.extend([5], [PREFIX])[1]
    kv.rollback(len(prompt_ids))
    yield "one node after a rollback", kv.extend([5], [PREFIX])[1]


def record(load: dict[str, Any], *, streamed: bool) -> list[tuple[str, NDArray[np.float32]]]:
    """Return the passes of one loaded model."""
    import specdec

    with specdec.load(spec_type="ngram", num_draft_tokens=N_NODES, **load) as llm:
        if streamed and not llm.plan.placement.n_moving_layers:
            raise NotStreamed("the whole model fits in this budget: give a smaller one")
        return list(passes(llm.target, llm.tokenizer.encode(PROMPT)))


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="Model, as for `specdec run -m`.")],
    memory_budget: Annotated[str, typer.Option("--memory-budget", help="Of the streamed run.")],
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 512,
) -> None:
    """Compare the logits of a streamed model with those of the model in memory."""
    load = {"model": model, "ctx_size": ctx_size}
    streamed = record({**load, "memory_budget": memory_budget}, streamed=True)
    resident = record(load, streamed=False)
    n_different = 0
    for (name, ours), (_, theirs) in zip(streamed, resident, strict=True):
        is_equal = ours.tobytes() == theirs.tobytes()
        n_different += not is_equal
        typer.echo(
            f"{name}: {ours.size} logits, {'equal bit for bit' if is_equal else 'DIFFERENT'}"
        )
    raise typer.Exit(int(n_different > 0))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.identity", sys.argv[1:]))
