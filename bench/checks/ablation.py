r"""Ablation of what surrounds decoding: start-up and memory, with one part switched off.

    python -m bench.checks.ablation compare -m build/grown-6gb -md pair:draft \
        --memory-budget 3.5GiB --prompts human_eval.jsonl --storage 1000

Runs `specdec run` in fresh processes inside a memory cgroup, with an empty page cache, in turns
over the parts and the prompts. Each part has run once before, so that measurements of the machine
and acceptance statistics are cached. Prints a table, then one JSON line with provenance. Parts of
the policy are switched off in virtual time by bench.scenarios.ablation.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import psutil
import typer

from bench.process.child import forget_model
from bench.process.provenance import collect
from bench.prompts.workloads import read_prompts
from offload.errors import SpecdecError
from offload.process.limited import OK, Limits, run_limited
from offload.storage.read_limit import ReadLimit
from offload.units import parse_bytes
from specdec.cli.app import main as specdec_main
from specdec.cli.enforce import child_environment
from specdec.cli.errors import run_app

NOTHING = "nothing"
PARTS: dict[str, tuple[str, ...]] = {
    NOTHING: (),
    "saved acceptance statistics": ("specdec.planning.saved_statistics.load_cached",),
    "opportunistic layers": (
        "specdec.policy.opportunistic_layers.OpportunisticLayers.pin_after_prefill",
        "specdec.policy.opportunistic_layers.OpportunisticLayers.pin_after_decode",
    ),
}
"""Functions that return None in place of their work, where a part is switched off."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class RunFailed(SpecdecError):
    """A run that ended without a result."""


@app.command()
def run(part: str, argv: list[str]) -> None:
    """Run specdec's command line with a part switched off; print its statistics."""
    from specdec.engine.sequences.request import Request

    put, arrivals = Request.put, []

    def note_arrival(request: Request, chunk: Any) -> None:
        arrivals.append(time.time())
        put(request, chunk)

    patch.object(Request, "put", note_arrival).start()
    for name in PARTS[part]:
        patch(name, lambda *args, **kwargs: None).start()
    code = specdec_main(argv)
    started = psutil.Process().create_time()
    typer.echo(json.dumps({"first_token_seconds": arrivals[0] - started if arrivals else None}))
    raise typer.Exit(code)


def measured(part: str, argv: Sequence[str], limits: Limits, folder: Path) -> dict[str, float]:
    """Return tokens per second of decoding, and seconds from the start to the first token."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.checks.ablation", "run", part, "--", *argv]
    environment = child_environment({"XDG_CACHE_HOME": str(folder / part)})
    outcome = run_limited(command, limits, environment, log)
    lines = log.read_text(encoding="utf-8").splitlines()
    if outcome.exit != OK:
        raise RunFailed(f"without {part} the run ended ({outcome.exit}): {' '.join(lines[-1:])}")
    stats, first = (json.loads(line) for line in lines if line.startswith("{"))
    return {
        "tokens_per_second": stats["stats"]["tokens_per_second"],
        "first_token_seconds": first["first_token_seconds"],
    }


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return a table in Markdown: means over the runs, and tokens/s relative to all parts."""
    lines = ["| without | tokens/s | | first token |", "|---|---|---|---|"]
    mean: Callable[[str, str], float] = lambda part, name: statistics.fmean(  # noqa: E731
        result[name] for result in results[part]
    )
    full = mean(NOTHING, "tokens_per_second")
    for part in results:
        speed, first = mean(part, "tokens_per_second"), mean(part, "first_token_seconds")
        lines.append(f"| {part} | {speed:.2f} | {speed / full:.2f} | {first:.1f} s |")
    return "\n".join(lines)


@app.command()
def compare(
    model: Annotated[Path, typer.Option("-m", "--model")],
    draft_model: Annotated[str, typer.Option("-md", "--draft-model")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")],
    prompts: Annotated[Path, typer.Option("--prompts")],
    storage: Annotated[float | None, typer.Option("--storage", help="Read limit in MB/s.")] = None,
    n_prompts: Annotated[int, typer.Option("--n-prompts")] = 3,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens")] = 64,
) -> None:
    """Measure each part's share of the speed and of the time to the first token."""
    file = model if model.is_file() else max(model.glob("*.safetensors"))
    reads = None if storage is None else ReadLimit(file, int(storage * 1e6))
    limits = Limits(parse_bytes(memory_budget), 600.0, reads)
    argv = ["run", "-m", str(model), "-md", draft_model, "--memory-budget", memory_budget]
    argv += ["-c", "1024", "-n", str(max_tokens), "--json", "--raw", "-p"]
    results: dict[str, list[dict[str, float]]] = {part: [] for part in PARTS}
    with TemporaryDirectory() as name:
        run_part = partial(measured, limits=limits, folder=Path(name))
        chosen = read_prompts(prompts, n_prompts)
        for turn, prompt in enumerate([chosen[0], *chosen]):
            for part in PARTS if turn % 2 else reversed(PARTS):
                os.sync()
                forget_model(model)
                result = run_part(part, [*argv, prompt.text])
                if turn:  # the first one fills the cache
                    results[part].append(result)
    typer.echo(table(results))
    record = {"results": results, "argv": argv, "storage": storage, **collect(sys.argv)}
    typer.echo(json.dumps(record))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.ablation", sys.argv[1:]))
