"""What the measurements on a GPU are held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu.settings import Settings
from specdec.run_options import CUDA

_MOST_VERSUS_COPIES = 1.1
_LEAST_VERSUS_PLAIN = 8.0
_LEAST_VERSUS_PEER = 15.0
_MOST_DRIFT = 1.0
"""Of the rows' own drift: layers that move may differ by as much as passes of other sizes do."""


def checks(settings: Settings, found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{"name", "value", "wanted", "holds"} of everything that was measured; the rest is left out.

    On a CPU only what needs no GPU is held against anything.
    """
    decode, tiers = found.get("decode", {}), found.get("three tiers", {})
    result = [_at_least("fp32 tokens are equal", _equal(found), 1.0)]
    rows, largest = (found.get("drift", {}).get(k) for k in ("drift_of_rows", "largest_difference"))
    if rows is not None and largest is not None:
        result.append(_at_most("bf16 logits of moving layers", largest, _MOST_DRIFT * rows))
    if settings.device == CUDA:
        result.append(
            _at_most(
                "plain pass / copies alone", _of(decode, "pass", "versus_copies"),
                _MOST_VERSUS_COPIES,
            )
        )  # fmt: skip
        result.append(
            _at_most(
                "plain pass / copies or reads, three tiers",
                _of(tiers, "pass", "versus_the_slower"),
                _MOST_VERSUS_COPIES,
            )
        )
        result.append(
            _at_least(
                "speculative / plain", decode.get("speculative_versus_plain"), _LEAST_VERSUS_PLAIN
            )
        )
        result.append(
            _at_least(
                "speculative / accelerate", _versus_peer(decode, found.get("peer", {})),
                _LEAST_VERSUS_PEER,
            )
        )  # fmt: skip
        for name, section in (("24 GiB", decode), ("12 GiB", tiers)):
            peak, budget = (
                _of(section, "speculative", key) for key in ("vram_peak_bytes", "vram_budget_bytes")
            )
            if budget:
                result.append(_at_most(f"VRAM peak, host of {name}", peak, budget))
    return [one for one in result if one["value"] is not None]


def lines(report: Mapping[str, Any]) -> list[str]:
    """For the user."""
    found = [
        f"{'holds ' if one['holds'] else 'FAILS '} {one['name']}: {one['value']:.4g} "
        f"({one['wanted']})"
        for one in report["checks"]
    ]
    note = "" if report["is_measurement"] else " (a test of the suite: the figures mean nothing)"
    ended = [f"{name}: {one['exit']}" for name, one in report["sections"].items()]
    return [", ".join(ended) + note, *found]


def _at_least(name: str, value: float | None, least: float) -> dict[str, Any]:
    holds = value is not None and value >= least
    return {"name": name, "value": value, "wanted": f"at least {least:.4g}", "holds": holds}


def _at_most(name: str, value: float | None, most: float) -> dict[str, Any]:
    holds = value is not None and value <= most
    return {"name": name, "value": value, "wanted": f"at most {most:.4g}", "holds": holds}


def _of(section: Mapping[str, Any], part: str, key: str) -> Any:
    return section.get(part, {}).get(key)


def _equal(found: Mapping[str, Mapping[str, Any]]) -> float | None:
    """1 where all ways gave the same tokens."""
    equal = found.get("fp32", {}).get("equal")
    return None if equal is None else float(all(equal.values()))


def _versus_peer(decode: Mapping[str, Any], peer: Mapping[str, Any]) -> float | None:
    ours, theirs = _of(decode, "speculative", "tokens_per_second"), peer.get("tokens_per_second")
    return ours / theirs if ours and theirs else None
