from cluster.verify_cases import judge, parity_cases


def test_every_border_is_met_with_every_number_of_warm_blocks() -> None:
    cases = list(parity_cases(16, 100, 1, quick=False))
    met = {(len(case.prompt), case.warm_blocks) for case in cases}
    wanted = {(16 * k + offset, warm) for k in range(1, 7) for offset in (-1, 0, 1) for warm in range(k)}
    assert met == wanted
    assert len(cases) == len(wanted) == len({case.prompt for case in cases})


def test_the_warm_prompt_fills_exactly_the_warm_blocks_and_begins_the_prompt() -> None:
    for case in parity_cases(16, 100, 1, quick=True):
        if case.warm_blocks == 0:
            assert case.warm_prompt is None
        else:
            assert case.warm_prompt == case.prompt[: 16 * case.warm_blocks + 1]


def test_equal_answers_are_equal() -> None:
    assert judge([1, 2], [1, 2], [0.5, 0.5]) == ("equal", None)


def test_a_divergence_at_a_near_tie_is_tolerated_and_no_other() -> None:
    assert judge([1, 2, 3], [1, 5, 6], [0.5, 5e-5, 0.5]) == ("near tie", 1)
    assert judge([1, 2, 3], [1, 5, 6], [0.5, 2e-4, 0.5]) == ("different", 1)


def test_an_answer_that_stops_early_is_different() -> None:
    assert judge([1, 2, 3], [1, 2], [0.0, 0.0, 0.0]) == ("different", 2)
