"""Prometheus metrics: the engine's own values at the time of the request."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from engines import router_of_one
from prometheus_client.parser import text_string_to_metric_families

from specdec.metrics.stats import EngineStats, GenerationStats
from specdec.serve.admission import AdmissionLimiter
from specdec.serve.metrics import Metrics
from specdec.serve.process.messages import Beat


def samples(metrics: Metrics) -> dict[str, float]:
    actual = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = "".join(f" {value}" for value in sample.labels.values())
            actual[sample.name + labels] = sample.value
    return actual


def test_engine_metrics_are_read_and_not_counted_again() -> None:
    router = router_of_one()
    (runner,) = router.runners
    (engine,) = runner.engines
    metrics = Metrics(AdmissionLimiter(4), router, lambda: "ready")
    assert samples(metrics)["specdec_passes_total"] == 0
    stats = EngineStats(
        passes=3, drafted_tokens=7, kv_shared_bytes=4096, preempted=2, accepted_by_depth=(5, 1)
    )
    engine.beat = Beat(stats, 1 << 40)
    metrics.add_sequence(
        runner, GenerationStats(generated_tokens=9, passes=9, time_to_first_token=0.7)
    )
    actual = samples(metrics)
    assert actual["specdec_passes_total"] == 3
    assert actual["specdec_resident_bytes"] > 1 << 40, "the server's own memory counts, too"
    assert actual["specdec_generated_tokens_total"] == 0
    assert actual["specdec_spec_decode_num_draft_tokens_total"] == 7
    assert actual["specdec_spec_decode_num_accepted_tokens_per_pos_total 0"] == 5
    assert actual["specdec_spec_decode_num_accepted_tokens_per_pos_total 1"] == 1
    assert actual["specdec_kv_shared_bytes"] == 4096
    assert actual["specdec_preempted_total"] == actual["specdec_set_aside_total"] == 2
    assert actual["specdec_time_to_first_token_seconds_count"] == 1
