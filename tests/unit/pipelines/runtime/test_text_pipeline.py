"""The pipeline on random models, against transformers and against itself in other batches."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.request_failures import RequestFailures
from pipelines.runtime.text_pipeline import TextGenerationPipeline, layout_of
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.eos import EOSTracker
from pipelines.types.sampling import SamplingParams
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import ConfigurationError, InternalError, InvalidRequest
from pronghorn.ids import RequestID
from tests.fakes.tiny_models import SHAPES, tiny_model

BLOCK_TOKENS = 16
AROUND_BLOCKS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 80, 96, 97]


class Tables:
    """Blocks handed out last first, so that no table is contiguous."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))[::2] + list(range(num_blocks))[1::2]
        self._tables: dict[RequestID, list[int]] = {}

    def grow(self, context: TextContext) -> None:
        table = self._tables.setdefault(context.request_id, [])
        while len(table) * BLOCK_TOKENS < len(context.tokens):
            table.append(self._free.pop())

    def table(self, owner: RequestID) -> list[int]:
        return self._tables[owner]


class Engine:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = EngineConfig(str(folder), "tiny", num_blocks=120, block_tokens=BLOCK_TOKENS, **settings)
        self.memory = BlockMemory.create(120, layout_of(self.config).block_bytes)
        self.tables = Tables(120)
        self.pipeline = TextGenerationPipeline(self.config, self.memory, self.tables)
        self.logits: list[np.ndarray] = []
        inner = self.pipeline._decoder.logits

        def kept(step: Any) -> Any:
            self.logits.append(inner(step).copy())
            return self.logits[-1]

        self.pipeline._decoder.logits = kept  # type: ignore[method-assign]

    def step(self, *contexts: TextContext) -> dict[RequestID, Any]:
        for context in contexts:
            self.tables.grow(context)
        return self.pipeline.execute(TextGenerationInputs([list(contexts)]))

    def close(self) -> None:
        self.pipeline.close()
        self.memory.close()


NewEngine = Callable[..., Engine]


@pytest.fixture
def new_engine() -> Iterator[NewEngine]:
    made: list[Engine] = []

    def new(folder: Path, **settings: Any) -> Engine:
        made.append(Engine(folder, **settings))
        return made[-1]

    yield new
    for engine in made:
        engine.close()


