"""Seconds of a tree's nodes in a recurrent layer, beside the layer's products.

    python -m bench.checks.recurrent_nodes -m DIRECTORY --nodes 1,8,32,64

Takes the first recurrent layer of a config.json, with random weights in memory; without a directory
a Gated DeltaNet layer of the shape of Qwen3.5-27B. Chains, and trees with two children a node; a
pass first applies an accepted path as long as the tree is deep. Prints a table, then one JSON line
with provenance.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.process.provenance import collect
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    import torch
    from transformers.configuration_utils import PreTrainedConfig

    from backends.recurrent.shapes import PlaceShape

QWEN_27B = {
    "vocab_size": 512,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_COPIES = 2
"""Copies of a layer's weights that products use in turn: more than the caches hold."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class NoRecurrentLayer(SpecdecError):
    """The model has no layer to measure."""


@app.command()
def main(
    model: Annotated[str | None, typer.Option("-m", "--model")] = None,
    nodes: Annotated[str, typer.Option("--nodes", help="Numbers of nodes.")] = "1,8,32,64",
    n_turns: Annotated[int, typer.Option("--turns", help="Runs, whose median counts.")] = 5,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
) -> None:
    """Measure the nodes of a recurrent layer beside its products."""
    import torch

    from backends.hf.threads import use_threads

    use_threads(threads)
    sizes = [int(number) for number in nodes.split(",")]
    with torch.inference_mode():
        result = measure(_config(model), sizes, n_turns)
    typer.echo(text_of([table_of(result)]))
    typer.echo(json.dumps({**result, "model": model, **collect(sys.argv)}))


def measure(config: PreTrainedConfig, sizes: Sequence[int], n_turns: int) -> dict[str, Any]:
    """Return the layer's name and shapes, and the seconds for each number of nodes."""
    import torch

    from backends.checkpoint.skeleton import build_model, decoder_layers
    from backends.recurrent.shapes import recurrences_of
    from backends.recurrent.timing import binary_tree

    model = build_model(config, torch.bfloat16)
    _, layers = decoder_layers(model)
    recurrences = recurrences_of(model, layers)
    if not recurrences:
        raise NoRecurrentLayer(f"{config.model_type} has no recurrent layers: name another model")
    layer = min(recurrences)[0]
    shapes = [shape for (index, _), shape in recurrences.items() if index == layer]
    matrices = [tuple(p.shape) for p in layers[layer].parameters() if p.ndim == 2]
    rows = []
    for n in sizes:
        chain, tree = list(range(-1, n - 1)), binary_tree(n)
        runs = {
            "products": _products(matrices, n),
            "chain": _pass(shapes, chain, n.bit_length()),
            "tree": _pass(shapes, tree, n.bit_length()),
        }
        rows.append({"n_nodes": n, **_medians(runs, n_turns)})
    return {
        "family": config.model_type,
        "kinds": [type(shape.recurrence).__name__ for shape in shapes],
        "states": [list(shape.state.shape) for shape in shapes],
        "weight_bytes": sum(2 * out * n_in for out, n_in in matrices),
        "threads": torch.get_num_threads(),
        "seconds": rows,
    }


def table_of(result: dict[str, Any]) -> Table:
    """Return milliseconds, and the seconds of nodes as a share of those of the products."""
    columns = ("nodes", "products ms", "chain ms", "share", "tree ms", "share", "a node ms")
    rows = []
    for row in result["seconds"]:
        n, products = row["n_nodes"], row["products"]
        chain, tree = row["chain"], row["tree"]
        values = (products * 1e3, chain * 1e3, chain / products, tree * 1e3, tree / products)
        rows.append((str(n), *(f"{value:.3f}" for value in values), f"{tree / n * 1e3:.4f}"))
    kinds = ", ".join(
        f"{kind} {shape}" for kind, shape in zip(result["kinds"], result["states"], strict=True)
    )
    about = (f"one layer of {result['family']}: {kinds}; {result['threads']} threads",)
    return Table("nodes", columns, tuple(rows), about)


def _config(directory: str | None) -> PreTrainedConfig:
    from transformers import Qwen3_5TextConfig

    from backends.checkpoint.config import load_config

    return Qwen3_5TextConfig(**QWEN_27B) if directory is None else load_config(Path(directory))


def _products(matrices: Sequence[tuple[int, ...]], n_tokens: int) -> Callable[[], object]:
    """Return a function that multiplies rows with all matrices of a layer."""
    import torch

    from backends.feedforward.linear import linear_of

    linear = linear_of(torch.bfloat16)
    turns = itertools.cycle([_weights(matrices) for _ in range(_COPIES)])
    inputs = {n_in: torch.ones(n_tokens, n_in, dtype=torch.bfloat16) for _, n_in in matrices}

    def run() -> None:
        for weight in next(turns):
            linear(inputs[weight.shape[1]], weight, None)

    return run


def _weights(matrices: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    import torch

    return [torch.ones(shape, dtype=torch.bfloat16) for shape in matrices]


def _pass(
    shapes: Sequence[PlaceShape], parents: Sequence[int], n_accepted: int
) -> Callable[[], object]:
    from backends.recurrent.timing import pass_of_tree

    runs = [pass_of_tree(shape, parents, n_accepted) for shape in shapes]

    def run() -> None:
        for compute in runs:
            compute()

    return run


def _medians(runs: dict[str, Callable[[], object]], n_turns: int) -> dict[str, float]:
    """Return the median seconds of each, after a warm-up, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + n_turns):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.recurrent_nodes", sys.argv[1:]))
