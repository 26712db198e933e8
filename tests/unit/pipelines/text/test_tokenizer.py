import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.text.tokenizer import TextTokenizer
from pipelines.types.sampling import SamplingParams, SamplingParamsGenerationConfigDefaults
from pipelines.types.text_request import (
    TextGenerationRequest,
    TextGenerationRequestMessage,
    TextGenerationResponseFormat,
)
from pronghorn.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from pronghorn.ids import RequestID
from tests.fakes.tokenizer_folder import write_tokenizer_folder

END_OF_TEXT, IM_START, IM_END = 0, 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(folder)


def request(**fields: Any) -> TextGenerationRequest:
    return TextGenerationRequest(request_id=RequestID("r"), model_name="m", **fields)


def user(content: Any) -> TextGenerationRequestMessage:
    return TextGenerationRequestMessage(role="user", content=content)


def test_loads_quickly_and_without_torch(folder: Path) -> None:
    program = (
        "import sys; from pipelines.text.detokenizer import IncrementalDetokenizer; "
        "from pipelines.text.tokenizer import TextTokenizer; "
        f"t = TextTokenizer.from_folder({str(folder)!r}); t.encode('x'); "
        "print([m for m in ('torch', 'numba', 'ray', 'grpc', 'redis') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_text_round_trip(tokenizer: TextTokenizer) -> None:
    text = "why is the sky blue? 你好 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_facts_from_the_folder(tokenizer: TextTokenizer) -> None:
    assert tokenizer.vocab_size == 320
    assert tokenizer.eos_ids == {IM_END}
    assert tokenizer.special_ids == {END_OF_TEXT, IM_START, IM_END}
    assert tokenizer.generation_defaults.stop_token_ids == [IM_END, END_OF_TEXT]
    assert tokenizer.generation_defaults.temperature == 0.5


def test_a_folder_may_hold_tokenizer_json_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    bare = TextTokenizer.from_folder(tmp_path)
    assert bare.eos_ids == frozenset() and bare.vocab_size <= 300
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.apply_template([user("hi")])


def test_a_template_in_the_older_place(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path, template=None)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": templates}))
    assert TextTokenizer.from_folder(tmp_path).apply_template([user("hi")]) == "<s>yes"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_tokenizer_folder(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ConfigurationError, match=name):
        TextTokenizer.from_folder(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path)


def test_a_broken_template_stops_the_start(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path, template="{% for %}")
    with pytest.raises(ConfigurationError, match="chat template"):
        TextTokenizer.from_folder(tmp_path)


# --- template --------------------------------------------------------------------------------------------------------


def test_template(tokenizer: TextTokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.apply_template([user(parts)]) == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    without = tokenizer.apply_template([user("a")], options={"add_generation_prompt": False})
    assert without == "<|im_start|>user\na<|im_end|>\n"


def test_a_templates_own_refusal_is_told(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="a tool message needs a tool_call_id") as caught:
        tokenizer.apply_template([TextGenerationRequestMessage(role="tool", content="x")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tools", "conversations", "return_assistant_tokens_mask"]
)
def test_options_cannot_replace_the_template_or_the_messages(tokenizer: TextTokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        tokenizer.apply_template([user("a")], options={name: "{{ 7 * 7 }}"})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__()[0] }}",
        "{{ undefined_name.field }}",
        "{{ 'a' + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_is_caged_and_its_faults_are_typed(tmp_path: Path, template: str) -> None:
    write_tokenizer_folder(tmp_path, template=template)
    with pytest.raises(InvalidRequest, match="chat template"):
        TextTokenizer.from_folder(tmp_path).apply_template([user("a")])


def test_parts_that_are_not_text_are_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="text only.*image"):
        tokenizer.new_context(request(messages=[user([{"type": "image"}])], images=[b"x"]), 64)


# --- contexts --------------------------------------------------------------------------------------------------------


def test_a_chat_becomes_a_context(tokenizer: TextTokenizer) -> None:
    made = tokenizer.new_context(
        request(
            messages=[user("hi")],
            logprobs=2,
            cache_salt="s",
            dkv_cache_hint={"version": 1},
            target_endpoint="prefill-1",
            sampling_params=SamplingParams(stop=["END"], max_new_tokens=5),
        ),
        max_length=100,
    )
    assert tokenizer.decode(made.tokens.all.tolist(), skip_special_tokens=False) == tokenizer.apply_template(
        [user("hi")]
    )
    assert made.tokens[0] == IM_START
    assert made.max_length == len(made.tokens) + 5 and made.original_prompt_length == len(made.tokens)
    assert made.eos_tracker.eos_token_ids == {IM_END, END_OF_TEXT}
    assert made.eos_tracker.eos_sequences == [tokenizer.encode("END")]
    assert made.eos_tracker.eos_stop_strings == ["END"]
    assert (made.log_probabilities, made.cache_salt, made.vocab_size) == (2, "s", 320)
    assert made.external_block_metadata == {"version": 1} and made.target_endpoint is None
    assert made.request_id == RequestID("r")


@pytest.mark.conformance(23)
def test_length(tokenizer: TextTokenizer) -> None:
    prompt = request(prompt=[5] * 10)
    assert tokenizer.new_context(prompt, 100).max_length == 100
    assert tokenizer.new_context(prompt, 10).max_length == 10
    short = SamplingParamsGenerationConfigDefaults(max_new_tokens=3)
    assert tokenizer.new_context(prompt, 100, short).max_length == 13
    asked = request(prompt=[5] * 10, sampling_params=SamplingParams(max_new_tokens=0))
    assert tokenizer.new_context(asked, 100, short).max_length == 10
    with pytest.raises(ContextLengthExceeded, match="10 tokens.*at most 9") as caught:
        tokenizer.new_context(prompt, 9)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


@pytest.mark.parametrize("asked", [{"prompt": "fox " * 2**20}, {"messages": [user("fox " * 2**20)]}])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tokenizer: TextTokenizer, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", None)  # which would cost a hundred times the text's memory
    with pytest.raises(ContextLengthExceeded, match="at least [0-9]+ tokens.*at most 100") as caught:
        tokenizer.new_context(request(**asked), 100)
    assert caught.value.param == next(iter(asked))


def test_the_longest_text_that_could_fit_is_tokenised(tokenizer: TextTokenizer) -> None:
    longest = "<|endoftext|>"
    assert len(tokenizer.new_context(request(prompt=longest * 100), 100).tokens) == 100
    with pytest.raises(ContextLengthExceeded, match="101 tokens"):
        tokenizer.new_context(request(prompt=longest * 100 + "x"), 100)


def test_min_new_tokens_beyond_the_room_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="min_new_tokens"):
        tokenizer.new_context(request(prompt=[5], sampling_params=SamplingParams(min_new_tokens=10)), 10)


