from typing import Any

import pytest

from cluster.driver import Change
from cluster.rollout import deployed, planned
from pronghorn.errors import ConfigurationError

ARGS = {"prefill": 1, "decode": 2, "orchestrators": 1, "key_prefix": "k", "revision": 3}


def details(
    sizes: dict[str, int] | None = None, args: dict[str, Any] | None = None, **states: dict[str, str]
) -> dict[str, Any]:
    """As Serve tells it."""
    overrides = [{"name": name, "num_replicas": size} for name, size in (sizes or {}).items()]
    return {
        "applications": {
            "app": {
                "deployed_app_config": {"args": args or ARGS, "deployments": overrides},
                "deployments": {
                    name: {"replicas": [{"replica_id": replica, "state": state} for replica, state in of.items()]}
                    for name, of in states.items()
                },
            }
        }
    }


def test_sizes_are_those_of_the_start_until_they_are_changed() -> None:
    assert deployed(details(), "app").sizes == {"prefill": 1, "decode": 2, "orchestrator": 1}
    assert deployed(details({"decode": 4}), "app").sizes == {"prefill": 1, "decode": 4, "orchestrator": 1}


def test_a_change_of_one_size_names_all_of_them_and_leaves_the_arguments() -> None:
    plan = planned(deployed(details({"decode": 4}), "app"), Change(1.0, sizes={"prefill": 2}))
    assert plan.sizes == {"prefill": 2, "decode": 4, "orchestrator": 1}
    assert plan.args == ARGS


def test_a_redeployment_changes_the_arguments_and_keeps_the_sizes() -> None:
    plan = planned(deployed(details({"decode": 4}), "app"), Change(1.0, redeploy=True))
    assert plan.sizes["decode"] == 4
    assert plan.args == {**ARGS, "revision": 4}


def test_a_node_that_is_not_replaced_makes_its_pool_smaller() -> None:
    plan = planned(deployed(details(), "app"), Change(1.0, without="decode-x1"))
    assert plan.sizes == {"prefill": 1, "decode": 1, "orchestrator": 1}


@pytest.mark.parametrize("change", [Change(1.0, sizes={"prefill": 0}), Change(1.0, without="prefill-x1")])
def test_a_pool_is_not_scaled_away(change: Change) -> None:
    with pytest.raises(ConfigurationError, match="prefill is 0; a pool cannot be scaled below 1"):
        planned(deployed(details(), "app"), change)


def test_a_pool_that_was_never_there_is_named() -> None:
    now = deployed(details(args={**ARGS, "prefill": 0}), "app")
    with pytest.raises(ConfigurationError, match="without a prefill pool"):
        planned(now, Change(1.0, sizes={"prefill": 1}))


def test_what_is_missing_is_told_until_nothing_is() -> None:
    plan = planned(deployed(details(), "app"), Change(1.0, sizes={"prefill": 2}))
    rest = {"decode": {"d1": "RUNNING", "d2": "RUNNING"}, "orchestrator": {"o1": "RUNNING"}}
    starting = deployed(details(prefill={"p1": "RUNNING", "p2": "STARTING"}, **rest), "app")
    assert starting.missing(plan, set()) == "prefill 1 of 2 and 1 on their way"
    there = deployed(details(prefill={"p1": "RUNNING", "p2": "RUNNING"}, **rest), "app")
    assert there.missing(plan, set()) == ""
    leaving = deployed(details(prefill={"p1": "RUNNING", "p2": "RUNNING", "p3": "STOPPING"}, **rest), "app")
    assert leaving.missing(plan, set()) == "prefill 2 of 2 and 1 on their way"


def test_a_redeployment_is_through_when_nothing_old_is_left() -> None:
    before = deployed(details(decode={"a": "RUNNING", "b": "RUNNING"}), "app")
    plan = planned(before, Change(1.0, redeploy=True))
    rest = {"prefill": {"p": "RUNNING"}, "orchestrator": {"o": "RUNNING"}}
    half = deployed(details(decode={"a": "RUNNING", "c": "RUNNING"}, **rest), "app")
    assert half.missing(plan, before.replicas) == "decode 1 of 2 and 1 on their way"
    whole = deployed(details(decode={"c": "RUNNING", "d": "RUNNING"}, **rest), "app")
    assert whole.missing(plan, before.replicas) == ""


def test_a_node_is_found_among_the_replicas_by_its_name() -> None:
    now = deployed(details(decode={"x1": "RUNNING", "x2": "STARTING"}), "app")
    assert [now.has_running(f"decode-{name}") for name in ("x1", "x2", "x3")] == [True, False, False]


@pytest.mark.parametrize("found", [{"applications": {}}, {"applications": {"app": {"deployed_app_config": None}}}])
def test_an_application_that_is_not_there_is_said_to_be_absent(found: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="does not run the application 'app'"):
        deployed(found, "app")


SEVERAL = {**ARGS, "models": {"a": {"path": "/a", "decode": 3}, "org/B": {"path": "/b", "prefill": 0}}}


def test_each_model_has_pools_of_its_own_size() -> None:
    sizes = {"decode-a": 3, "prefill-a": 1, "decode-org-b": 2, "orchestrator": 1}
    assert deployed(details(args=SEVERAL), "app").sizes == sizes
    plan = planned(deployed(details(args=SEVERAL), "app"), Change(1.0, sizes={"decode-a": 1}))
    assert plan.sizes == {**sizes, "decode-a": 1}


def test_a_node_that_is_not_replaced_makes_its_models_pool_smaller() -> None:
    now = deployed(details(args=SEVERAL, **{"decode-org-b": {"x1": "RUNNING"}}), "app")
    assert now.has_running("decode-org-b-x1") and not now.has_running("decode-a-x1")
    assert planned(now, Change(1.0, without="decode-org-b-x1")).sizes["decode-org-b"] == 1
    assert planned(now, Change(1.0, without="decode-org-b-x1")).sizes["decode-a"] == 3
