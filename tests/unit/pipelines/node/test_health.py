import pytest

from pipelines.node.health import unhealthy_reason


def reason(**changes: object) -> str | None:
    facts: dict[str, object] = {"started": True, "ended": None, "report_age_s": 0.0, "stall_timeout_s": 60.0}
    return unhealthy_reason(**(facts | changes))  # type: ignore[arg-type]  # the names are the function's own


def test_an_engine_that_reports_is_healthy_however_long_its_step_takes() -> None:
    assert reason() is None
    assert reason(report_age_s=59.9) is None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"started": False}, "not started"),
        ({"ended": "killed by signal 9"}, "killed by signal 9"),
        ({"report_age_s": 61.0}, "61.0 s"),
    ],
)
def test_an_unhealthy_engine_is_named_with_its_reason(facts: dict[str, object], said: str) -> None:
    assert said in str(reason(**facts))
