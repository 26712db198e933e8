import pytest

from pipelines.runtime.padding import Padding, padding_context
from pipelines.types.batch import BatchType, TextGenerationInputs
from pipelines.types.text_context import TextContext
from tests.fakes.canary_engine import canary_caches, canary_config, canary_context

Batch = TextGenerationInputs[TextContext]


def decoding(name: str) -> TextContext:
    context = canary_context([1, 2], request_id=name)
    context.update(3)
    return context


@pytest.mark.conformance(53)
def test_a_dummy_is_token_0_advanced_once() -> None:
    dummy = padding_context()
    assert dummy._is_padding_ctx and dummy.tokens[:].tolist() == [0, 0]
    assert (dummy.tokens.prompt_length, dummy.tokens.generated_length, dummy.tokens.active_length) == (1, 1, 1)
    assert dummy.request_id != padding_context().request_id


@pytest.mark.conformance(53)
def test_dummies_of_a_batch_are_held_until_the_next_one_is_made() -> None:
    caches, hasher = canary_caches(canary_config(data_parallel=2, num_blocks=4))
    padding = Padding(caches, hasher.root(None), enabled=True)
    first = padding.pad(Batch([[decoding("a"), decoding("b")], []]))
    ids = [context.request_id for context in first.batches[1]]
    assert len(ids) == 2 and all(padding.holds(dummy) for dummy in ids)
    assert [padding.table(dummy)[0] in range(4, 8) for dummy in ids] == [True, True]
    assert caches[1].stats().held == 2 and padding.take_released() == []
    second = padding.pad(Batch([[decoding("a")], [decoding("b")]]))
    assert [len(batch) for batch in second.batches] == [1, 1]
    assert padding.take_released() == ids and caches[1].stats().held == 0


def test_padding_leaves_room_for_what_is_real_to_grow() -> None:
    caches, hasher = canary_caches(canary_config(data_parallel=2, num_blocks=4))
    padding = Padding(caches, hasher.root(None), enabled=True)
    contexts = [[decoding("a"), decoding("b")], [decoding("c")]]
    caches[1].claim("c", hasher.root(None))
    caches[1].reserve("c", 8)
    assert len(padding.pad(Batch(contexts)).batches[1]) == 2, "one of two free blocks is for the dummy"
    assert len(padding.pad(Batch(contexts)).batches[1]) == 1, "the last one is for c"
    assert len(padding.pad(Batch(contexts)).batches[1]) == 2


@pytest.mark.conformance(53)
def test_the_type_of_the_batch_and_its_real_size_stay() -> None:
    caches, hasher = canary_caches(canary_config(data_parallel=2))
    padding = Padding(caches, hasher.root(None), enabled=True)
    padded = padding.pad(Batch([[decoding("a")], []]))
    assert (padded.batch_type, padded.batch_size, len(padded.flat_batch)) == (BatchType.TG, 1, 2)
    prompts = padding.pad(Batch([[canary_context([1])], []]))
    assert [len(batch) for batch in prompts.batches] == [1, 0], "prompts are not padded"
    padding.release()
    assert all(cache.stats().held == 0 for cache in caches)