@pytest.fixture(scope="module", params=list(SHAPES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, tiny_model(request.param, folder)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("grouped")
    return folder, tiny_model("llama", folder)


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + length).integers(2, 200, size=length)


def context_of(prompt: np.ndarray, **params: Any) -> TextContext:
    sampling = SamplingParams(**({"temperature": 0.0, "seed": 1} | params))
    return TextContext(max_length=250, tokens=TokenBuffer(prompt.copy()), sampling_params=sampling, vocab_size=211)


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        out: np.ndarray = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    return out


def reference_greedy(model: Any, prompt: np.ndarray, count: int) -> list[int]:
    tokens = prompt
    for _ in range(count):
        tokens = np.append(tokens, reference_logits(model, tokens)[-1].argmax())
    return tokens[len(prompt) :].tolist()


class TestParity:
    def test_logits_of_whole_prompts(self, tiny: tuple[Path, Any], new_engine: NewEngine) -> None:
        folder, model = tiny
        engine = new_engine(folder)
        for length in AROUND_BLOCKS:
            engine.step(context_of(prompt_of(length)))
            wanted = reference_logits(model, prompt_of(length))[-1]
            np.testing.assert_allclose(engine.logits[-1][0], wanted, atol=1e-3, err_msg=str(length))

    def test_greedy_tokens_alone_and_in_a_batch(self, tiny: tuple[Path, Any], new_engine: NewEngine) -> None:
        folder, model = tiny
        engine = new_engine(folder, threads=2)
        contexts = [context_of(prompt_of(length)) for length in AROUND_BLOCKS]
        for _ in range(6):
            engine.step(*contexts)
        for context, length in zip(contexts, AROUND_BLOCKS, strict=True):
            assert context.tokens.generated.tolist() == reference_greedy(model, prompt_of(length), 6), length

    @pytest.mark.parametrize("chunks", [(1,), (15, 16), (16, 16, 1), (17, 40), (90, 1)])
    def test_chunks_give_the_logits_of_the_whole(
        self, grouped: tuple[Path, Any], new_engine: NewEngine, chunks: tuple[int, ...]
    ) -> None:
        folder, model = grouped
        engine, context = new_engine(folder), context_of(prompt_of(97))
        for tokens in chunks:
            context.tokens.chunk(tokens)
            assert engine.step(context) == {}
            assert context.tokens.generated_length == 0
        outputs = engine.step(context)
        assert outputs[context.request_id].tokens == context.tokens.generated.tolist()
        np.testing.assert_allclose(engine.logits[-1][0], reference_logits(model, prompt_of(97))[-1], atol=1e-3)

    def test_the_plain_decoder_gives_the_same(self, tiny: tuple[Path, Any], new_engine: NewEngine) -> None:
        """What a GPU runs, on torch's CPU device under another name."""
        folder, _ = tiny
        engines = new_engine(folder), new_engine(folder, device="cpu:0")
        for engine in engines:
            contexts = [context_of(prompt_of(length)) for length in (1, 17, 40)]
            for _ in range(3):
                engine.step(*contexts)
        for ours, plain in zip(*(engine.logits for engine in engines), strict=True):
            np.testing.assert_allclose(ours, plain, atol=1e-3)


class TestBatches:
    def test_a_mixed_batch_gives_each_what_it_gets_alone_to_the_bit(
        self, grouped: tuple[Path, Any], new_engine: NewEngine
    ) -> None:
        alone = new_engine(grouped[0])
        lengths = (5, 33, 64)
        for length in lengths:
            context = context_of(prompt_of(length))
            for _ in range(4):
                alone.step(context)
        together = new_engine(grouped[0], threads=2)
        early, late, chunked = (context_of(prompt_of(length)) for length in lengths)
        together.step(early)
        chunked.tokens.chunk(40)
        together.step(early, late, chunked)  # decoding, a whole prompt, a chunk
        together.step(chunked, early, late)
        assert len(together.logits[1]) == 2
        np.testing.assert_array_equal(together.logits[0][0], alone.logits[0][0])
        np.testing.assert_array_equal(together.logits[1][0], alone.logits[1][0])
        np.testing.assert_array_equal(together.logits[1][1], alone.logits[4][0])
        np.testing.assert_allclose(together.logits[2][0], alone.logits[8][0], atol=1e-4)  # cut elsewhere

    def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(
        self, grouped: tuple[Path, Any], new_engine: NewEngine
    ) -> None:
        texts = []
        for others in (0, 3):
            engine = new_engine(grouped[0])
            mine = context_of(prompt_of(20), temperature=1.3, seed=42)
            batch = [context_of(prompt_of(9 + i), temperature=1.0, seed=i) for i in range(others)]
            for _ in range(12):
                engine.step(*batch, mine)
            texts.append(mine.tokens.generated.tolist())
        assert texts[0] == texts[1]
        assert len(set(texts[0])) > 3

    def test_a_sequence_that_ends_says_so_in_its_output(self, grouped: tuple[Path, Any], new_engine: NewEngine) -> None:
        first = reference_greedy(grouped[1], prompt_of(12), 1)[0]
        context = context_of(prompt_of(12))
        context.eos_tracker = EOSTracker(eos_token_ids={first})
        output = new_engine(grouped[0]).step(context)[context.request_id]
        assert (output.tokens, output.final_status) == ([first], GenerationStatus.END_OF_SEQUENCE)

    def test_an_empty_batch_gives_nothing(self, grouped: tuple[Path, Any], new_engine: NewEngine) -> None:
        assert new_engine(grouped[0]).step() == {}


class TestFailures:
    @pytest.fixture
    def poisoned(self, grouped: tuple[Path, Any], tmp_path: Path) -> Path:
        """Token 210 has a NaN in its embedding."""
        tensors = load_file(grouped[0] / "model.safetensors")
        tensors["model.embed_tokens.weight"][210, 3] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((grouped[0] / "config.json").read_text())
        return tmp_path

    def test_only_the_request_whose_logits_are_not_finite_fails(self, poisoned: Path, new_engine: NewEngine) -> None:
        engine = new_engine(poisoned)
        good, bad = context_of(prompt_of(20)), context_of(np.append(prompt_of(30), 210))
        with pytest.raises(RequestFailures) as caught:
            engine.step(bad, good)
        assert set(caught.value.outputs) == {good.request_id}
        assert isinstance(caught.value.failures[bad.request_id], InternalError)
        assert good.tokens.generated_length == 1
        assert bad.tokens.generated_length == 0
        engine.step(good)
        assert good.tokens.generated_length == 2

    @pytest.mark.parametrize("token", [-1, 211, 2**40])
    def test_a_token_outside_the_vocabulary_fails_its_request_alone(
        self, grouped: tuple[Path, Any], new_engine: NewEngine, token: int
    ) -> None:
        engine = new_engine(grouped[0])
        good, bad = context_of(prompt_of(20)), context_of(np.append(prompt_of(5), token))
        with pytest.raises(RequestFailures, match=f"token {token} is not in the vocabulary") as caught:
            engine.step(bad, good)
        assert isinstance(caught.value.failures[bad.request_id], InvalidRequest)
        assert good.tokens.generated_length == 1

    def test_a_canary_with_broken_weights_is_an_error(self, grouped: tuple[Path, Any], tmp_path: Path) -> None:
        tensors = load_file(grouped[0] / "model.safetensors")
        tensors["model.norm.weight"][0] = float("inf")
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((grouped[0] / "config.json").read_text())
        engine = Engine(tmp_path)
        with pytest.raises(InternalError, match="not finite"):
            engine.pipeline.canary()
        engine.close()

    def test_a_device_that_is_not_there_is_named(self, grouped: tuple[Path, Any]) -> None:
        with pytest.raises(ConfigurationError, match="'meta:broken' cannot be used"):
            Engine(grouped[0], device="meta:broken")


class TestSettings:
    @pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.1), ("float16", 0.02)])
    def test_short_storage_stays_near_float32(
        self, grouped: tuple[Path, Any], new_engine: NewEngine, dtype: str, share: float
    ) -> None:
        engine = new_engine(grouped[0], dtype=dtype)
        context = context_of(prompt_of(50))
        for _ in range(3):
            engine.step(context)
        wanted = reference_logits(grouped[1], context.tokens.all[:-1])
        assert abs(engine.logits[-1][0] - wanted[-1]).max() < share * float(wanted.std())

    def test_layout_and_limits_come_from_the_model(self, grouped: tuple[Path, Any], new_engine: NewEngine) -> None:
        pipeline = new_engine(grouped[0]).pipeline
        assert pipeline.layout.shape == (3, 2, 2, 16, 32)
        assert (pipeline.vocab_size, pipeline.max_length, pipeline.max_batch_size) == (211, 512, 32)
        assert new_engine(grouped[0], max_length=100).pipeline.max_length == 100
        assert new_engine(grouped[0], max_length=10_000).pipeline.max_length == 512

    def test_the_canary_of_a_whole_model_passes(self, grouped: tuple[Path, Any], new_engine: NewEngine) -> None:
        new_engine(grouped[0]).pipeline.canary()

    def test_release_of_an_unknown_request_is_fine(self, grouped: tuple[Path, Any], new_engine: NewEngine) -> None:
        new_engine(grouped[0]).pipeline.release(RequestID())


