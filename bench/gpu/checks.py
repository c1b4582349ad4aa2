"""What the measurements on a GPU are held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu.settings import Settings
from specdec.run_options import CUDA

_MAX_VERSUS_COPIES = 1.1
_MIN_VERSUS_PLAIN = 8.0
_MIN_VERSUS_PEER = 15.0
_MAX_DRIFT = 1.0
"""Of the rows' own drift: layers that move may differ by as much as passes of other sizes do."""


def checks(settings: Settings, match: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{"name", "value", "wanted", "holds"} of everything that was measured; the rest is left out.

    On a CPU only what needs no GPU is held against anything.
    """
    decode, tiers = match.get("decode", {}), match.get("three tiers", {})
    result = [_at_least("fp32 tokens are equal", _equal(match), 1.0)]
    rows, largest = (match.get("drift", {}).get(k) for k in ("drift_of_rows", "largest_difference"))
    if rows is not None and largest is not None:
        result.append(_at_most("bf16 logits of moving layers", largest, _MAX_DRIFT * rows))
    if settings.device == CUDA:
        result.append(
            _at_most(
                "plain pass / copies alone", _of(decode, "pass", "versus_copies"),
                _MAX_VERSUS_COPIES,
            )
        )  # fmt: skip
        result.append(
            _at_most(
                "plain pass / copies or reads, three tiers",
                _of(tiers, "pass", "versus_the_slower"),
                _MAX_VERSUS_COPIES,
            )
        )
        result.append(
            _at_least(
                "speculative / plain", decode.get("speculative_versus_plain"), _MIN_VERSUS_PLAIN
            )
        )
        result.append(
            _at_least(
                "speculative / accelerate", _versus_peer(decode, match.get("peer", {})),
                _MIN_VERSUS_PEER,
            )
        )  # fmt: skip
        for name, section in (("24 GiB", decode), ("12 GiB", tiers)):
            peak, budget = (
                _of(section, "speculative", key) for key in ("vram_peak_bytes", "vram_budget_bytes")
            )
            if budget:
                result.append(_at_most(f"VRAM peak, host of {name}", peak, budget))
    return [item for item in result if item["value"] is not None]


def lines(report: Mapping[str, Any]) -> list[str]:
    """For the user."""
    result = [
        f"{'holds ' if item['holds'] else 'FAILS '} {item['name']}: {item['value']:.4g} "
        f"({item['wanted']})"
        for item in report["checks"]
    ]
    note = "" if report["is_measurement"] else " (a test of the suite: the figures mean nothing)"
    ended = [f"{name}: {item['exit']}" for name, item in report["sections"].items()]
    return [", ".join(ended) + note, *result]


def _at_least(name: str, value: float | None, minimum: float) -> dict[str, Any]:
    holds = value is not None and value >= minimum
    return {"name": name, "value": value, "wanted": f"at least {minimum:.4g}", "holds": holds}


def _at_most(name: str, value: float | None, limit: float) -> dict[str, Any]:
    holds = value is not None and value <= limit
    return {"name": name, "value": value, "wanted": f"at most {limit:.4g}", "holds": holds}


def _of(section: Mapping[str, Any], part: str, key: str) -> Any:
    return section.get(part, {}).get(key)


def _equal(result: Mapping[str, Mapping[str, Any]]) -> float | None:
    """1 where all ways gave the same tokens."""
    equal = result.get("fp32", {}).get("equal")
    return None if equal is None else float(all(equal.values()))


def _versus_peer(decode: Mapping[str, Any], peer: Mapping[str, Any]) -> float | None:
    ours, theirs = _of(decode, "speculative", "tokens_per_second"), peer.get("tokens_per_second")
    return ours / theirs if ours and theirs else None
