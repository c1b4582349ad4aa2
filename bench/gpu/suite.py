"""Command that runs all measurements on a GPU and writes one JSON.

    python -m bench.gpu.suite --output-file cuda.json           (about 9 minutes, 30 GB of disk)
    python -m bench.gpu.suite --device cpu --tiny               (a test of the suite)
    python -m bench.gpu.suite --sections "three tiers,peer" --dir FOLDER    (targets grown before)

Grows a 13B target of 26 GB from the embedded pair, runs it in 8 GiB of VRAM and 24 or 12 GiB of
host memory, and checks the results against docs/benchmarks.md. Each section is a process of its own
with a time limit: one that hangs, fails or is killed does not affect the others, and its results up
to then are saved.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.gpu.checks import checks, lines
from bench.gpu.settings import SECTIONS, Settings, full_settings, tiny_settings
from bench.process.provenance import collect
from bench.process.results import write_json
from offload.errors import SpecdecError
from offload.process.limited import Limits, run_limited
from specdec.cli.enforce import child_environment
from specdec.cli.errors import EXIT_ERROR, run_app
from specdec.cli.libraries import quiet_libraries
from specdec.run_options import CPU, CUDA

MAX_SECONDS = 540.0
_MIN_SECONDS = 5.0
"""Minimum time left to begin a section."""

RunSection = Callable[[str, Settings, float], dict[str, Any]]
"""(section, settings, seconds) -> its results, with "exit" and "seconds"."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class SuiteError(SpecdecError):
    """The measurements cannot be made here."""


def run_suite(
    settings: Settings,
    run_section: RunSection,
    seconds: float = MAX_SECONDS,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Return results by section. A section gets its own limit, or what is left of `seconds`, and
    time left over by earlier sections, as long as later ones have their limits.

    keep: called with all results so far after each section, should the rest be cut short.
    """
    deadline = time.monotonic() + seconds
    result: dict[str, Any] = {}
    for number, name in enumerate(settings.sections):
        left = deadline - time.monotonic()
        behind = sum(settings.limits[section] for section in settings.sections[number + 1 :])
        limit = max(min(settings.limits[name], left), left - behind)
        if limit < _MIN_SECONDS:
            result[name] = {"exit": "no time left"}
            continue
        result[name] = run_section(name, settings, limit)
        print(f"{name}: {result[name]['exit']}", file=sys.stderr, flush=True)
        keep(result)
    return result


def in_child(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """Run a section in a process of its own, which is killed at its time limit."""
    with tempfile.TemporaryDirectory(prefix="specdec-cuda-") as folder:
        task, result_path, log = (
            Path(folder) / item for item in ("task.json", "result.json", "log")
        )
        settings.write(task)
        argv = [sys.executable, "-m", "bench.gpu.suite", "--section", name]
        argv += ["--task", str(task), "--output-file", str(result_path)]
        outcome = run_limited(argv, Limits(None, seconds), child_environment(), log)
        results = json.loads(result_path.read_text()) if result_path.exists() else {}
        results |= {"exit": outcome.exit, "seconds": outcome.seconds}
        if outcome.exit != "ok":
            results["log"] = log.read_text(errors="replace").splitlines()[-8:]
        return dict(results)


def do_section(name: str, settings: Settings, result: Path | None) -> dict[str, Any]:
    """Run a section in this process; results are written after every step."""
    from bench.gpu.sections import FUNCTIONS

    results: dict[str, Any] = {}

    def note(key: str, value: Any) -> None:
        results[key] = value
        if result is not None:
            write_json(results, result)

    FUNCTIONS[name](settings, note)
    return results


def check_device(device: str, tiny: bool) -> None:
    """Raise SuiteError if there is no such device, or nothing to measure on it."""
    if device not in (CPU, CUDA):
        raise SuiteError(f"--device is {device!r}, must be cpu or cuda")
    if device == CPU and not tiny:
        raise SuiteError("on a CPU the suite can only be tried: add --tiny")
    if device == CUDA:
        from backends.cuda.engine import cuda_problem

        problem = cuda_problem()
        if problem is not None:
            raise SuiteError(f"{problem}; --device cpu --tiny shows that the suite itself runs")


@app.command()
def main(
    device: Annotated[str, typer.Option(metavar="cuda|cpu", help="Where to compute.")] = CUDA,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The embedded pair instead of 26 GB: only a test.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Grow the targets here.", show_default="temporary")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option(help="Write the JSON here.", show_default="stdout")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time limit of the whole suite.")] = MAX_SECONDS,
    sections: Annotated[
        str, typer.Option(metavar="NAME,...", help="Only these; --dir has the grown targets.")
    ] = ",".join(SECTIONS),
    section: Annotated[str | None, typer.Option(hidden=True)] = None,
    task: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure specdec on a GPU."""
    quiet_libraries()
    if section is not None and task is not None:
        do_section(section, Settings.read(task), output_file)
        return
    check_device(device, tiny)
    chosen = _sections(sections)
    own = None if folder is not None else tempfile.mkdtemp(prefix="specdec-cuda-suite-")
    place = folder if folder is not None else Path(str(own))
    settings = replace((tiny_settings if tiny else full_settings)(device, place), sections=chosen)
    argv = ["bench.gpu.suite", *sys.argv[1:]]

    def keep(result: dict[str, Any]) -> None:
        if output_file is not None:
            write_json(summarise(settings, result, tiny, argv), output_file)

    try:
        place.mkdir(parents=True, exist_ok=True)
        result = run_suite(settings, in_child, seconds, keep)
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    report = summarise(settings, result, tiny, argv)
    write_json(report, output_file)
    print("\n".join(lines(report)), file=sys.stderr)
    if any(item["exit"] != "ok" for item in result.values()):
        raise typer.Exit(EXIT_ERROR)


def _sections(names: str) -> tuple[str, ...]:
    """Return the named sections in the order of SECTIONS."""
    chosen = {name.strip() for name in names.split(",")}
    unknown = chosen - set(SECTIONS)
    if unknown:
        raise SuiteError(
            f"--sections has {', '.join(sorted(map(repr, unknown)))}; there are "
            f"{', '.join(map(repr, SECTIONS))}"
        )
    return tuple(name for name in SECTIONS if name in chosen)


def summarise(
    settings: Settings, result: dict[str, Any], tiny: bool, argv: Sequence[str]
) -> dict[str, Any]:
    """Return the report: results of the sections, checks and provenance."""
    return {
        "device": settings.device,
        "is_measurement": settings.device == CUDA and not tiny,
        "sections": result,
        "checks": checks(settings, result),
        "provenance": collect(argv),
    }


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.gpu.suite", sys.argv[1:]))