@pytest.mark.conformance(24)
def test_stop_ids_of_a_user_replace_the_files(tokenizer: TextTokenizer) -> None:
    made = tokenizer.new_context(request(prompt="x", sampling_params=SamplingParams(stop_token_ids=[9])), 10)
    assert made.eos_tracker.eos_token_ids == {IM_END, 9}


@pytest.mark.conformance(24)
def test_ignore_eos_keeps_strings(tokenizer: TextTokenizer) -> None:
    params = SamplingParams(ignore_eos=True, stop=["END"], stop_token_ids=[9])
    made = tokenizer.new_context(request(prompt="x", sampling_params=params), 10)
    assert made.eos_tracker.eos_token_ids == set() and made.eos_tracker.eos_sequences == []
    assert made.eos_tracker.eos_stop_strings == ["END"] and made.ignore_eos


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "needs a prompt or messages"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [320]}, "prompt is 320; it must be token ids, whole numbers from 0 to 319"),
        ({"prompt": [-1]}, "from 0 to 319"),
        ({"prompt": [True]}, "from 0 to 319"),
    ],
)
def test_what_cannot_be_done_is_refused(tokenizer: TextTokenizer, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        tokenizer.new_context(request(**fields), 64)


@pytest.mark.parametrize(
    ("format", "schema", "grammar"),
    [
        (None, False, False),
        (TextGenerationResponseFormat("text"), False, False),
        (TextGenerationResponseFormat("json_schema", json_schema={}), True, False),
        (TextGenerationResponseFormat("grammar", grammar='start: "a"'), False, True),
        (TextGenerationResponseFormat("grammar", json_schema={}, grammar='start: "a"'), False, True),
    ],
)
def test_a_format_crosses_as_what_is_enforced(
    tokenizer: TextTokenizer, format: TextGenerationResponseFormat | None, schema: bool, grammar: bool
) -> None:
    context = tokenizer.new_context(request(prompt="x", response_format=format), 64)
    assert (context.json_schema is not None, context.grammar is not None) == (schema, grammar)
