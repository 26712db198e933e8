from pronghorn.ledger import MEANING, STANDING, Held, Kind, Ledger, counts


def ledger(*held: Held, engine_answered: bool = True) -> Ledger:
    return Ledger("decode-1", "decode", "d" * 32, list(held), engine_answered)


def test_every_kind_says_what_it_means() -> None:
    assert list(MEANING) == list(Kind)


def test_what_stands_is_held_at_rest_and_nothing_else_is() -> None:
    assert ledger(*(Held(kind, "x") for kind in STANDING)).at_rest
    for kind in set(Kind) - STANDING:
        assert not ledger(Held(kind, "x")).at_rest


def test_a_process_whose_engine_is_silent_is_not_known_to_rest() -> None:
    assert not ledger(engine_answered=False).at_rest


def test_counts_add_up_and_name_every_kind() -> None:
    found = counts([Held(Kind.BLOCKS, "a", 3), Held(Kind.BLOCKS, "b", 2), Held(Kind.ATTEMPT, "a")])
    assert found[Kind.BLOCKS] == 5 and found[Kind.ATTEMPT] == 1 and found[Kind.FLIGHT] == 0
    assert set(found) == set(Kind)
