"""What tokens of a mixture are routed to, and what that makes of drafting and of caches.

    python -m bench.experts.routing -m pair:moe -md pair:draft --prompts FILE

The model is in memory, and computed by transformers. Experts are counted for a layer, in multiples
of those that one token takes, and in positions of text that the model itself has continued.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from backends.feedforward.routing import is_router
from bench import options
from bench.process.results import write_json
from bench.prompts.workloads import BUILT_IN, read_prompts, spread
from offload.experts.eviction import Visit, belady, least_recently_used, replay
from specdec.cli.errors import run_app
from specdec.models.names import resolve_model

N_ROWS = (1, 2, 4, 8, 16, 32)
CACHE_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5)
_POSITIONS_OF_SIBLINGS = 5
"""Of each text: every one is a pass of as many whole texts as there are siblings."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Routes = NDArray[np.int64]
"""[layers, tokens, experts of a token]"""


@contextmanager
def routers(model: PreTrainedModel) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, Any]]]:
    """(input [n, hidden], choices [n, k], the router) of every layer, of the passes inside."""
    found: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def note(module: Any, args: tuple[torch.Tensor, ...], output: tuple[Any, ...]) -> None:
        found.append((args[0].reshape(-1, args[0].shape[-1]), output[2], module))

    handles = [m.register_forward_hook(note) for m in model.modules() if is_router(m)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def routes_of(model: PreTrainedModel, ids: torch.Tensor) -> Routes:
    """Of ids [rows, tokens], as one sequence of rows * tokens."""
    with routers(model) as found:
        model(input_ids=ids, use_cache=False)
    return np.stack([choices.numpy() for _, choices, _ in found])


def distinct(routes: Routes) -> float:
    """Different experts of a layer, over those of a token."""
    return float(np.mean([len(np.unique(layer)) for layer in routes])) / routes.shape[2]


def uniform(n_experts: int, n_used: int, n_rows: int) -> float:
    """The same if every row took any experts alike."""
    return n_experts * (1 - (1 - n_used / n_experts) ** n_rows) / n_used


def of_chains(routes: Routes, n_rows: int) -> float:
    """Neighbours in the text."""
    starts = range(0, routes.shape[1] - n_rows + 1, n_rows)
    return float(np.mean([distinct(routes[:, i : i + n_rows]) for i in starts]))


@torch.inference_mode()
def of_siblings(
    model: PreTrainedModel, draft: PreTrainedModel, ids: torch.Tensor, place: int
) -> list[float]:
    """The draft's likeliest tokens after `place` tokens, as many as each of N_ROWS."""
    prefix = ids[:, :place]
    likeliest = draft(input_ids=prefix, use_cache=False).logits[0, -1].topk(max(N_ROWS)).indices
    rows = torch.cat([prefix.expand(len(likeliest), -1), likeliest[:, None]], dim=1)
    routes = routes_of(model, rows).reshape(-1, len(likeliest), place + 1, _n_used(model))
    return [distinct(routes[:, :n, -1]) for n in N_ROWS]


def _n_used(model: PreTrainedModel) -> int:
    return int(model.config.num_experts_per_tok)


@torch.inference_mode()
def shared_and_foreseen(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """Share of a token's experts that the token before it took as well, and of a layer's experts
    that its router names from the input of the layer before."""
    with routers(model) as found:
        model(input_ids=ids, use_cache=False)
    shared = [_overlap(choices[1:], choices[:-1]) for _, choices, _ in found]
    foreseen = [
        _overlap(choices, router(before)[2])
        for (before, _, _), (_, choices, router) in zip(found[:-1], found[1:], strict=True)
    ]
    return {
        "shared_with_the_token_before": float(np.mean(shared)),
        "named_by_the_next_router": float(np.mean(foreseen)),
    }


def _overlap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours[:, :, None] == theirs[:, None, :]).any(2).float().mean())


def visits(routes: Routes) -> list[Visit]:
    """Of plain decoding: every token visits all layers."""
    return [
        (layer, tuple(sorted(map(int, routes[layer, token]))))
        for token in range(routes.shape[1])
        for layer in range(len(routes))
    ]


def cache_rates(trace: list[Visit], n_experts: int) -> dict[str, dict[str, float]]:
    """Hit rates by the share of all experts that a cache holds."""
    rules: dict[str, Callable[[int], float]] = {
        "own rule": lambda n: replay(trace, n),
        "least recently used": lambda n: replay(trace, n, least_recently_used),
        "belady": lambda n: belady(trace, n),
    }
    return {
        f"{share:.0%}": {name: rule(round(share * n_experts)) for name, rule in rules.items()}
        for share in CACHE_SHARES
    }


def measure(
    model: PreTrainedModel, draft: PreTrainedModel, texts: list[torch.Tensor], n_prompts: list[int]
) -> dict[str, Any]:
    """texts: ids [1, tokens], of which the first `n_prompts` are the prompt's."""
    n_experts, n_used = int(model.config.num_experts), _n_used(model)
    routes = [routes_of(model, ids)[:, start:] for ids, start in zip(texts, n_prompts, strict=True)]
    siblings = [
        of_siblings(model, draft, ids, place)
        for ids, start in zip(texts, n_prompts, strict=True)
        for place in np.linspace(start, ids.shape[1] - 1, _POSITIONS_OF_SIBLINGS, dtype=int)
    ]
    near = [shared_and_foreseen(model, ids) for ids in texts]
    trace = [visit for one in routes for visit in visits(one)]
    return {
        "experts": n_experts,
        "experts_of_a_token": n_used,
        "layers": len(routes[0]),
        "tokens": sum(one.shape[1] for one in routes),
        "by_rows": {
            str(n): {
                "chain": float(np.mean([of_chains(one, n) for one in routes])),
                "siblings": float(np.mean([row[i] for row in siblings])),
                "uniform": uniform(n_experts, n_used, n),
            }
            for i, n in enumerate(N_ROWS)
        },
        **{name: float(np.mean([one[name] for one in near])) for name in near[0]},
        "hit_rates": cache_rates(trace, n_experts * len(routes[0])),
    }


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")] = "pair:moe",
    draft_model: Annotated[str, typer.Option("-md", "--draft-model")] = "pair:draft",
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.SpreadPrompts = 8,
    max_tokens: options.MaxTokens = 64,
    output_file: options.OutputFile = None,
) -> None:
    """Routing statistics of a small mixture of experts, as JSON."""
    folder = resolve_model(model)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(resolve_model(draft_model), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts, starts = [], []
    for prompt in spread(read_prompts(prompts), n_prompts):
        ids = tokenizer(prompt.text, return_tensors="pt").input_ids
        text = target.generate(
            ids, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )
        texts.append(text)
        starts.append(ids.shape[1])
    found = measure(target, draft, texts, starts)
    typer.echo(json.dumps(found, indent=1))
    if output_file is not None:
        write_json(found, output_file)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.experts.routing", sys.argv[1:]))
