"""A long session beside short requests, and its first token after a restart.

    python -m bench.checks.agent_session -m MODEL -md DRAFT --memory-budget 5GiB --folder DIR

Each turn has all turns before it in its prompt; --short requests run beside them. Then the model is
loaded anew, and the session goes on from the KV in --folder, whose files are dropped from the page
cache before. Its first token is compared with a direct read of the same files, apart from the pass
over the new tokens, which another request takes whose prefix is in memory. All texts are compared
with those of a model that caches nothing; with --record FILE, and then --compare FILE, that is a
command of its own, which takes the longest and needs no idle machine. Prints tables, then one JSON
line with provenance; the exit code is 2 if less than --share of a prefix is reused, if the ratio is
above --limit, or if a text differs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.process.provenance import collect
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.table import Table, cell, text_of
from offload.errors import SpecdecError
from offload.storage.aligned import AlignedBuffer
from offload.storage.direct_io import DirectFile
from offload.storage.page_cache import drop_files
from offload.units import MIB
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

_READ_BYTES = 32 * MIB
_SHORT_TOKENS = 40
_NUM_IN_MEMORY = 5
_SHORT_ANSWER = 8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Tokens = tuple[int, ...]


class SlowSession(SpecdecError):
    """A session computes what it had computed before, or other tokens."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of a session."""

    num_start: int
    num_new: int
    num_answer: int
    num_turns: int
    num_short: int

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, that after the restart included."""
        return self.num_start + (self.num_turns + 1) * (self.num_new + self.num_answer) + 1


@dataclass
class Session:
    """The prompts and answers of a session, in order.

    shares: of each turn but the first, reused tokens / tokens that had been computed for the turn
    before. first_tokens: seconds to the first token of each turn.
    """

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[Tokens] = field(default_factory=list)
    short: list[tuple[list[int], Tokens]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    memory_budget: Annotated[str | None, typer.Option("--memory-budget")] = None,
    kv_tokens: Annotated[int | None, typer.Option("--kv-tokens", help="None: planned.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder on the storage; none: a temporary one.")
    ] = None,
    start_tokens: Annotated[int, typer.Option("--start-tokens")] = 3000,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Of each turn.")] = 40,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Of each answer.")] = 24,
    n_turns: Annotated[int, typer.Option("--turns")] = 30,
    n_short: Annotated[int, typer.Option("--short", help="Short requests beside them.")] = 50,
    n_restarts: Annotated[int, typer.Option("--restarts", help="The median counts.")] = 3,
    share: Annotated[float, typer.Option("--share", help="Smallest allowed share.")] = 0.95,
    limit: Annotated[float, typer.Option("--limit", help="Largest allowed ratio.")] = 1.3,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write the texts there, compare none.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", help="Compare the texts of --record, and end.")
    ] = None,
) -> None:
    """Measure a session, and its first token after a restart."""
    sizes = Sizes(start_tokens, new_tokens, max_tokens, n_turns, n_short)
    load: dict[str, Any] = {"model": model, "draft_model": draft_model, "ctx_size": sizes.context}
    load |= {"memory_budget": memory_budget} if memory_budget else {}
    load |= {"kv_tokens": kv_tokens} if kv_tokens else {}
    load |= {} if draft_model else {"spec_type": "none"}
    if compare is not None:
        compare_texts(load, compare)
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="agent-session-") as cache:
        result = measure(load, Path(cache), sizes, n_restarts, record)
    typer.echo(text_of(list(tables_of(result))))
    typer.echo(json.dumps({**result, "load": load, "sizes": vars(sizes), **collect(sys.argv)}))
    judge(result, share, limit)


def measure(
    load: dict[str, Any], cache: Path, sizes: Sizes, n_restarts: int, record: Path | None
) -> dict[str, Any]:
    """Run the session, the restarts and the comparison; return the results. record: file for the
    texts, which are then not compared."""
    import specdec

    with specdec.load(**load, prompt_cache_dir=cache) as llm:
        words = _words(llm)
        session = run_session(llm, words, sizes)
        saved = _stats_when_idle(llm).saved_prefixes
    restarts: list[dict[str, Any]] = []
    for index in range(n_restarts):
        # Each goes on in another way, so that none finds more in the files than the one before.
        prompt = [
            *session.prompts[-1],
            *session.answers[-1],
            *_cut(words, 7 + index, sizes.num_new),
        ]
        with specdec.load(**load, prompt_cache_dir=cache) as llm:
            restarts.append(restart(llm, cache, prompt, sizes))
    requests = requests_of(session, restarts)
    n_different = None
    if record is not None:
        record.write_text(json.dumps(requests))
    else:
        with specdec.load(**load) as llm:
            n_different = different(llm, requests)
    names = ("first_token", "alone", "read", "restored")
    middle = {name: statistics.median(item["seconds"][name] for item in restarts) for name in names}
    return {
        "smallest_share": min(session.shares),
        "mean_share": statistics.mean(session.shares),
        "first_tokens": session.first_tokens,
        "saved_prefixes": saved,
        "restarts": [
            {k: v for k, v in item.items() if k not in ("prompt", "answer")} for item in restarts
        ],
        "seconds": middle,
        "ratio": middle["restored"] / middle["read"] if middle["read"] else None,
        "n_texts": len(requests),
        "n_different": n_different,
    }


def run_session(llm: LLM, words: Sequence[int], sizes: Sizes) -> Session:
    """Run all turns, and the short requests beside them."""
    session, ids, num_before = Session(), _cut(words, 0, sizes.num_start), 0
    options: dict[str, Any] = {"max_tokens": sizes.num_answer, "ignore_eos": True}
    running: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as pool:
        for turn in range(sizes.num_turns):
            begin, end = (sizes.num_short * (turn + k) // sizes.num_turns for k in (0, 1))
            beside = [_cut(words, 100 + i, _SHORT_TOKENS) for i in range(begin, end)]
            if beside:
                running.append(pool.submit(_answers, llm, beside))
            result = llm.generate(ids, **options)
            session.prompts.append(ids)
            session.answers.append(result.token_ids)
            session.first_tokens.append(result.stats.time_to_first_token)
            if num_before:
                session.shares.append(result.stats.reused_prompt_tokens / num_before)
            num_before = len(ids) + len(result.token_ids) - 1  # the last one was not computed
            ids = [*ids, *result.token_ids, *_cut(words, 7 * turn, sizes.num_new)]
    for future in running:
        session.short += future.result()
    return session


def restart(llm: LLM, cache: Path, prompt: list[int], sizes: Sizes) -> dict[str, Any]:
    """Return the seconds to the first token of the next turn after a restart, and what they consist
    of. A short request before waits for the weights that a first pass reads."""
    llm.generate(prompt[: sizes.num_new], max_tokens=2, cache_prompt=False)
    # Links, because the files are replaced by those of the longer prefix.
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=f"{cache.name}-") as folder:
        links = Path(folder)
        for path in cache.glob("*.safetensors"):
            os.link(path, links / path.name)
        before = {path: path.stat().st_mtime_ns for path in links.iterdir()}
        _back_memory(2 * sum(path.stat().st_size for path in before))
        drop_files(before)
        result = llm.generate(prompt, max_tokens=sizes.num_answer, ignore_eos=True)
        used = [path for path, time_ns in before.items() if path.stat().st_mtime_ns != time_ns]
        n_loaded = llm.stats.loaded_prefix_tokens
        n_new = result.stats.prompt_tokens - result.stats.reused_prompt_tokens
        alone = [_first_token(llm, prompt, n_new, index) for index in range(_NUM_IN_MEMORY)]
        first, read = result.stats.time_to_first_token, read_seconds(used)
        read_bytes = sum(path.stat().st_size for path in used)
    return {
        "prompt": prompt,
        "answer": result.token_ids,
        "loaded_tokens": n_loaded,
        "computed_tokens": n_new,
        "read_bytes": read_bytes,
        "seconds": {
            "first_token": first,
            "alone": statistics.median(alone),
            "read": read,
            "restored": first - statistics.median(alone),
        },
    }


def _first_token(llm: LLM, prompt: list[int], n_new: int, index: int) -> float:
    """Return the seconds to the first token of a prompt with other new tokens, whose prefix is in
    memory. Each index has its own."""
    new = prompt[-n_new:]
    other = [*prompt[:-n_new], *new[index + 1 :], *new[: index + 1]]
    return llm.generate(other, max_tokens=1).stats.time_to_first_token


def _back_memory(n_bytes: int) -> None:
    """Let another process use so much memory and end: a virtual machine's fresh memory takes 2.3 s
    per GiB from its host, which a machine without a host never waits for."""
    code = f"from offload.storage.aligned import AlignedBuffer; AlignedBuffer({n_bytes})"
    subprocess.run([sys.executable, "-c", code], check=True)


def read_seconds(files: Sequence[Path]) -> float:
    """Return the seconds of reading files once, past the page cache where the file system can."""
    drop_files(files)
    with closing(AlignedBuffer(_READ_BYTES)) as buffer:
        began = time.perf_counter()
        for path in files:
            with closing(DirectFile(path)) as file:
                for offset in range(0, file.n_bytes, _READ_BYTES):
                    file.read_into(buffer.view, offset)
        return time.perf_counter() - began


def requests_of(session: Session, restarts: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return (prompt, answer) of all requests, as token ids."""
    turns = zip(session.prompts, session.answers, strict=True)
    return [*turns, *((item["prompt"], item["answer"]) for item in restarts), *session.short]


