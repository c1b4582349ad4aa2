"""Training of a model that is distilled from the embedded target: one command for each `Recipe`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from bench.train.card import corpus_section, hardware, sample_outputs, training_of
from bench.train.data import WindowSampler, validation_batches
from bench.train.model import next_token_loss, save_checkpoint
from bench.train.train import EARLY_CARD, PairData, prepare_data
from bench.train.trainer import Trainer, TrainOptions, TrainState, larger

log = logging.getLogger(__name__)

PAIR = Path(__file__).parents[2] / "specdec" / "pair"
_VALID_ROWS, _VALID_LENGTH, _N_VALID = 4, 256, 24


@dataclass(frozen=True)
class DistillationInputs:
    """The embedded pair in float32, without gradients, and the corpus."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    data: PairData

    @property
    def valid_batches(self) -> list[torch.Tensor]:
        """Held-out ids [4, 257] each."""
        return list(validation_batches(self.data.valid, _VALID_ROWS, _VALID_LENGTH))[:_N_VALID]


@dataclass(frozen=True)
class Recipe:
    """A model to distil from the embedded target.

    name: of the module bench.train.NAME, of the checkpoints in `--scratch`.
    build: makes the model in float32 from the target and a seed.
    loss: of the target, the model and ids [batch_size, length + 1].
    measure: names and values of the results on held-out text.
    title, about: of the model card.
    facts: further rows of the card's table.
    main: the part of the model that is saved as a checkpoint of transformers.
    head: tensors beside that, by name.
    """

    name: str
    title: str
    about: str
    options: TrainOptions
    build: Callable[[LlamaForCausalLM, int], nn.Module]
    loss: Callable[[LlamaForCausalLM, Any, torch.Tensor], torch.Tensor]
    measure: Callable[[DistillationInputs, Any], dict[str, float]]
    facts: Callable[[Any], dict[str, str]] = lambda model: {}
    main: Callable[[Any], PreTrainedModel] = lambda model: model
    head: Callable[[Any], Mapping[str, torch.Tensor] | None] = lambda model: None
    threads: int = 2


def run_recipe(recipe: Recipe) -> None:
    """Run the command that trains the recipe's model."""

    def main(
        out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the checkpoint.")],
        corpus: Annotated[
            list[Path] | None, typer.Option(help="Folder of installed packages; may be repeated.")
        ] = None,
        minutes: Annotated[float, typer.Option(help="Training time.")] = recipe.options.minutes,
        cap_mb: Annotated[float, typer.Option(help="Maximum text from one package, MB.")] = 1.5,
        seed: int = 1,
        threads: int = recipe.threads,
        device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to train.")] = "cpu",
        batch_factor: Annotated[
            int, typer.Option(min=1, help="Windows a batch, in multiples of a CPU's.")
        ] = 1,
        pair: Annotated[Path, typer.Option(help="Folder of the target and its draft.")] = PAIR,
        scratch: Annotated[Path, typer.Option(help="Checkpoints and caches.")] = Path(
            f"{recipe.name}-scratch"
        ),
    ) -> None:
        torch.set_num_threads(threads)
        inputs = load_inputs(pair, scratch, corpus or [], int(cap_mb * 1e6), seed)
        phases = larger(recipe.options.phases, batch_factor)
        options = replace(recipe.options, minutes=minutes, phases=phases)
        command = (
            f"python -m bench.train.{recipe.name} --minutes {minutes:g} --seed {seed} "
            f"--device {device} --batch-factor {batch_factor}"
        )
        distil(recipe, inputs, options, seed, device, scratch, out, command)

    main.__doc__ = f"Distil the embedded target: {recipe.title}."
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    typer.run(main)


def load_inputs(
    pair: Path, scratch: Path, corpus: list[Path], cap_bytes: int, seed: int
) -> DistillationInputs:
    """Load the pair and the corpus; `scratch` is created and keeps the tokenised corpus."""
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    data = prepare_data(scratch, corpus, cap_bytes, 0, seed, tokenizer)
    target, draft = (
        LlamaForCausalLM.from_pretrained(pair / role, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
        for role in ("target", "draft")
    )
    return DistillationInputs(target, draft, data)


def distil(
    recipe: Recipe,
    inputs: DistillationInputs,
    options: TrainOptions,
    seed: int,
    device: str,
    scratch: Path,
    out: Path,
    command: str,
) -> None:
    """Train the recipe's model, and write it with its model card, which names `command`."""
    target, data = inputs.target, inputs.data
    model = recipe.build(target, seed).to(device)
    target.to(device)
    inputs.draft.to(device)

    def save_early_checkpoint(state: TrainState) -> None:
        main = recipe.main(model)
        save_checkpoint(main, data.tokenizer, scratch / "early", EARLY_CARD, recipe.head(model))

    trainer = Trainer(
        recipe.name,
        model,
        lambda ids: recipe.loss(target, model, ids),
        WindowSampler(data.train, seed),
        options,
        scratch,
        save_early_checkpoint,
    )
    state = trainer.run()
    model.eval()
    quality = recipe.measure(inputs, model)
    log.info("%s", quality)
    main = recipe.main(model)
    samples = sample_outputs(main, data.tokenizer)
    card = distilled_card(recipe, model, quality, state, command, data.corpus, samples)
    save_checkpoint(main, data.tokenizer, out, card, recipe.head(model))
    log.info("wrote %s", out)


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: list[torch.Tensor]) -> float:
    """Return the loss in nats per token over held-out batches."""
    return sum(next_token_loss(model, ids).item() for ids in batches) / max(1, len(batches))


def distilled_card(
    recipe: Recipe,
    model: nn.Module,
    quality: Mapping[str, float],
    state: TrainState,
    command: str,
    corpus: dict[str, Any],
    samples: list[str],
) -> str:
    """Return the model card; `corpus` is `train.summarise`'s."""
    parameters = list(model.parameters())
    rows = {
        "weights": f"{sum(p.numel() for p in parameters):,}, bf16",
        **recipe.facts(model),
        "training": training_of(state),
        **{name.replace("_", " "): f"{value:.3f}" for name, value in quality.items()},
        "hardware": hardware(parameters[0].device),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    shown = "\n".join(f"```python\n{text}\n```\n" for text in samples)
    return f"""---
license: mit
library_name: transformers
---

# {recipe.title}

{recipe.about}
Distilled from the embedded target, whose tokenizer it has. For tests and benchmarks; it does not
solve problems. All results below are on held-out files.

| | |
|---|---|
{table}

Made by `{command}`. Learning rates follow the clock, so another machine gives other weights.

The weights are released under the project's licence; the corpus and its licences are listed below.

## What it writes (greedy)

{shown}
{corpus_section(corpus)}"""
