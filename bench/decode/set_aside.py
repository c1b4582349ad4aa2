"""Texts that are set aside: seconds to compute their KV anew, or to write it to a file and read it.

    python -m bench.decode.set_aside -m MODEL --memory-budget 3.5GiB --folder ON-THE-SAME-STORAGE \
        --output-file FILE

Weights stream from the same storage, so what KV moves is time that passes wait. Computed anew, a
text's tokens are rows of passes that read the model in any case: `beside_seconds` is by how much
they make one longer, `alone_seconds` the pass of nothing else. Nothing else may run meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from backends.contract.sequence import SequenceRows
from bench import options
from bench.prompts.workloads import BUILT_IN, read_prompts
from specdec.cli.errors import run_app

N_REPEATS = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def pass_seconds(llm: Any, batch: list[SequenceRows]) -> float:
    began = time.perf_counter()
    llm.target.run(batch)
    return time.perf_counter() - began


def compute(llm: Any, token_ids: list[int]) -> tuple[float, float, float]:
    """Seconds of a pass of one row, of these tokens alone, of both together; the least of some."""
    found = []
    for _ in range(N_REPEATS):
        other, text, again = (llm.target.sequence() for _ in range(3))
        try:
            llm.target.run([SequenceRows(other, token_ids[:2])])
            one = pass_seconds(llm, [SequenceRows(other, token_ids[:1])])
            alone = pass_seconds(llm, [SequenceRows(text, token_ids)])
            row = SequenceRows(other, token_ids[:1])
            both = pass_seconds(llm, [row, SequenceRows(again, token_ids)])
            found.append((one, alone, both))
        finally:
            for sequence in (other, text, again):
                sequence.close()
    one, alone, both = (min(column) for column in zip(*found, strict=True))
    return one, alone, both


def move(llm: Any, token_ids: list[int], folder: Path) -> tuple[int, float, float]:
    """Bytes of these tokens' KV, seconds to write them to the storage and to read them from it."""
    text, path = llm.target.sequence(), folder / "kv"
    text.prefill(token_ids)
    tensors = text.prefix_tensors()
    writing, reading = [], []
    try:
        for _ in range(N_REPEATS):
            began = time.perf_counter()
            buffers = {one.name: memoryview(bytearray(one.n_bytes)) for one in tensors}
            text.save_prefix(buffers)
            with path.open("wb") as file:
                for one in tensors:
                    file.write(buffers[one.name])
                file.flush()
                os.fsync(file.fileno())
                writing.append(time.perf_counter() - began)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            with path.open("rb") as file:
                saved = {
                    one.name: (one, memoryview(bytearray(file.read(one.n_bytes))))
                    for one in tensors
                }
            back = llm.target.sequence()
            back.load_prefix(token_ids, saved)
            reading.append(time.perf_counter() - began)
            back.close()
    finally:
        text.close()
    return sum(one.n_bytes for one in tensors), min(writing), min(reading)


def measure(llm: Any, token_ids: list[int], folder: Path) -> dict[str, Any]:
    n_tokens = len(token_ids)
    one, alone, both = compute(llm, token_ids)
    n_bytes, write_seconds, read_seconds = move(llm, token_ids, folder)
    cost = llm.plan.pass_cost
    return {
        "n_tokens": n_tokens,
        "kv_bytes": n_bytes,
        "pass_seconds": one,
        "alone_seconds": alone,
        "beside_seconds": max(0.0, both - one),
        "planned_beside_seconds": cost.seconds(1 + n_tokens) - cost.seconds(1),
        "write_seconds": write_seconds,
        "read_seconds": read_seconds,
        "file_seconds": write_seconds + read_seconds,
    }


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    folder: Annotated[Path, typer.Option("--folder", help="Where the KV goes.")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")] = "auto",
    lengths: Annotated[str, typer.Option("--tokens", metavar="N,N,...")] = "64,256,1024",
    output_file: options.OutputFile = None,
) -> None:
    """Compute the KV of texts anew, or write and read it."""
    import specdec

    counts = [int(one) for one in lengths.split(",")]
    rows = []
    with specdec.load(
        model, memory_budget=memory_budget, ctx_size=max(counts) + 64, kv_tokens=3 * max(counts)
    ) as llm:
        texts = [prompt.text for prompt in read_prompts(BUILT_IN)]
        ids = [token for text in texts for token in llm.tokenizer.encode(text)]
        ids *= 1 + max(counts) // len(ids)
        with TemporaryDirectory(dir=folder) as inside:
            for n_tokens in counts:
                rows.append(measure(llm, ids[:n_tokens], Path(inside)))
                typer.echo(json.dumps(rows[-1]), err=True)
    told = json.dumps({"model": model, "rows": rows}, indent=1)
    if output_file is not None:
        output_file.write_text(told + "\n", encoding="utf-8")
    typer.echo(told)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.decode.set_aside", sys.argv[1:]))
