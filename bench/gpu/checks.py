"""Checks of the measurements on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu.settings import Settings
from specdec.run_options import CUDA

_MAX_VERSUS_COPIES = 1.1
_MIN_VERSUS_PLAIN = 8.0
_MIN_VERSUS_PEER = 15.0
_MAX_DRIFT = 1.0
"""Limit relative to the drift between passes of different sizes, for layers that move."""


def checks(settings: Settings, match: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return {"name", "value", "wanted", "holds"} of every check that has a measured value.

    On a CPU only the checks that need no GPU are made.
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
    return [check for check in result if check["value"] is not None]


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return a summary for the terminal."""
    result = [
        f"{'holds ' if check['holds'] else 'FAILS '} {check['name']}: {check['value']:.4g} "
        f"({check['wanted']})"
        for check in report["checks"]
    ]
    note = "" if report["is_measurement"] else " (a test of the suite: the results mean nothing)"
    ended = [f"{name}: {check['exit']}" for name, check in report["sections"].items()]
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
    """Return 1 if all modes gave the same tokens, else 0; None if not measured."""
    equal = result.get("fp32", {}).get("equal")
    return None if equal is None else float(all(equal.values()))


def _versus_peer(decode: Mapping[str, Any], peer: Mapping[str, Any]) -> float | None:
    ours, theirs = _of(decode, "speculative", "tokens_per_second"), peer.get("tokens_per_second")
    return ours / theirs if ours and theirs else None