def test_a_missing_tensor_is_named(grouped: tuple[Path, Any], tmp_path: Path) -> None:
    tensors = load_file(grouped[0] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((grouped[0] / "config.json").read_text())))
    with pytest.raises(ConfigurationError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        Engine(tmp_path)


@pytest.mark.conformance(69)
@pytest.mark.parametrize("chunk", [None, 5, 16])
def test_log_probabilities_of_the_prompt_are_those_of_transformers(
    grouped: tuple[Path, Any], new_engine: NewEngine, chunk: int | None
) -> None:
    folder, model = grouped
    engine, prompt = new_engine(folder), prompt_of(40)
    context = context_of(prompt)
    context.log_probabilities, context.log_probabilities_echo = 2, True
    beside = context_of(prompt_of(7))
    outputs: dict[RequestID, Any] = {}
    while not outputs.get(context.request_id):
        if chunk is not None and context.tokens.active_length > chunk:
            context.tokens.chunk(chunk)
        outputs = engine.step(beside, context)
    found = outputs[context.request_id].prompt_log_probabilities
    logits = torch.from_numpy(reference_logits(model, prompt)).double()
    expected = torch.log_softmax(logits, dim=-1).numpy()[np.arange(39), prompt[1:]]
    assert found.sampled_token_ids == prompt[1:].tolist()
    assert np.abs(np.array(found.token_log_probabilities) - expected).max() < 1e-4
    assert all(2 <= len(entries) <= 3 for entries in found.top_log_probabilities)
    assert engine.step(context)[context.request_id].prompt_log_probabilities is None, "said once"


def test_a_processor_that_fails_or_is_unknown_fails_its_request_alone(
    grouped: tuple[Path, Any], new_engine: NewEngine
) -> None:
    places = {"fail": "tests.fakes.logits_processors:fail", "once": "tests.fakes.logits_processors:no_repeat"}
    engine = new_engine(grouped[0], logits_processors=places)
    broken, unknown, fine = (context_of(prompt_of(9), logits_processors=[n]) for n in ("fail", "nobody", "once"))
    with pytest.raises(RequestFailures) as raised:
        engine.step(broken, unknown, fine)
    assert isinstance(raised.value.failures[broken.request_id], InternalError)
    assert isinstance(raised.value.failures[unknown.request_id], InvalidRequest)
    assert list(raised.value.outputs) == [fine.request_id]
    for _ in range(20):
        engine.step(fine)
    generated = fine.tokens.generated.tolist()
    assert len(set(generated)) == len(generated) == 21
