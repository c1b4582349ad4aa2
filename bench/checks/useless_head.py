"""Cost of a useless draft head: tokens per second beside a run without it, in alternation.

    python -m bench.checks.useless_head -m pair:target
    python -m bench.checks.useless_head -m GROWN --memory-budget 3.5GiB --n-prompts 16 -n 64

The head is an MTP head of the target's sizes with random weights. It is compared with n-grams
alone, and, with the head as the only source, with plain decoding, each time without saved
statistics; and with n-grams alone once more, with the statistics of a load before. Prints a table,
then one JSON line with provenance; the exit code is 2 if the median loss of a comparison is above
--limit, or if a text differs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import typer

from bench.process.provenance import collect
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.cli.errors import run_app


class Comparison(str, Enum):
    NGRAMS = "n-grams"
    PLAIN = "plain"
    SECOND_LOAD = "n-grams, second load"


_COMPARED = {
    Comparison.NGRAMS: ("ngram", None, 1),
    Comparison.PLAIN: ("none", "draft", 1),
    Comparison.SECOND_LOAD: ("ngram", None, 2),
}
"""spec_type without the head and with it (None: the default, by which the head may be left out);
loads with the head, of which the last one counts."""
_STD = 0.02

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class CostlyHead(SpecdecError):
    """A useless head costs more than it may, or changes a text."""


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model", help="A checkpoint.")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")] = "auto",
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt`.")] = BUILT_IN,
    n_prompts: Annotated[int, typer.Option("--n-prompts", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=2)] = 256,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Loads of each kind.")] = 5,
    limit: Annotated[float, typer.Option("--limit", help="Largest allowed loss.")] = 0.05,
    against: Annotated[
        list[Comparison] | None, typer.Option("--against", help="A comparison (default: all).")
    ] = None,
) -> None:
    """Measure what a head with random weights costs."""
    contexts = [prompt.text for prompt in read_prompts(prompts, n_prompts)]
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True, "seed": 1}
    result = {}
    with TemporaryDirectory() as folder:
        head = save_random_head(model, Path(folder))
        for comparison in against or Comparison:
            name = comparison.value
            without, with_head, n_loads = _COMPARED[comparison]
            runs = []
            for _ in range(rounds):
                load = {"model": model, "memory_budget": memory_budget}
                alone = run({**load, "spec_type": without}, contexts, sampling)
                print(f"{name}: {alone['tokens_per_second']:.2f} tokens/s", file=sys.stderr)
                beside = {**load, "draft_model": head, "spec_type": with_head}
                runs.append((alone, run(beside, contexts, sampling, n_loads)))
                speed = runs[-1][1]["tokens_per_second"]
                print(f"{name}, with the head: {speed:.2f} tokens/s", file=sys.stderr)
            result[name] = summary(runs)
    typer.echo(text_of([table_of(result)]))
    load = {"model": model, "memory_budget": memory_budget}
    typer.echo(json.dumps({**result, "load": load, "sampling": sampling, **collect(sys.argv)}))
    for name, item in result.items():
        if item["n_different"]:
            raise CostlyHead(f"{item['n_different']} texts differ from those without the head")
        if item["loss"] > limit:
            raise CostlyHead(
                f"a useless head costs {item['loss']:.1%} against {name}, more than {limit:.1%}; "
                "measure again on an idle machine"
            )


def save_random_head(model: str, folder: Path) -> Path:
    """Write an MTP head of a target with random weights; return its folder."""
    import torch

    from specdec.models.names import resolve_model
    from specdec.models.opened import read_vocabulary
    from specdec.training.mtp import MtpDraft

    draft = MtpDraft(resolve_model(model), len(read_vocabulary(model).tokens))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.module.parameters():
            parameter.normal_(0.0, _STD, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)  # a norm
    draft.save(folder)
    return folder


def run(
    load: dict[str, Any], prompts: list[str], sampling: dict[str, Any], n_loads: int = 1
) -> dict[str, Any]:
    """Return tokens per second, runs of the head and token ids of the last of `n_loads` loads."""
    import specdec

    with forgetting_statistics():
        for _ in range(n_loads):
            with specdec.load(**load) as llm:
                llm.generate(prompts[0], max_tokens=2, cache_prompt=False)  # warms up
                results = [llm.generate(x, cache_prompt=False, **sampling) for x in prompts]
    stats = [result.stats for result in results]
    n_tokens = sum(item.generated_tokens - 1 for item in stats)
    return {
        "tokens_per_second": n_tokens / sum(item.decode_seconds for item in stats),
        "passes": sum(item.passes for item in stats),
        "head_runs": sum(item.draft_runs for item in stats),
        "token_ids": [list(result.token_ids) for result in results],
    }


@contextmanager
def forgetting_statistics() -> Iterator[None]:
    """Keep acceptance statistics of loads in a folder of their own, and forget them then."""
    cached = "specdec.planning.saved_statistics.cache_folder"
    with TemporaryDirectory() as folder, patch(cached, lambda: Path(folder)):
        yield


def summary(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Return the median loss of the pairs of runs (without, with the head)."""
    losses = [1 - new["tokens_per_second"] / old["tokens_per_second"] for old, new in runs]
    different = [
        a != b for old, new in runs for a, b in zip(old["token_ids"], new["token_ids"], strict=True)
    ]
    return {
        "loss": statistics.median(losses),
        "losses": losses,
        "tokens_per_second": [[item["tokens_per_second"] for item in pair] for pair in runs],
        "passes": [new["passes"] for _, new in runs],
        "head_runs": [new["head_runs"] for _, new in runs],
        "n_different": sum(different),
    }


def table_of(result: dict[str, Any]) -> Table:
    rows = []
    for name, item in result.items():
        speeds = zip(*item["tokens_per_second"], strict=True)
        without, with_head = (f"{statistics.median(values):.2f}" for values in speeds)
        runs = f"{statistics.median(item['head_runs']):.0f}"
        rows.append((name, without, with_head, f"{item['loss']:.1%}", runs))
    columns = ("against", "tokens/s without", "with the head", "loss (median)", "runs of the head")
    return Table("a useless head", columns, tuple(rows))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.useless_head", sys.argv[1:]))
