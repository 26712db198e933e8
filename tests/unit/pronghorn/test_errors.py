import inspect

import pytest

from pronghorn import errors
from pronghorn.errors import ErrorRecord, InternalError, NodeLost, Overloaded, PronghornError, from_record

LEAVES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, PronghornError)]


@pytest.mark.parametrize("cls", LEAVES, ids=lambda c: c.__name__)
def test_every_error_crosses_a_process_unchanged(cls: type[PronghornError]) -> None:
    error = from_record(cls("why", code="c", param="p", retry_after_s=2.0).record())
    assert type(error) is cls
    assert (error.message, error.code, error.param, error.retry_after_s) == ("why", "c", "p", 2.0)


def test_an_unknown_kind_becomes_an_internal_error() -> None:
    assert type(from_record(ErrorRecord("FromTheFuture", "why"))) is InternalError


def test_the_drawn_tree_names_every_class_with_its_status() -> None:
    drawn = errors.__doc__ or ""
    for cls in LEAVES:
        assert cls.__name__ in drawn
    for line in drawn.splitlines():
        words = line.replace("|", " ").replace("+--", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            assert getattr(errors, words[0]).http_status == int(words[1]), line


def test_only_errors_that_another_node_may_cure_are_retryable() -> None:
    assert NodeLost("x").retryable
    assert not Overloaded("x").retryable