def different(llm: LLM, requests: Sequence[tuple[Any, Any]]) -> int:
    """Return how many texts differ from those of a model that caches nothing."""
    options: dict[str, Any] = {"cache_prompt": False, "ignore_eos": True}
    answers = (llm.generate(ids, max_tokens=len(answer), **options) for ids, answer in requests)
    return sum(
        tuple(answer) != result.token_ids
        for (_, answer), result in zip(requests, answers, strict=True)
    )


def compare_texts(load: dict[str, Any], record: Path) -> None:
    """Compare the texts of a recorded session. Raises SlowSession if one differs."""
    import specdec

    requests = json.loads(record.read_text())
    with specdec.load(**load) as llm:
        n_different = different(llm, requests)
    typer.echo(f"{len(requests)} texts, {n_different} different")
    _refuse_different(n_different, len(requests))


def _refuse_different(n_different: int | None, num_seqs: int) -> None:
    if n_different:
        raise SlowSession(
            f"{n_different} of {num_seqs} texts differ from those without a cache: this is a bug, "
            "report it"
        )


def judge(result: dict[str, Any], share: float, limit: float) -> None:
    """Raise SlowSession for a result beyond the limits."""
    _refuse_different(result["n_different"], result["n_texts"])
    if result["smallest_share"] < share:
        raise SlowSession(
            f"a turn reused {result['smallest_share']:.3f} of what was computed for the one "
            f"before, less than {share:g}: give the KV cache more memory (--memory-budget)"
        )
    if result["ratio"] is None:
        raise SlowSession(
            "the session was not read from storage after the restart: its KV is computed as fast "
            "as it is read here; take a larger model or more --start-tokens"
        )
    if result["ratio"] > limit:
        raise SlowSession(
            f"the first token after the restart takes {result['ratio']:.2f} x the read of its KV, "
            f"apart from the pass over its new tokens, more than {limit:g}: measure again on an "
            "idle machine"
        )


