"""Training of the embedded pair: a small target, and a smaller draft distilled from it.

    python -m bench.train.train -o specdec/pair --corpus .venv/lib/python3.11/site-packages

Runs on two CPU cores in about two hours, or on a GPU (`--device cuda --batch-factor 16`) in some
minutes; an interrupted run goes on from `--scratch`, where
`early/target` and `early/draft` are checkpoints to develop against while training runs. Needs
torch 2.9 or newer, for its Muon optimizer. Then `python -m tests.helpers.pair_gguf` writes the
pair's GGUF files.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench.train.card import measure_pair, pair_card, sample_outputs
from bench.train.corpus import Corpus, collect
from bench.train.data import (
    END_OF_TEXT,
    WindowSampler,
    encode,
    mixed_documents,
    train_tokenizer,
)
from bench.train.distil import distillation_loss, generate_stream, project_embedding
from bench.train.model import (
    build_model,
    draft_config,
    next_token_loss,
    save_checkpoint,
    target_config,
)
from bench.train.trainer import LossFunction, Phase, Trainer, TrainOptions, TrainState, larger
from specdec.training.loss import ARGMAX_WEIGHT

log = logging.getLogger(__name__)

EARLY_CARD = "An early checkpoint, written while training runs. For development only.\n"
# Short self-contained functions, in the style of the benchmarks.
FAVOURED = frozenset({"algorithms", "more-itertools"})
TARGET_PHASES = (Phase(0.85, 16, 256), Phase(1.0, 4, 1024))
DRAFT_PHASES = (Phase(0.5, 8, 256), Phase(0.95, 8, 256, generated_rows=4), Phase(1.0, 2, 1024))
RESTART_PHASES = (Phase(1.0, 12, 256, generated_rows=3),)
GENERATION_SHARE = 0.12  # of the draft's time goes into output of the target


@dataclass(frozen=True)
class Restart:
    """Further run of distillation from where the last one ended, with its own rates."""

    share: float  # of the first run's minutes
    muon_lr: float
    adam_lr: float
    cooldown_share: float


# Each restart lowers the draft's loss by as much as the first run left: it has seen too few
# tokens to be near its limit.
RESTARTS = (Restart(1.8, 0.012, 0.002, 0.6), Restart(1.05, 0.008, 0.0015, 0.8))


@dataclass(frozen=True)
class PairData:
    """Tokenizer and token streams of the corpus."""

    tokenizer: Tokenizer
    train: np.ndarray  # [n_tokens], uint16
    valid: np.ndarray  # [n_tokens], uint16
    corpus: dict[str, Any]  # the summary for the model card

    @property
    def separator(self) -> int:
        return self.tokenizer.encode(END_OF_TEXT).ids[0]


def prepare_data(
    scratch: Path,
    roots: list[Path],
    cap_bytes: int,
    vocab_size: int,
    seed: int,
    tokenizer: Tokenizer | None = None,
) -> PairData:
    """Collect and tokenise the corpus, or load it from `scratch`.

    tokenizer: None trains one of `vocab_size` tokens on the corpus.
    """
    summary = scratch / "corpus.json"
    if not summary.exists():
        corpus = collect(roots, cap_bytes, FAVOURED)
        documents = mixed_documents(corpus.train_files, corpus.train_functions, seed)
        log.info("corpus: %d files, %d documents", len(corpus.train_files), len(documents))
        tokenizer = tokenizer or train_tokenizer(documents, vocab_size)
        tokenizer.save(str(scratch / "tokenizer.json"))
        np.save(scratch / "train.npy", encode(tokenizer, documents))
        np.save(scratch / "valid.npy", encode(tokenizer, corpus.valid_files))
        summary.write_text(json.dumps(summarise(corpus), indent=1), encoding="utf-8")
    return PairData(
        Tokenizer.from_file(str(scratch / "tokenizer.json")),
        np.load(scratch / "train.npy"),
        np.load(scratch / "valid.npy"),
        json.loads(summary.read_text(encoding="utf-8")),
    )


def summarise(corpus: Corpus) -> dict[str, Any]:
    """Return the summary of the corpus for the model card."""
    return {
        "sources": [vars(source) for source in corpus.sources],
        "refused": corpus.refused,
        "valid_bytes": sum(len(text.encode()) for text in corpus.valid_files),
        "valid_files": len(corpus.valid_files),
        "train_files": len(corpus.train_files),
        "train_functions": len(corpus.train_functions),
    }


def compiled(loss: LossFunction, device: torch.device) -> LossFunction:
    """Return the loss compiled on a CPU; on a GPU compiling would take as long as training."""
    return torch.compile(loss, dynamic=False) if device.type == "cpu" else loss


def train_target(
    target: LlamaForCausalLM,
    data: PairData,
    minutes: float,
    scratch: Path,
    seed: int,
    batch_factor: int = 1,
) -> TrainState:
    """Train the target on the corpus."""
    loss = compiled(lambda ids: next_token_loss(target, ids), target.device)

    def save_early_checkpoint(state: TrainState) -> None:
        save_checkpoint(target, data.tokenizer, scratch / "early" / "target", EARLY_CARD)

    options = TrainOptions(minutes, larger(TARGET_PHASES, batch_factor))
    sampler = WindowSampler(data.train, seed)
    return Trainer("target", target, loss, sampler, options, scratch, save_early_checkpoint).run()


def train_draft(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    data: PairData,
    minutes: float,
    scratch: Path,
    seed: int,
    batch_factor: int = 1,
) -> TrainState:
    """Distil the draft on the corpus, later also on the target's own output."""
    target.requires_grad_(False)
    project_embedding(target, draft)
    generated = scratch / "generated.npy"
    if not generated.exists():
        stream = generate_stream(
            target, data.train, data.separator, minutes * GENERATION_SHARE, seed, batch_factor
        )
        log.info("the target wrote %d tokens", len(stream))
        np.save(generated, stream)
    loss = compiled(lambda ids: distillation_loss(target, draft, ids, ARGMAX_WEIGHT), target.device)

    def save_early_checkpoint(state: TrainState) -> None:
        save_checkpoint(draft, data.tokenizer, scratch / "early" / "draft", EARLY_CARD)

    def train(name: str, options: TrainOptions, run_seed: int) -> TrainState:
        sampler = WindowSampler(data.train, run_seed)
        own_text = WindowSampler(np.load(generated), run_seed + 1)
        trainer = Trainer(
            name, draft, loss, sampler, options, scratch, save_early_checkpoint, own_text
        )
        return trainer.run()

    first = TrainOptions(minutes * (1 - GENERATION_SHARE), larger(DRAFT_PHASES, batch_factor))
    states = [train("draft", first, seed + 1)]
    for number, restart in enumerate(RESTARTS, start=2):
        options = TrainOptions(
            minutes * restart.share,
            larger(RESTART_PHASES, batch_factor),
            muon_lr=restart.muon_lr,
            adam_lr=restart.adam_lr,
            cooldown_share=restart.cooldown_share,
        )
        states.append(train(f"draft-{number}", options, seed + 10 * number))
    return TrainState(
        step=sum(state.step for state in states),
        tokens=sum(state.tokens for state in states),
        elapsed_s=sum(state.elapsed_s for state in states),
    )


