"""`specdec-bench peers`: comparison with other programs on the user's machine and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from bench import options
from bench.commands.shared import show
from bench.options import UsageMistake
from bench.peers.registry import GGUF, HF, PEERS, Weights
from bench.process.interpreters import Interpreter, InterpreterError, probe
from bench.prompts.workloads import BUILT_IN, read_prompts, spread
from specdec.cli.groups import LOAD, Load
from specdec.pair import PAIR_PREFIX

ALL_PEERS = ",".join(PEERS)
Peers = Annotated[
    str,
    typer.Option(
        "--peers",
        metavar="NAME,NAME,...",
        help="Programs to run, of " + ", ".join(PEERS) + ".",
        show_default="all",
    ),
]
OtherModel = Annotated[
    str | None,
    typer.Option(
        "--other-model",
        help="The same model in the other format: a GGUF file beside a checkpoint, or the reverse.",
        show_default=False,
    ),
]
OtherDraft = Annotated[
    str | None,
    typer.Option(
        "--other-draft",
        help="The draft in that format.",
        show_default="that of the embedded pair, or mtp, where -md is such",
    ),
]
PeerMemory = Annotated[
    str | None,
    typer.Option(
        "--peer-cpu-memory",
        help="Memory for the peer's weights, e.g. 2GiB.",
        show_default="the fastest of several",
    ),
]
PeerPython = Annotated[
    list[str] | None,
    typer.Option(
        "--peer-python",
        metavar="NAME=PYTHON",
        help="Interpreter for one of the programs, where it has an environment of its own; "
        "may be given again for others.",
        show_default=False,
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        min=1,
        help="Seconds of decoding for each program; a slow one does fewer prompts and tokens.",
    ),
]


def peers_command(
    context: typer.Context,
    load: Load,
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.SpreadPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    peers: Peers = ALL_PEERS,
    other_model: OtherModel = None,
    other_draft: OtherDraft = None,
    time_limit: TimeLimit = 150.0,
    storage_mbps: options.StorageMbps = None,
    enforce: options.EnforceAlways = True,
    ignore_eos: options.IgnoreEos = False,
    peer_cpu_memory: PeerMemory = None,
    peer_python: PeerPython = None,
    output: options.Output = "table",
    output_file: options.OutputFile = None,
) -> None:
    """Compare specdec with other programs: same weights, prompts, threads and memory limit."""
    from bench.checks.equal_outputs import check_equal_outputs
    from bench.peers.compare import compare
    from bench.peers.runs import settings_for
    from bench.process.results import PEERS as KIND
    from bench.process.results import write_json
    from bench.prompts.lengths import fitting

    options.check_output(output)
    options.check_lossless(load, "peers")
    options.check_writable("--output-file", output_file)
    names = parse_peers(peers)
    if load.memory_budget == "auto":
        raise UsageMistake("peers needs a --memory-budget with a size, e.g. 3.5GiB")
    if storage_mbps is not None and not enforce:
        raise UsageMistake("--storage-mbps needs the cgroup that --no-enforce leaves out")
    interpreters = parse_interpreters(peer_python or [], names)
    cpu_memory_bytes = None
    if peer_cpu_memory:
        cpu_memory_bytes = options.parse_size("--peer-cpu-memory", peer_cpu_memory)
    given = read_prompts(prompts)
    weights = all_weights(*options.model_names(load), other_model, other_draft)
    refuse_none(names, weights, interpreters)
    settings = settings_for(
        load.keywords(LOAD),
        memory_bytes=options.parse_size("--memory-budget", str(load.memory_budget)),
        n_tokens=max_tokens,
        seconds=time_limit,
        enforce=enforce,
        storage_mbps=storage_mbps,
        ignore_eos=ignore_eos,
        cpu_memory_bytes=cpu_memory_bytes,
        interpreters=interpreters,
    )
    fit, n_too_long = fitting(given, weights[0].model, load.ctx_size, max_tokens)
    chosen = spread(fit, n_prompts)

    def save(so_far: dict[str, Any]) -> None:
        if output_file is not None:
            write_json(so_far, output_file)

    argv = ["specdec-bench", *context.obj.argv]
    result = compare(names, weights, chosen, settings, argv, save, n_too_long)
    show(KIND, result, output, output_file)
    for weight in weights:
        rows = [row for row in result["peers"] if row["weights"] == weight.format]
        check_equal_outputs(record for row in rows for record in row["prompts"])


def parse_peers(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise UsageMistake(f"--peers {name!r} is not known; choose from {', '.join(PEERS)}")
    if not names:
        raise UsageMistake(f"--peers names no program; choose from {', '.join(PEERS)}")
    return list(dict.fromkeys(names))


def parse_interpreters(arguments: Sequence[str], names: Sequence[str]) -> dict[str, Interpreter]:
    """Parse NAME=PYTHON arguments; each NAME must be among `names`."""
    result: dict[str, Interpreter] = {}
    for text in arguments:
        name, _, path = text.partition("=")
        if not path:
            raise UsageMistake(
                f"--peer-python {text} must be NAME=PYTHON, as airllm=venv/bin/python"
            )
        if name not in names:
            raise UsageMistake(f"--peer-python {text}: --peers {','.join(names)} has no {name!r}")
        if name in result:
            raise UsageMistake(f"--peer-python names {name} twice")
        package = PEERS[name].package
        try:
            result[name] = probe(path, (package,) if package else ())
        except InterpreterError as error:
            raise UsageMistake(f"--peer-python {name}={error}") from None
    return result


def refuse_none(
    names: Sequence[str], weights: Sequence[Weights], interpreters: Mapping[str, Interpreter]
) -> None:
    """Raise UsageMistake if none of the programs can run."""
    from bench.peers.compare import make_entries

    entries = list(make_entries(names, weights, interpreters))
    if all(entry.problem for entry in entries):
        reasons = dict.fromkeys(f"{entry.peer.name}, {entry.problem}" for entry in entries)
        raise UsageMistake(f"--peers: nothing can run: {'; '.join(reasons)}")


def all_weights(
    model: str, draft: str | None, other_model: str | None, other_draft: str | None
) -> list[Weights]:
    """Return the model in one format or in both, each with its draft."""
    if other_model is None and other_draft is not None:
        raise UsageMistake("--other-draft goes with --other-model, which was not given")
    first = Weights.named(model, draft)
    if other_model is None:
        return [first]
    if other_draft is None and isinstance(first.draft, str):
        other_draft = first.draft
    elif other_draft is None and draft is not None and draft.startswith(PAIR_PREFIX):
        other_format = GGUF if first.format == HF else HF
        other_draft = draft.removesuffix(".gguf") + (".gguf" if other_format == GGUF else "")
    second = Weights.named(other_model, other_draft)
    if second.format == first.format:
        raise UsageMistake(
            f"--other-model {other_model} has the same format as -m {model}: name the GGUF file "
            "of a checkpoint, or the checkpoint of a GGUF file"
        )
    return [first, second]
