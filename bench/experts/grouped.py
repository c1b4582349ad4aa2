"""Would transformers' grouped product compute a layer's experts faster than one after the other?

    python -m bench.experts.grouped --hidden 2048 --inner 768 --n-experts 128 --n-used 8

It needs the weights of all hit experts in one tensor, so they are copied side by side first. Prints
for each number of rows the experts hit, the bytes copied, and the milliseconds of one layer: as
specdec computes it (groups of rows as they are, where a model's may be filled up to some number),
the copy, and the grouped product after it. The layer is Qwen3's, whatever its sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Any

import torch
import typer
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from backends.feedforward.experts import ONE_BY_ONE, ExpertsRunner
from bench.table import Columns, Table, cells, headings, text_of

_N_TIMES = 7
_COLUMNS: Columns = (
    ("rows", "n_rows", "{:.0f}", 1),
    ("experts", "n_experts", "{:.0f}", 1),
    ("copied MB", "copied_bytes", "{:.0f}", 1e6),
    ("one by one ms", "one_by_one_seconds", "{:.1f}", 1e-3),
    ("copy ms", "copy_seconds", "{:.1f}", 1e-3),
    ("grouped ms", "grouped_seconds", "{:.1f}", 1e-3),
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Weights = list[list[torch.Tensor]]
"""Of each expert gate, up [inner, hidden] and down [hidden, inner], as a checkpoint has them."""


class Layer:
    """The routed experts of one layer with weights of chance, in both ways."""

    def __init__(self, hidden: int, inner: int, n_experts: int, n_used: int) -> None:
        self._sizes, self._n_used = {"hidden_size": hidden, "moe_intermediate_size": inner}, n_used
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        self._weights: Weights = [
            [torch.randn(shape).mul_(0.02).bfloat16() for shape in shapes] for _ in range(n_experts)
        ]
        self._module = self._experts(1, ONE_BY_ONE)
        ExpertsRunner(self._module, self._bring, least_rows=1)

    def figures(self, n_rows: int) -> dict[str, Any]:
        """Best seconds of each way, for rows that are routed by chance."""
        rows = torch.randn(n_rows, self._sizes["hidden_size"]).bfloat16()
        weights, chosen = torch.rand(n_rows, len(self._weights)).topk(self._n_used)
        weights = weights.bfloat16()
        hit, places = chosen.unique(return_inverse=True)
        grouped = self._side_by_side(hit.tolist())
        copied = sum(one.numel() * one.element_size() for one in grouped.parameters())
        return {
            "n_rows": n_rows,
            "n_experts": len(hit),
            "copied_bytes": copied,
            "one_by_one_seconds": _best(lambda: self._module(rows, chosen, weights)),
            "copy_seconds": _best(lambda: self._side_by_side(hit.tolist())),
            "grouped_seconds": _best(lambda: grouped(rows, places, weights)),
        }

    def run(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of both ways, [rows, hidden]; chosen, weights: [rows, experts of a row]."""
        hit, places = chosen.unique(return_inverse=True)
        grouped = self._side_by_side(hit.tolist())
        return self._module(rows, chosen, weights), grouped(rows, places, weights)

    def _experts(self, n: int, implementation: str) -> Qwen3MoeExperts:
        sizes = {**self._sizes, "num_experts": n}
        config = Qwen3MoeConfig(**sizes, experts_implementation=implementation)
        with torch.device("meta"):
            return Qwen3MoeExperts(config).requires_grad_(False)

    def _side_by_side(self, hit: Sequence[int]) -> Qwen3MoeExperts:
        module = self._experts(len(hit), "grouped_mm")
        chosen = [self._weights[expert] for expert in hit]
        gate_up = torch.stack([torch.cat([gate, up]) for gate, up, _ in chosen])
        down = torch.stack([down for _, _, down in chosen])
        module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        module.down_proj = torch.nn.Parameter(down, requires_grad=False)
        return module

    def _bring(
        self, experts: Sequence[int], check: object
    ) -> Generator[tuple[int, list[torch.Tensor]], None, None]:
        for expert in experts:
            yield expert, self._weights[expert]


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_N_TIMES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@app.command()
def main(
    hidden: Annotated[int, typer.Option(min=1)] = 2048,
    inner: Annotated[int, typer.Option(min=1)] = 768,
    n_experts: Annotated[int, typer.Option(min=1)] = 128,
    n_used: Annotated[int, typer.Option(min=1)] = 8,
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas.")] = "1,4,16,64",
) -> None:
    """Time one layer in both ways."""
    torch.manual_seed(0)
    with torch.inference_mode():
        layer = Layer(hidden, inner, n_experts, n_used)
        figures = [layer.figures(int(n)) for n in rows.split(",")]
    table = Table("rows", headings(_COLUMNS), tuple(cells(one, _COLUMNS) for one in figures))
    print(text_of([table]))


if __name__ == "__main__":
    app()
