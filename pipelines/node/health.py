"""Whether a node may say that it is healthy. Pure: ages and facts in, a reason or None out.

Busy is never dead: only an engine that has ended, or that reports nothing at all within its bound, is unhealthy.
An engine reports at least once a step and, idle, once per `EngineConfig.report_period_s`.
"""


def unhealthy_reason(*, started: bool, ended: str | None, report_age_s: float, stall_timeout_s: float) -> str | None:
    """Why the node is unhealthy; None where it is healthy. `ended` is the engine's last word, if it has ended."""
    if not started:
        return "the engine has not started yet"
    if ended is not None:
        return f"the engine has ended: {ended}"
    if report_age_s > stall_timeout_s:
        return f"the engine has reported nothing for {report_age_s:.1f} s (bound {stall_timeout_s:.1f} s)"
    return None
