from pronghorn.counters import Counters


def test_counts_are_kept_by_name_and_reason() -> None:
    counters = Counters()
    counters.count("transfer_refused", "wrong_digest")
    counters.count("transfer_refused", "wrong_digest", n=2)
    counters.count("prefills")
    assert counters.snapshot() == {"transfer_refused.wrong_digest": 3, "prefills": 1}
    assert counters.value("prefills") == 1 and counters.value("transfer_refused") == 0
