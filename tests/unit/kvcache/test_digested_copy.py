import itertools
import mmap

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcache import digested_copy
from kvcache.digested_copy import copy_all_digested, copy_digested

SOURCE = memoryview(bytes((i * 131 + (i >> 8) * 7) % 256 for i in range(1 << 17)))
PAGES = memoryview(mmap.mmap(-1, 1 << 17))
"""Its beginning is aligned for any processor."""


def check(size, start, at):
    PAGES[:] = bytes(len(PAGES))
    source = SOURCE[start : start + size]
    assert copy_digested(PAGES[at : at + size], source) == xxhash.xxh3_128_digest(source)
    assert PAGES[at : at + size] == source
    assert not any(PAGES[:at]) and not any(PAGES[at + size : at + size + 4096])


@pytest.mark.parametrize("size", [0, 1, 64, 240, 1024, 1088, 1984, 2048, 2112, 4096, 65_536, 65_600])
@pytest.mark.parametrize("start", [0, 1, 8, 64])
def test_what_is_copied_has_the_librarys_digest(size, start):
    check(size, start, 0)


@given(st.integers(0, 5000), st.integers(0, 70), st.integers(0, 70))
def test_any_length_and_any_place(size, start, at):
    check(size, start, at)


def test_a_destination_of_another_length_is_an_error_and_nothing_is_written():
    PAGES[:2048] = bytes(2048)
    with pytest.raises(ValueError, match="2049 bytes do not go into 2048"):
        copy_digested(PAGES[:2048], SOURCE[:2049])
    assert not any(PAGES[:2048])


@pytest.mark.parametrize("sizes", [[], [2048], [1024, 4096, 65_536, 1088], [2048, 100, 4096], [2048, 2050, 2048]])
def test_many_are_copied_in_one_go_each_with_a_digest_of_its_own(sizes):
    PAGES[:] = bytes(len(PAGES))
    ends = list(itertools.accumulate(sizes, initial=0))
    sources = [SOURCE[3 + start : 3 + end] for start, end in itertools.pairwise(ends)]
    pairs = [(PAGES[start:end], source) for (start, end), source in zip(itertools.pairwise(ends), sources, strict=True)]
    assert copy_all_digested(pairs) == [xxhash.xxh3_128_digest(source) for source in sources]
    assert PAGES[: ends[-1]] == SOURCE[3 : 3 + ends[-1]] and not any(PAGES[ends[-1] :])


def test_it_can_be_prepared_any_number_of_times(monkeypatch):
    calls = []
    compiled = digested_copy._copy_all_digested
    monkeypatch.setattr(digested_copy, "_copy_all_digested", lambda *given: (calls.append(1), compiled(*given)))
    for _ in range(20):
        digested_copy.prepare()
    assert len(calls) == 20, "wherever memory happens to be, it is the compiled code that is called"
    check(4096, 0, 0)
