import mmap

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcache.digested_copy import copy_digested, prepare

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


def test_it_can_be_prepared_any_number_of_times():
    prepare()
    prepare()
    check(4096, 0, 0)
