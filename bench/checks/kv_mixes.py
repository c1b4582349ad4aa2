"""Random mixes of sequences whose KV does not fit in a budget that the kernel enforces.

    python -m bench.checks.kv_mixes -m pair:target -md pair:draft

Each mix has up to six sequences of any length that the context allows, some with a common prefix,
greedy or at T = 0.7, drafted in trees, in chains or not at all; some are cancelled, in their prompt
or after some tokens. A load serves ten mixes, with a context, --parallel and budget of its own.
Tokens and their log-probabilities are compared with plain decoding with all KV in memory, which is
computed first, without a limit. Prints a row for each load, then one JSON line with provenance; the
exit code is 2 if a bit differs, if the kernel ends a load, or if a file is left.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from bench.checks.in_cgroup import INSIDE, run_in_cgroup
from bench.checks.long_context import prompt_of
from bench.process.provenance import collect
from bench.prompts.mixes import DRAFTING, MAX_SEQS, N_NODES, Call, mixes_of
from bench.table import Table, text_of
from offload.errors import SpecdecError
from offload.process.memory import process_memory
from offload.process.temporary import temporary_folder
from offload.units import MIB, format_bytes
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

MIXES_PER_LOAD = 10
_SIZES = ("ctx_size", "parallel", "kv_tokens")
_COUNTS = ("hot_kv_tokens", "n_texts", "n_cancelled", "n_different", "n_files_left")
_COLUMNS = (
    *("context", "parallel", "KV tokens", "in memory", "texts", "cancelled", "different"),
    *("files left", "budget MiB", "peak", "GB read", "written"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Text = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""


class MixesDiffer(SpecdecError):
    """A place of the KV has changed an output, or has left something behind."""


def load_of(seed: int, models: dict[str, Any], ctx_size: int) -> dict[str, Any]:
    """Return options of `specdec.load` with a budget in which the KV does not fit."""
    import specdec

    random = np.random.default_rng([seed, 1])
    context = int(random.integers(ctx_size // 2, ctx_size + 1))
    kv_tokens = context * int(random.integers(MAX_SEQS, 2 * MAX_SEQS))
    sizes = {"ctx_size": context, "kv_tokens": kv_tokens, "num_draft_tokens": N_NODES}
    load = {**models, **sizes, "parallel": int(random.integers(1, 1 + MAX_SEQS)), "exact": "on"}
    smallest = specdec.plan_run(**load).smallest_budget_bytes
    for n_bytes in (smallest + int(random.integers(9)) * MIB, smallest):
        if specdec.plan_run(**load, memory_budget=n_bytes).kv_split is not None:
            return {**load, "memory_budget": n_bytes}
    raise SpecdecError(f"all KV fits in the smallest budget, {format_bytes(smallest)}: raise -c")


def expected_texts(llm: LLM, mixes: Sequence[Sequence[Call]]) -> list[Text]:
    """Return plain decoding's texts of all calls."""
    from specdec.sampling.params import SamplingParams

    calls = [call for mix in mixes for call in mix]
    asked = [(list(call.prompt), SamplingParams(**call.sampling)) for call in calls]
    outputs: dict[int, Text] = {}
    for i, result in llm.generate_each(asked):
        if isinstance(result, SpecdecError):
            raise result
        outputs[i] = _text_of(result.outputs[0])
    return [outputs[i] for i in range(len(calls))]


def run_mix(llm: LLM, mix: Sequence[Call]) -> list[Text]:
    """Return what each of the calls, which run at the same time, was given."""
    with ThreadPoolExecutor(len(mix)) as pool:
        return list(pool.map(lambda call: _run(llm, call), mix))


def _run(llm: LLM, call: Call) -> Text:
    from specdec.config import SpecConfig

    spec = SpecConfig(**{"spec_type": llm.spec.spec_type, **DRAFTING[call.drafting]})
    stream = llm.stream(list(call.prompt), spec=spec, **call.sampling)
    is_cut = call.cancelled_after == 0
    if is_cut:
        stream.start()
    time.sleep(call.delay)
    if is_cut:
        stream.cancel()
    num_tokens = 0
    for chunk in stream:
        num_tokens += len(chunk.token_ids)
        if call.cancelled_after is not None and num_tokens >= call.cancelled_after:
            stream.cancel()
    return _text_of(stream.outputs[0])


def _text_of(output: Any) -> Text:
    return list(output.token_ids), list(output.logprobs)


def is_equal(text: Text, expected: Text, *, is_cancelled: bool) -> bool:
    """Return whether a text is the expected one, or the beginning of it if it was cancelled."""
    num = len(text[0]) if is_cancelled else max(len(text[0]), len(expected[0]))
    return text == (expected[0][:num], expected[1][:num])


