"""Agreement of drafts with a target on the target's own output, without any timing.

    python -m bench.checks.draft_agreement -m pair:target -md pair:draft -md my-draft --prompts FILE

The target writes after each prompt; each draft reads prompt and output. Its chains are those of
greedy drafting: a pass yields the draft tokens up to the first that is not the target's, and the
target's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import AutoModelForCausalLM

import specdec
from bench.prompts.workloads import BUILT_IN, read_prompts
from specdec.models.names import resolve_model


class Output(NamedTuple):
    """A prompt and what the target wrote after it."""

    prompt_ids: list[int]
    token_ids: list[int]


def target_outputs(
    target: str, prompts: list[str], max_tokens: int, temperature: float, memory_budget: str
) -> list[Output]:
    """Return the target's outputs by plain decoding."""
    options: dict[str, Any] = {"ignore_eos": True, "temperature": temperature, "seed": 1}
    with specdec.load(target, spec_type="none", memory_budget=memory_budget) as llm:
        results = [llm.generate(prompt, max_tokens=max_tokens, **options) for prompt in prompts]
    return [Output(list(r.prompt_token_ids), list(r.token_ids)) for r in results]


def chain_passes(agrees: list[bool], n_drafted: int) -> int:
    """Return the passes for tokens where a draft agrees or not, with chains of `n_drafted`."""
    done = passes = 0
    while done < len(agrees):
        n_accepted = 0
        for is_equal in agrees[done : done + n_drafted]:
            if not is_equal:
                break
            n_accepted += 1
        done += n_accepted + 1
        passes += 1
    return passes


@torch.no_grad()
def measure(draft: str, outputs: list[Output], n_drafted: int) -> dict[str, float]:
    """Return agreement and tokens per pass of a draft, means over the outputs."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model(draft), dtype=torch.float32).eval()
    shares, tokens = [], []
    for output in outputs:
        ids = torch.tensor([output.prompt_ids + output.token_ids])
        drafted = model(ids).logits[0, len(output.prompt_ids) - 1 : -1].argmax(-1)
        agrees = (drafted == torch.tensor(output.token_ids)).tolist()
        shares.append(sum(agrees) / len(agrees))
        tokens.append(len(agrees) / chain_passes(agrees, n_drafted))
    return {
        "agreement": sum(shares) / len(shares),
        "tokens_per_pass": sum(tokens) / len(tokens),
    }


def main(
    model: Annotated[str, typer.Option("-m", "--model", help="Target.")],
    draft_model: Annotated[list[str], typer.Option("-md", "--draft-model", help="Draft models.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt`.")] = BUILT_IN,
    n_prompts: Annotated[int, typer.Option(min=1)] = 16,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=1)] = 64,
    n_drafted: Annotated[int, typer.Option(min=1, help="Draft tokens of a chain.")] = 8,
    memory_budget: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Print a JSON object for each temperature and draft."""
    contexts = [prompt.text for prompt in read_prompts(prompts, n_prompts)]
    for temperature in (0.0, 0.7):
        outputs = target_outputs(model, contexts, max_tokens, temperature, memory_budget)
        for draft in draft_model:
            result = {"draft": draft, "temperature": temperature}
            typer.echo(json.dumps({**result, **measure(draft, outputs, n_drafted)}))


if __name__ == "__main__":
    typer.run(main)
