"""Tables of results, for the terminal after a measurement and for the report's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.checks.equal_outputs import percent_equal
from bench.process.results import CURVE, PEERS, POLICY, SPEEDUP, SWEEP
from bench.report.data import series_name
from bench.report.programs import exit_of, pinned, program_tables
from bench.results import lossy_mark
from bench.table import Columns, Table, cells, headings, labelled
from offload.units import GIB, format_bytes

Value = Mapping[str, Any]

VERDICT_WIDTH = 18
"""Width of the labels below the table of a speedup."""


def tables(kind: str, value: Value) -> list[Table]:
    """Return the tables of results of one kind (`bench.process.results`); none for a picture."""
    makers = {
        PEERS: program_tables,
        SPEEDUP: _speedup,
        SWEEP: _sweep,
        CURVE: _curve,
        POLICY: _policy,
    }
    return list(makers[kind](value)) if kind in makers else []


def _storage(mbps: float | None) -> str:
    return "full" if mbps is None else f"{mbps:g}"


# --- plain and speculative ------------------------------------------------------------------------

_SPEEDUP_COLUMNS: Columns = (
    ("tokens per second", "tokens_per_second", "{:.2f}", 1.0),
    ("seconds per token", "time_per_output_token", "{:.3f}", 1.0),
    ("seconds to first token", "time_to_first_token", "{:.2f}", 1.0),
    ("tokens per pass", "mean_acceptance_length", "{:.2f}", 1.0),
    ("acceptance rate", "acceptance_rate", "{:.2f}", 1.0),
    ("accepted by n-gram", "ngram_share", "{:.2f}", 1.0),
    ("GB streamed", "bytes_streamed", "{:.1f}", 1e9),
    ("stall seconds", "stall_seconds", "{:.1f}", 1.0),
    ("draft seconds", "draft_seconds", "{:.1f}", 1.0),
    ("peak memory GiB", "peak_memory_bytes", "{:.2f}", GIB),
)


def _speedup(value: Value) -> Iterator[Table]:
    columns = {"plain": value["plain"], "speculative": value["speculative"]}
    sampling = value.get("sampling", {})
    n_tokens = sampling.get("max_tokens", "?")
    how = "greedy" if not sampling.get("temperature") else f"temperature {sampling['temperature']}"
    yield Table(
        "Plain and speculative",
        ("", *headings(_SPEEDUP_COLUMNS)),
        tuple(
            (name + lossy_mark(stats), *cells(stats, _SPEEDUP_COLUMNS))
            for name, stats in columns.items()
        ),
        labelled(
            (
                ("target", value["model"]),
                ("draft", value.get("draft_model") or "none"),
                ("budget", pinned(value)),
                ("prompts", f"{value['n_prompts']} x {n_tokens} tokens, {how}"),
            )
        ),
        (*labelled(tuple(_verdict(value)), VERDICT_WIDTH), *_mismatches(value)),
    )


def _verdict(value: Value) -> Iterator[tuple[str, str]]:
    """Yield (label, result)."""
    yield "speedup", f"{value['speedup']:.2f}x over plain"
    if value.get("efficiency") is not None:
        yield (
            "efficiency",
            f"{value['efficiency']:.2f} of tokens per pass x T(1) / T(N), "
            f"passes of {value['plain_pass_seconds']:.3f} and "
            f"{value['speculative_pass_seconds']:.3f} s",
        )
    fraction = value.get("storage_roofline_fraction")
    if fraction is None:
        yield "storage", "nothing is streamed: the model fits in the budget"
    else:
        yield (
            "storage roofline",
            f"{fraction:.2f} of {value['storage_bytes_per_second'] / 1e9:.2f} "
            f"GB/s (plain decode passes; probed with {value['storage_probe']})",
        )
    equal, match = value["prompts_equal"], percent_equal(value.get("token_match"))
    yield "tokens equal", f"{match} ({equal} of {value['n_prompts']} prompts wholly)"
    if lossy_mark(value["speculative"]):
        yield "LOSSY", "--accept-threshold: the speculative output is not the target's own"
    if value.get("draft_model") and "acceptance_rate" in value["speculative"]:
        yield (
            "acceptance rate",
            "of all drafted tokens; a tree drafts several for each position, "
            "of which one at most is right",
        )


def _mismatches(value: Value) -> Iterator[str]:
    """Yield where outputs begin to differ from plain decoding's, and why."""
    ties = {tie["prompt"]: tie for tie in value.get("near_ties", ())}
    not_explained = ": an ERROR, the target is exact" if value.get("is_exact") else ""
    for prompt, position in value.get("first_mismatches", {}).items():
        why = f": {_near_tie(ties[prompt])}" if prompt in ties else not_explained
        yield f"  {prompt} differs from token {position} on{why}"


