"""What is counted comes out at /metrics as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway_app.metrics import MOST_VALUES, Metrics


def read(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and sorted label values of each sample, as a scraper takes them in."""
    content, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(content.decode())
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.values()))): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_calls_in_flight_go_up_and_down_and_outcomes_are_counted() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.started()
    metrics.ended("openai.chat", "completed")
    metrics.ended("google.generate", "engine_unavailable")
    found = read(metrics)
    assert found["polar_gateway_calls_in_flight", ()] == 1
    assert found["polar_gateway_calls_total", ("completed", "openai.chat")] == 1
    assert found["polar_gateway_calls_total", ("engine_unavailable", "google.generate")] == 1


def test_each_count_has_its_series() -> None:
    metrics = Metrics()
    metrics.refused("too_many_calls")
    metrics.tokens(prompt=200, sampled=32)
    metrics.tokens(prompt=10, sampled=0)
    metrics.repeated("joined")
    metrics.repeated("replayed")
    metrics.repeated("replayed")
    metrics.auxiliary("claude_code.title")
    metrics.split('a "quoted"\nreason \\')
    found = read(metrics)
    assert found["polar_gateway_refusals_total", ("too_many_calls",)] == 1
    assert found["polar_gateway_tokens_total", ("prompt",)] == 210
    assert found["polar_gateway_tokens_total", ("sampled",)] == 32
    assert found["polar_gateway_retries_total", ("joined",)] == 1
    assert found["polar_gateway_retries_total", ("replayed",)] == 2
    assert found["polar_gateway_auxiliary_calls_total", ("claude_code.title",)] == 1
    assert found["polar_gateway_history_splits_total", ('a "quoted"\nreason \\',)] == 1


def test_times_fall_into_buckets() -> None:
    metrics = Metrics()
    metrics.first_token(0.0025)
    metrics.first_token(-0.001)
    metrics.total(7.0)
    metrics.published("call.started", 0.004)
    found = read(metrics)
    assert found["polar_gateway_added_seconds_bucket", ("0.002", "first_token")] == 1, "a clock's jitter is no time"
    assert found["polar_gateway_added_seconds_bucket", ("0.003", "first_token")] == 2
    assert found["polar_gateway_added_seconds_sum", ("first_token",)] == 0.0025
    assert found["polar_gateway_added_seconds_bucket", ("5.0", "end")] == 0
    assert found["polar_gateway_added_seconds_bucket", ("+Inf", "end")] == 1
    assert found["polar_gateway_publish_seconds_count", ("call.started",)] == 1


def test_the_counts_that_nothing_has_touched_are_there_as_zero() -> None:
    found = read(Metrics())
    assert found["polar_gateway_tokens_total", ("sampled",)] == 0
    assert found["polar_gateway_retries_total", ("joined",)] == 0
    assert found["process_resident_memory_bytes", ()] > 0


def test_a_label_has_so_many_values() -> None:
    metrics = Metrics()
    for number in range(MOST_VALUES + 5):
        metrics.split(f"reason {number}")
    metrics.split("reason 0")
    found = {labels: value for (name, labels), value in read(metrics).items() if name.endswith("history_splits_total")}
    assert len(found) == MOST_VALUES + 1
    assert found["other",] == 5
    assert found["reason 0",] == 2


def test_two_gateways_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.started()
    assert read(other)["polar_gateway_calls_in_flight", ()] == 0
