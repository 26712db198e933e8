from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash
from kvcache.journal import AllRemoved, CacheJournal, Removed, RunStored

A, B, C, D = (BlockHash(letter.encode() * 32) for letter in "ABCD")


def test_what_follows_one_another_in_a_chain_is_one_run() -> None:
    journal = CacheJournal()
    journal.stored(A, None)
    journal.stored(B, A)
    journal.stored(D, A)
    assert journal.take() == [RunStored(None, [A, B]), RunStored(A, [D])]
    assert journal.take() == []


def test_a_hash_is_gone_with_its_last_block_in_whatever_pool() -> None:
    journal = CacheJournal()
    journal.stored(A, None)
    journal.stored(A, None)
    journal.stored(B, A)
    journal.take()
    journal.removed(A)
    assert journal.take() == []
    journal.removed(B)
    assert journal.take() == [Removed([B])]


def test_pools_that_hold_nothing_any_more_say_so_in_one_word() -> None:
    journal = CacheJournal()
    for block_hash, parent in ((A, None), (B, A)):
        journal.stored(block_hash, parent)
    for block_hash in (B, A):
        journal.removed(block_hash)
    journal.stored(C, None)
    assert journal.take() == [AllRemoved(), RunStored(None, [C])]


def test_contents_give_runs_of_at_most_so_many_blocks_parents_first() -> None:
    contents = CacheContents()
    contents.apply([RunStored(None, [A, B, C]), RunStored(B, [D])])
    assert list(contents.runs(2)) == [RunStored(None, [A, B]), RunStored(B, [C]), RunStored(B, [D])]
    assert contents.leading([A, B, D, C]) == 4 and contents.leading([A, BlockHash(b"?" * 32), B]) == 1
    contents.apply([Removed([B])])
    assert contents.leading([A, B]) == 1 and len(contents) == 3