def main(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for target and draft.")],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of installed packages; may be repeated."),
    ] = None,
    target_minutes: Annotated[float, typer.Option(help="Training time of the target.")] = 45,
    draft_minutes: Annotated[
        float, typer.Option(help="First run of distillation; the others follow. 0: no draft.")
    ] = 20,
    vocab_size: Annotated[int, typer.Option(min=512, max=65_535)] = 4096,
    cap_mb: Annotated[float, typer.Option(help="Maximum text from one package, MB.")] = 1.5,
    seed: int = 1,
    threads: int = 2,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to train.")] = "cpu",
    batch_factor: Annotated[
        int, typer.Option(min=1, help="Windows a batch, in multiples of a CPU's.")
    ] = 1,
    scratch: Annotated[Path, typer.Option(help="Checkpoints and caches.")] = Path("pair-scratch"),
) -> None:
    """Train the embedded target, distil its draft, and write both with their model cards."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    scratch.mkdir(parents=True, exist_ok=True)
    data = prepare_data(scratch, corpus or [], int(cap_mb * 1e6), vocab_size, seed)
    log.info("%d training tokens, %d held out", len(data.train), len(data.valid))
    target = build_model(target_config(data.tokenizer), seed).to(device)
    draft = build_model(draft_config(data.tokenizer), seed + 1).to(device)
    states = {"target": train_target(target, data, target_minutes, scratch, seed, batch_factor)}
    if not draft_minutes:
        return
    states["draft"] = train_draft(target, draft, data, draft_minutes, scratch, seed, batch_factor)
    quality = measure_pair(
        target, draft, data.valid, data.corpus["valid_bytes"], data.separator, seed
    )
    log.info("%s", quality)
    samples = sample_outputs(target, data.tokenizer)
    recipe = {
        "target_minutes": target_minutes,
        "draft_minutes": draft_minutes,
        "vocab_size": vocab_size,
        "cap_mb": cap_mb,
        "seed": seed,
        "threads": threads,
        "device": device,
        "batch_factor": batch_factor,
    }
    for role, model in (("target", target), ("draft", draft)):
        card = pair_card(role, model, quality, states, data.corpus, samples, recipe)
        save_checkpoint(model, data.tokenizer, out / role, card)
        log.info("wrote %s", out / role)


if __name__ == "__main__":
    typer.run(main)
