from operations.metrics import GAUGES, PREFIX, TOTALS, Metrics, Reading, RequestMetrics
from pronghorn.ledger import Held, Kind
from tests.fakes.metric_samples import samples

READING = Reading(
    gauges={"ready": 1.0, "kv_cache_usage_perc": 0.25},
    held=[Held(Kind.BLOCKS, "a", 3), Held(Kind.BLOCKS, "b", 4)],
    counters={"pull_started": 2, "pull_failed.node_lost": 1},
    totals={"prompt_tokens": 9},
    cache=(16, 128),
)


def test_a_reading_is_shown_under_the_names_that_gateways_know() -> None:
    found = samples(Metrics("decode", {"m": lambda: READING}).text())
    assert found["pronghorn:kv_cache_usage_perc", ""] == 0.25
    assert found["pronghorn:cache_config_info", "block_size=16,num_gpu_blocks=128"] == 1
    assert found["pronghorn:prompt_tokens_total", ""] == 9
    assert found["pronghorn:events_total", "event=pull_failed,reason=node_lost"] == 1
    assert found["pronghorn:events_total", "event=pull_started,reason="] == 2


def test_there_is_a_gauge_for_every_kind_that_can_be_held() -> None:
    found = samples(Metrics("decode", {"m": lambda: READING}).text())
    assert found["pronghorn:held", "kind=blocks"] == 7
    assert {labels for name, labels in found if name == "pronghorn:held"} == {f"kind={kind}" for kind in Kind}


def test_it_is_read_anew_at_each_scrape() -> None:
    ready = iter([1.0, 0.0])
    metrics = Metrics("decode", {"m": lambda: Reading({"ready": next(ready)}, [], {})})
    assert [samples(metrics.text())["pronghorn:ready", ""] for _ in range(2)] == [1.0, 0.0]


def test_two_processes_in_one_interpreter_do_not_share_a_registry() -> None:
    one, other = (Metrics("orchestrator", {"m": lambda: READING}) for _ in range(2))
    RequestMetrics(one).of("m").first_token(0.5)
    RequestMetrics(other)
    assert samples(one.text())["pronghorn:time_to_first_token_seconds_count", ""] == 1
    assert samples(other.text())["pronghorn:time_to_first_token_seconds_count", ""] == 0


def test_every_name_has_a_text() -> None:
    assert all(GAUGES.values()) and all(TOTALS.values()) and PREFIX == "pronghorn:"


def test_each_model_of_a_process_has_its_own_label_in_one_family() -> None:
    readings = {name: (lambda n=n: Reading({"ready": n}, [], {"made": n})) for name, n in (("a", 1.0), ("b", 0.0))}
    metrics = Metrics("orchestrator", readings)
    requests = RequestMetrics(metrics)
    requests.of("b").finished("stop", 1.0)
    text = metrics.text().decode()
    assert text.count("# TYPE pronghorn:ready ") == 1
    assert 'pronghorn:ready{model_name="a",role="orchestrator"} 1.0' in text
    assert 'pronghorn:ready{model_name="b",role="orchestrator"} 0.0' in text
    assert 'pronghorn:events_total{event="made",model_name="a",reason="",role="orchestrator"} 1.0' in text
    assert 'pronghorn:e2e_request_latency_seconds_count{model_name="b",role="orchestrator"} 1.0' in text
    assert 'pronghorn:e2e_request_latency_seconds_count{model_name="a",role="orchestrator"} 0.0' in text
