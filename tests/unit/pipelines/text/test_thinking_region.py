import numpy as np
import pytest

from pipelines.text.thinking_region import ThinkingMarkers, is_thinking

WHOLE = ThinkingMarkers([7], [8])
SPELT = ThinkingMarkers([1, 2, 3], [1, 4, 3])


@pytest.mark.parametrize(
    ("tokens", "markers", "thinking"),
    [
        ([5], WHOLE, False),
        ([5, 7], WHOLE, True),
        ([7, 5, 5], WHOLE, True),
        ([7, 5, 8], WHOLE, False),
        ([7, 8, 5, 7], WHOLE, True),
        ([8], WHOLE, False),
        ([1, 2], SPELT, False),
        ([1, 2, 3], SPELT, True),
        ([1, 2, 1, 2, 3, 9], SPELT, True),
        ([1, 2, 3, 1, 4], SPELT, True),
        ([1, 2, 3, 1, 4, 3], SPELT, False),
    ],
)
def test_the_last_whole_marker_decides(tokens: list[int], markers: ThinkingMarkers, thinking: bool) -> None:
    assert is_thinking(np.array(tokens, dtype=np.int64), markers) is thinking