def tables_of(result: dict[str, Any]) -> list[Table]:
    seconds, last = result["seconds"], result["restarts"][-1]
    rows = (
        (
            "first token",
            str(last["loaded_tokens"] + last["computed_tokens"]),
            seconds["first_token"],
        ),
        ("the same with its prefix in memory", str(last["computed_tokens"]), seconds["alone"]),
        ("a direct read of its KV", str(last["loaded_tokens"]), seconds["read"]),
    )
    ratio = f"(first token - the same in memory) / read: {cell(result['ratio'])}"
    shares = (
        ("smallest", f"{result['smallest_share']:.4f}"),
        ("mean", f"{result['mean_share']:.4f}"),
    )
    return [
        Table("Reused share of a turn's prefix", ("turn", "share"), shares),
        Table(
            "After a restart",
            ("", "tokens", "seconds"),
            tuple((name, tokens, f"{value:.3f}") for name, tokens, value in rows),
            notes=(ratio,),
        ),
    ]


def _answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], Tokens]]:
    results = llm.generate(prompts, max_tokens=_SHORT_ANSWER, ignore_eos=True)
    return [(ids, result.token_ids) for ids, result in zip(prompts, results, strict=True)]


def _stats_when_idle(llm: LLM) -> Any:
    """Return the statistics once the engine, which answers first, has written its files."""
    llm.session.engine.call(lambda: None)
    return llm.stats


def _words(llm: LLM) -> list[int]:
    return [i for prompt in read_prompts(BUILT_IN, 16) for i in llm.tokenizer.encode(prompt.text)]


def _cut(words: Sequence[int], first: int, n_tokens: int) -> list[int]:
    """Return so many tokens of the prompts, read in a circle from another place each."""
    start = 97 * first % len(words)
    return [words[(start + i) % len(words)] for i in range(n_tokens)]


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.agent_session", sys.argv[1:]))