def _near_tie(tie: Value) -> str:
    verdict = "a near tie" if tie["explained"] else "NOT a near tie"
    return f"{verdict}, logits {tie['gap']:.3g} apart, drift between passes {tie['drift']:.3g}"


# --- budgets, storages, trees ---------------------------------------------------------------------

_SWEEP_COLUMNS: Columns = (
    ("tok/s", "tokens_per_second", "{:.2f}", 1.0),
    ("predicted", "predicted_tokens_per_second", "{:.2f}", 1.0),
    ("tok/pass", "mean_acceptance_length", "{:.2f}", 1.0),
    ("GB/pass", "bytes_per_pass", "{:.2f}", 1e9),
    ("anon GiB", "peak_anonymous_bytes", "{:.2f}", GIB),
    ("peak GiB", "peak_rss_bytes", "{:.2f}", GIB),
    ("prompts", "n_prompts", "{:.0f}", 1.0),
    ("tokens", "n_tokens", "{:.0f}", 1.0),
)
_SETTING = ("budget", "storage MB/s", "tree")


def _sweep(value: Value) -> Iterator[Table]:
    lines = value["settings"]
    targets = {str(line["model"]) for line in lines if "model" in line}
    setting = partial(_setting, names_target=len(targets) > 1)
    yield Table(
        "Sweep",
        (*_SETTING, *headings(_SWEEP_COLUMNS), "equal sequences", "exit"),
        tuple(
            (*setting(line), *cells(line, _SWEEP_COLUMNS), _equal_outputs(line), exit_of(line))
            for line in lines
        ),
    )
    predicted = [line for line in lines if line.get("prediction")]
    if predicted:
        yield _prediction(predicted, setting)


def _setting(line: Value, names_target: bool) -> tuple[str, ...]:
    setting = line["setting"]
    budget = format_bytes(setting["memory_budget_bytes"])
    if names_target:
        budget = f"{Path(line['model']).name}, {budget}"
    return budget, _storage(setting["storage_mbps"]), series_name(setting["num_draft_tokens"])


def _equal_outputs(line: Value) -> str:
    """Return how many outputs equal those of the first setting or --reference; "-" if unknown."""
    equal = f"{line['n_equal_outputs']} of {line['num_seqs']}" if line.get("num_seqs") else "-"
    return equal + lossy_mark(line)


def _prediction(lines: Sequence[Value], setting: Callable[[Value], tuple[str, ...]]) -> Table:
    what = ("predicted", "measured", "error")
    keys = ("pass_seconds", "tokens_per_second")
    rows = []
    for line in lines:
        prediction = line["prediction"]
        shown = [str(prediction.get("num_tokens", prediction.get("n_rows")))]
        for key in keys:
            shown += [f"{prediction[side][key]:.3f}" for side in ("predicted", "measured")]
            shown.append(f"{prediction['error'][key]:+.1%}")
        rows.append((*setting(line), *shown))
    largest = max(abs(e) for line in lines for e in line["prediction"]["error"].values())
    pairs = tuple(f"{name}, {item}" for name in ("s/pass", "tok/s") for item in what)
    note = (
        f"Largest error {largest:.1%}, of seconds per pass and tokens per second; tokens per pass "
        "and runs of the draft are the measured ones."
    )
    return Table("Prediction", (*_SETTING, "tokens", *pairs), tuple(rows), notes=(note,))


