"""Kill `specdec batch` again and again, and see whether its output is an undisturbed run's.

    python -m bench.checks.kills -m pair:target -md pair:draft --prompts FILE --output-file FILE

SIGKILL comes at random: while the models are loaded, between answers, right behind one. At the end
every line has to be answered once, and the output has to be an undisturbed run's byte by byte.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from bench import options
from bench.prompts.workloads import BUILT_IN, Prompt, read_prompts
from offload.errors import SpecdecError
from specdec.batch.records import key_of
from specdec.cli.errors import run_app

EARLY_SHARE, EARLY_SECONDS = 0.2, 10.0
"""Of the kills, those that come within so many seconds, while models are loaded."""
_POLL_SECONDS = 0.005

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class KillsError(SpecdecError):
    """A run failed by itself."""


def write_lines(path: Path, prompts: Sequence[Prompt], n_lines: int, max_tokens: int) -> None:
    """Greedy and sampled in turns, of different lengths; prompts that come again begin anew."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(n_lines):
            turn, prompt = i // len(prompts), prompts[i % len(prompts)].text
            line: dict[str, Any] = {"prompt": f"# {turn}\n{prompt}" if turn else prompt}
            line["max_tokens"] = max_tokens * (1 + i % 4) // 4
            if i % 2:
                line["temperature"] = 0.8
            file.write(json.dumps(line) + "\n")


@dataclass
class KilledBatch:
    """One batch that is killed `n_kills` times.

    argv: of `specdec batch`, all but the output. n_bytes: about those of the whole output.
    """

    argv: Sequence[str]
    out: Path
    n_bytes: int
    n_kills: int
    chance: random.Random
    n_bytes_after: list[int] = field(default_factory=list)
    """Of the records that each kill left."""

    def run(self) -> None:
        """All kills, and the run that is left alone. Raises KillsError."""
        for _ in range(self.n_kills):
            self._kill()
        finish(self.argv, self.out)

    def _kill(self) -> None:
        process = _start(self.argv, self.out)
        if self.chance.random() < EARLY_SHARE:
            end = time.monotonic() + self.chance.uniform(0.0, EARLY_SECONDS)
            _wait(process, lambda: time.monotonic() >= end)
        else:  # so many bytes further, the last kill included not to the end
            goal = self._n_kept + self.chance.randrange(self.n_bytes // (self.n_kills + 2))
            _wait(process, lambda: self._n_kept > goal)
            time.sleep(self.chance.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        if process.returncode != -signal.SIGKILL:
            raise KillsError(f"specdec batch ended before it was killed: {err.decode().strip()}")
        self.n_bytes_after.append(self._n_kept)

    @property
    def _n_kept(self) -> int:
        partial = self.out.with_name(self.out.name + ".partial")
        return partial.stat().st_size if partial.exists() else 0


def finish(argv: Sequence[str], out: Path) -> None:
    """Let a batch come to its end. Raises KillsError."""
    process = _start(argv, out)
    _, err = process.communicate()
    if process.returncode:
        raise KillsError(f"specdec batch failed: {err.decode().strip()}")


def _start(argv: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "specdec", "batch", *argv, "-o", str(out)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _wait(process: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    while not is_there() and process.poll() is None:
        time.sleep(_POLL_SECONDS)


def run(argv: Sequence[str], folder: Path, n_kills: int, seed: int = 0) -> dict[str, Any]:
    """An undisturbed run and one that is killed: what became of the lines. Raises KillsError."""
    undisturbed, out = folder / "undisturbed.jsonl", folder / "killed.jsonl"
    finish(argv, undisturbed)
    expected = undisturbed.read_bytes()
    batch = KilledBatch(argv, out, len(expected), n_kills, random.Random(seed))
    batch.run()
    found = out.read_bytes()
    keys = [key_of(line) for line in found.splitlines(keepends=True)]
    return {
        "n_kills": n_kills,
        "n_records": len(keys),
        "n_lost": len(set(map(key_of, expected.splitlines(keepends=True))) - set(keys)),
        "n_twice": len(keys) - len(set(keys)),
        "is_equal": found == expected,
        "n_bytes": len(expected),
        "n_bytes_after_kills": batch.n_bytes_after,
    }


@app.command()
def main(
    context: typer.Context,
    model: Annotated[str, typer.Option("-m", "--model")] = "pair:target",
    draft_model: Annotated[str, typer.Option("-md", "--draft-model")] = "pair:draft",
    prompts: options.Prompts = BUILT_IN,
    n_lines: Annotated[int, typer.Option("--n-lines", min=1)] = 64,
    n_kills: Annotated[int, typer.Option("--n-kills", min=1)] = 10,
    max_tokens: options.MaxTokens = 64,
    seed: Annotated[int, typer.Option("--seed", help="Of the kills.")] = 0,
    more: Annotated[
        str, typer.Option("--options", help="Further options of `specdec batch`, in one text.")
    ] = "-c 1024",
    output_file: options.OutputFile = None,
) -> None:
    """Kill a batch at random; exit code 1 where its output is not an undisturbed run's."""
    with TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        write_lines(source, read_prompts(prompts), n_lines, max_tokens)
        argv = [str(source), "-m", model, "-md", draft_model, *more.split()]
        result = run(argv, Path(folder), n_kills, seed)
    told = json.dumps(result, indent=1)
    if output_file is not None:
        output_file.write_text(told + "\n", encoding="utf-8")
    typer.echo(told)
    if not result["is_equal"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.kills", sys.argv[1:]))
