"""`specdec-bench speedup`: plain streamed decoding against speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.commands.shared import model_and_prompts, show
from bench.options import (
    IgnoreEos,
    Log,
    NPrompts,
    Output,
    OutputFile,
    PeerMemory,
    Prompts,
    UsageMistake,
    check_output,
    check_writable,
    model_names,
    sampling_keywords,
)
from bench.prompts.workloads import BUILT_IN
from specdec.cli import options
from specdec.cli.groups import LOAD, Load, Sampling

SpeedupPeer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        metavar="accelerate|llama.cpp|llama.cpp-draft",
        help="Compare with this program too.",
    ),
]
PeerPrompts = Annotated[int, typer.Option("--peer-prompts", min=1, help="Prompts for the peer.")]
PeerTokens = Annotated[int, typer.Option("--peer-tokens", min=2, help="Tokens per prompt.")]


def speedup_command(
    context: typer.Context,
    load: Load,
    sampling: Sampling,
    prompts: Prompts = BUILT_IN,
    n_prompts: NPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    ignore_eos: IgnoreEos = False,
    peer: SpeedupPeer = None,
    peer_prompts: PeerPrompts = 4,
    peer_tokens: PeerTokens = 8,
    peer_cpu_memory: PeerMemory = None,
    output: Output = "table",
    output_file: OutputFile = None,
    log: Log = None,
) -> None:
    """Plain streamed decoding against speculative decoding of the same target."""
    from bench.decode.speedup import SpeedupRun, run_speedup
    from bench.process.results import SPEEDUP
    from offload.units import parse_bytes

    _check_choices(output, peer, load, enforce, output_file, log)
    keywords, chosen = model_and_prompts(load.keywords(LOAD), prompts, n_prompts)
    run = SpeedupRun(
        load=keywords,
        prompts=chosen,
        sampling=sampling_keywords(max_tokens, ignore_eos, sampling),
        enforce=enforce,
        log=log,
        peer=peer,
        peer_prompts=peer_prompts,
        peer_tokens=peer_tokens,
        peer_cpu_memory=parse_bytes(peer_cpu_memory) if peer_cpu_memory else None,
    )
    result = run_speedup(run, ["specdec-bench", *context.obj.argv])
    show(SPEEDUP, result, output, output_file)


def _check_choices(
    output: str,
    peer: str | None,
    load: Load,
    enforce: bool,
    file: Path | None,
    log: Path | None,
) -> None:
    check_output(output)
    if peer is not None:
        _check_peer(peer, load)
    if load.memory_budget == "auto" and (peer is not None or enforce):
        raise UsageMistake("--peer and --enforce need a --memory-budget with a size, e.g. 3.5GiB")
    check_writable("--output-file", file)
    check_writable("--log", log)


def _check_peer(name: str, load: Load) -> None:
    from bench.peers.registry import PEERS, Weights, why_not

    if name not in PEERS:
        raise UsageMistake(f"--peer {name!r} is not known; choose one of {', '.join(PEERS)}")
    problem = why_not(PEERS[name], Weights.named(*model_names(load)))
    if problem is not None:
        raise UsageMistake(f"--peer {name} cannot run: {problem}")