# --- sizes of trees -------------------------------------------------------------------------------

_POLICY_COLUMNS: Columns = (
    ("tok/s", "tokens_per_second", "{:.2f}", 1.0),
    ("tok/pass", "mean_acceptance_length", "{:.2f}", 1.0),
    ("tree nodes", "mean_tree_nodes", "{:.1f}", 1.0),
    ("drafting", "draft_share", "{:.0%}", 1.0),
)


def _policy(value: Value) -> Iterator[Table]:
    note = (
        f"auto is {value['auto_versus_best_fixed']:.3f} x the best fixed size "
        f"({value['best_fixed']})"
    )
    if value["auto_versus_plain"] is not None:
        note += f", {value['auto_versus_plain']:.3f} x plain decoding"
    yield Table(
        "Sizes of trees",
        ("mode", *headings(_POLICY_COLUMNS)),
        tuple(
            (row["mode"] + lossy_mark(row), *cells(row, _POLICY_COLUMNS)) for row in value["rows"]
        ),
        notes=(note,),
    )


# --- speedup against acceptance -------------------------------------------------------------------

_CURVE_COLUMNS: Columns = (
    ("tok/s", "tokens_per_second", "{:.2f}", 1.0),
    ("speedup", "speedup", "{:.2f}x", 1.0),
    ("model", "predicted_speedup", "{:.2f}x", 1.0),
    ("T(1) s", "plain_pass_seconds", "{:.3f}", 1.0),
    ("T(N) s", "pass_seconds", "{:.3f}", 1.0),
    ("efficiency", "efficiency", "{:.2f}", 1.0),
)


def _curve(value: Value) -> Iterator[Table]:
    best = ", ".join(
        f"{item['rate']:.2f}: {item['n_draft_tokens']} ({item['speedup']:.2f}x)"
        for item in value["best"]
    )
    decoded = (
        f"{value['n_prompts']} x {value['max_tokens']} tokens, greedy; every draft "
        "token is right with the probability `rate`"
    )
    yield Table(
        "Speedup against acceptance",
        ("rate", "chain", "tok/pass", "expected", *headings(_CURVE_COLUMNS)),
        tuple(
            (
                f"{point['rate']:.2f}",
                str(point["n_draft_tokens"]),
                f"{point['tokens_per_pass']:.2f}",
                f"{point['expected_tokens_per_pass']:.2f} ± {point['standard_error']:.2f}",
                *cells(point, _CURVE_COLUMNS),
            )
            for point in value["points"]
        ),
        labelled(
            (
                ("target", Path(value["model"]).name),
                ("budget", pinned(value)),
                ("prompts", decoded),
            )
        ),
        (f"fastest chain by rate: {best}", *_difference_lines(value)),
    )


def _difference_lines(value: Value) -> Iterator[str]:
    """Yield how many outputs equal plain decoding's, and where and why others differ."""
    differences = value["differences"]
    n_equal = value["num_seqs"] - len(differences)
    yield f"sequences equal to plain decoding's: {n_equal} of {value['num_seqs']}"
    for prompt, position in dict.fromkeys(
        (difference["prompt"], difference["position"]) for difference in differences
    ):
        same = [o for o in differences if (o["prompt"], o["position"]) == (prompt, position)]
        why = "an ERROR, the target is exact"
        if "explained" in same[0]:
            why = _near_tie({**same[0], "explained": all(item["explained"] for item in same)})
        yield f"  {prompt} differs from token {position} on, {len(same)} times: {why}"