def run_load(load: dict[str, Any], mixes: dict[str, Any], expected: list[Text]) -> dict[str, Any]:
    """Run mixes within a budget; return the results."""
    import specdec

    chosen, folder = mixes_of(**mixes), tempfile.gettempdir()
    calls = [call for mix in chosen for call in mix]
    with specdec.load(**load) as llm:
        split = llm.plan.kv_split
        actual = [text for mix in chosen for text in run_mix(llm, mix)]
        stats = llm.stats
    pairs = zip(actual, expected, calls, strict=True)
    n_equal = sum(is_equal(x, y, is_cancelled=z.cancelled_after is not None) for x, y, z in pairs)
    opened = [_target(link) for link in Path("/proc/self/fd").iterdir()]
    return {
        "load": load,
        "hot_kv_tokens": None if split is None else split.hot_tokens,
        "n_texts": len(calls),
        "n_cancelled": sum(call.cancelled_after is not None for call in calls),
        "n_different": len(calls) - n_equal,
        "n_files_left": len(os.listdir(folder)) + sum(folder in target for target in opened),
        "n_tokens": sum(len(token_ids) for token_ids, _ in actual),
        "n_preempted": stats.preempted,
        "peak_memory_bytes": process_memory().peak_rss_bytes,
        "kv_bytes_read": stats.kv_bytes_read,
        "kv_bytes_written": stats.kv_bytes_written,
    }


def _target(link: Path) -> str:
    with suppress(OSError):  # that of the folder itself is closed by now
        return os.readlink(link)
    return ""


def run_limited_load(job: dict[str, Any], model: str) -> dict[str, Any]:
    """Run a load in a cgroup of its own. Raises KilledByTheKernel."""
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
        path = Path(folder) / "job"
        path.with_name("files").mkdir()
        path.write_text(json.dumps(job))
        options = ["-m", model, "--job", str(path)]
        run_in_cgroup("bench.checks.kv_mixes", options, job["load"]["memory_budget"])
        result: dict[str, Any] = json.loads(path.with_name("result").read_text())
    return result


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    num_mixes: Annotated[int, typer.Option("--mixes", min=1)] = 100,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", help="The longest.")] = 2048,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    job: Annotated[Path | None, typer.Option("--job", hidden=True)] = None,
    is_inside: Annotated[bool, typer.Option(INSIDE, hidden=True)] = False,
) -> None:
    """Run random mixes of sequences, and compare each of their bits."""
    import specdec

    if is_inside and job is not None:
        tempfile.tempdir = str(job.with_name("files"))
        result = run_load(**json.loads(job.read_text()))
        job.with_name("result").write_text(json.dumps(result))
        return
    models: dict[str, Any] = {"model": model, "draft_model": draft_model}
    starts = range(0, num_mixes, MIXES_PER_LOAD)
    # Before this process has a model in its own memory, which a plan would count.
    loads = [load_of(seed + i, models, ctx_size) for i in range(len(starts))]
    jobs: list[dict[str, Any]] = []
    with specdec.load(model, spec_type="none", exact="on", ctx_size=ctx_size, parallel=4) as llm:
        text = prompt_of(llm, 8 * ctx_size)
        for i, load in enumerate(loads):
            num = min(MIXES_PER_LOAD, num_mixes - starts[i])
            sizes = {"num_mixes": num, "ctx_size": load["ctx_size"]}
            mixes = {"seed": seed + i, "text": text, **sizes}
            expected = expected_texts(llm, mixes_of(**mixes))
            jobs.append({"load": load, "mixes": mixes, "expected": expected})
    results = [run_limited_load(item, model) for item in jobs]
    typer.echo(text_of([table_of(results)]))
    typer.echo(json.dumps({"loads": results, **collect(sys.argv)}))
    judge(results)


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            *(str(x["load"][key]) for key in _SIZES),
            *(str(x[key]) for key in _COUNTS),
            f"{x['load']['memory_budget'] / MIB:.0f}",
            f"{x['peak_memory_bytes'] / MIB:.0f}",
            f"{x['kv_bytes_read'] / 1e9:.2f}",
            f"{x['kv_bytes_written'] / 1e9:.2f}",
        )
        for x in results
    ]
    return Table("Mixes of sequences", _COLUMNS, tuple(rows))


def judge(results: Sequence[dict[str, Any]]) -> None:
    """Raise MixesDiffer unless all bits are equal, nothing is left, and KV was in a file."""
    n_different, n_left = (sum(x[key] for x in results) for key in ("n_different", "n_files_left"))
    if n_different or n_left:
        raise MixesDiffer(f"{n_different} texts differ, {n_left} files are left: please report it")
    if not all(x["kv_bytes_read"] for x in results):
        raise MixesDiffer("no KV was read in a load, so nothing was checked there: raise -c")


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.kv_mixes", sys.argv[1:]))
