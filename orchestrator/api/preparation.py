"""From the body of a request to the sequences to generate: checked, templated, tokenised, with a deadline each.

Pure and synchronous; `workshop.py` runs it off the event loop. Headers win over the body's fields of the same meaning.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgspec

from orchestrator.api.body import check_fields
from orchestrator.api.history import told_in_words, turns
from orchestrator.api.reading import Reading
from orchestrator.api.request_id import keys, required_usable
from orchestrator.api.responses_input import as_chat, in_words_of_responses, repeated
from orchestrator.api.responses_schema import RESPONSES_NOT_YET, ResponsesRequest
from orchestrator.api.schema import (
    CHAT_NOT_YET,
    COMPLETION_NOT_YET,
    MAX_HINT_BYTES,
    MAX_SALT_CHARS,
    MAX_SESSION_CHARS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationBody,
)
from orchestrator.api.settings import ApiSettings
from orchestrator.api.structure import Structure, Structurer, shown_tool
from orchestrator.api.structure_schema import ToolDefinition
from orchestrator.api.thinking import template_options
from orchestrator.ports import GenerationJob
from pipelines.text.reasoning_parser import Thinks, reasoning_format
from pipelines.text.tokenizer import TextTokenizer
from pipelines.text.tool_format import Tool, tool_format
from pipelines.types.invalid_value import InvalidValue
from pipelines.types.sampling import SamplingParams, SamplingParamsInput
from pipelines.types.text_context import TextContext
from pipelines.types.text_request import TextGenerationRequest, TextGenerationRequestMessage
from pronghorn.deadline import Deadline
from pronghorn.errors import InvalidRequest, ModelNotFound
from pronghorn.ids import RequestID

_HTTP_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""What a field of the sampling parameters is called in a body."""
SHARE_CHARS = 16
_ID_DIGITS = 18
"""No id is longer."""


@dataclass(frozen=True)
class Arrival:
    """What is known of a request beside its body."""

    request_id: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case, or a mapping that ignores case."""
    at_s: float
    """When it came, on the clock of this process."""


@dataclass(frozen=True)
class Prepared:
    answer_id: str
    jobs: list[GenerationJob]
    """One per prompt; choice i of job j has the index j * num_choices + i."""
    deadline: Deadline
    stops: list[str]
    stream: bool
    include_usage: bool
    num_choices: int = 1
    """Of each job."""
    logprobs: int | None = None
    """Alternatives to tell with each token; None: nothing is told."""
    echoes: list[str] | None = None
    """The text of each job's prompt, where it leads each of its choices."""
    prompt_only: bool = False
    """Nothing was asked behind the prompts; the one token that each computes all the same is not told."""
    detokenize: bool = True
    reading: Reading | None = None
    """How the answers' text is read; None: all of it is content."""
    reasoning_key: str | None = "reasoning"
    """What thinking is told as; None: it is not."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Of the request, what an answer of `/v1/responses` repeats."""


class Preparer:
    """Of one model. A body is the object that its JSON holds. Raises InvalidRequest, ContextLengthExceeded,
    ModelNotFound."""

    def __init__(self, tokenizer: TextTokenizer, settings: ApiSettings, served: Sequence[str]) -> None:
        """`served`: the names of all models, this one's among them. Raises ConfigurationError where the settings name a
        parser that there is not."""
        self._served = served
        self._tokenizer = tokenizer
        self._settings = settings
        self._tool_format = tool_format(settings.tool_parser, tokenizer.template_source)
        self._reasoning_format = reasoning_format(settings.reasoning_parser, tokenizer.template_source)
        self._structurer = Structurer(tokenizer, self._tool_format, user_formats=settings.structured_output)

    def chat(self, fields: Mapping[str, Any], arrival: Arrival) -> Prepared:
        return self._chat("chatcmpl-", check_fields(fields, ChatCompletionRequest, CHAT_NOT_YET), arrival)

    def responses(self, fields: Mapping[str, Any], arrival: Arrival) -> Prepared:
        try:
            body = check_fields(fields, ResponsesRequest, RESPONSES_NOT_YET)
            return replace(self._chat("resp_", as_chat(body), arrival), include_usage=True, repeated=repeated(body))
        except InvalidRequest as error:
            raise in_words_of_responses(error) from error

    def _chat(self, prefix: str, body: ChatCompletionRequest, arrival: Arrival) -> Prepared:
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {body.top_logprobs}; it may only be set when logprobs is true", param="top_logprobs"
            )
        request = self._request(body, arrival, RequestID(arrival.request_id))
        top = (1 if body.top_logprobs is None else body.top_logprobs) if body.logprobs else None
        request["logprobs"] = 0 if top is None else max(1, top)
        structure = self._structurer.of(body)
        request["response_format"] = structure.response_format
        messages = turns(body.messages)
        if body.prompt_tokens:
            request["prompt"] = body.prompt_tokens
        else:
            request |= self._templated(messages, structure.tools)
            request["chat_template_options"] = template_options(body)
        thinks = self._thinks(body)
        prepared = self._prepared(
            prefix,
            body,
            arrival,
            [request],
            bounds={"grammar_state": structure.state, "thinks": thinks},
            logprobs=top,
            reasoning_key=self._reasoning_key(body),
        )
        thinking = prepared.jobs[0].context.in_reasoning_phase
        return replace(prepared, reading=self._reading(body, structure, thinks, thinking))

    def conversation(
        self, messages: list[ChatMessage], definitions: Sequence[ToolDefinition], options: dict[str, Any]
    ) -> str:
        """What the model is shown of a conversation."""
        shown = self._templated(turns(messages), [shown_tool(definition) for definition in definitions])
        return self._tokenizer.apply_template(shown["messages"], shown.get("tools"), options)

    def _templated(self, messages: list[TextGenerationRequestMessage], tools: list[Tool]) -> dict[str, Any]:
        """Messages and tools as the template takes them; in words where it knows no tools."""
        if "tools" in (self._tokenizer.template_source or "") or self._tool_format is None:
            return {"messages": messages, "tools": [tool.as_json() for tool in tools] or None}
        return {"messages": told_in_words(messages, tools, self._tool_format)}

    def _thinks(self, body: ChatCompletionRequest) -> Thinks | None:
        budget = body.reasoning.max_tokens if body.reasoning is not None else None
        if self._reasoning_format is None:
            if budget is not None:
                raise InvalidRequest(
                    "reasoning.max_tokens needs a model whose thinking this server can tell; leave it out",
                    param="reasoning.max_tokens",
                )
            return None
        return Thinks(self._reasoning_format, budget)

    def _reading(
        self, body: ChatCompletionRequest, structure: Structure, thinks: Thinks | None, thinking: bool
    ) -> Reading | None:
        tools = self._tool_format if structure.tools else None
        format = thinks.format if thinks is not None else None
        if not body.detokenize or (tools is None and format is None):
            return None
        marks = (tools.marks if tools is not None else ()) + ((format.start, format.end) if format is not None else ())
        return Reading(format if body.reasoning_split else None, thinking, tools, marks)

    def _reasoning_key(self, body: ChatCompletionRequest) -> str | None:
        if body.reasoning is not None and body.reasoning.exclude:
            return None
        return "reasoning_content" if self._settings.emit_reasoning_content else "reasoning"

    def completion(self, fields: Mapping[str, Any], arrival: Arrival) -> Prepared:
        body = check_fields(fields, CompletionRequest, COMPLETION_NOT_YET)
        prompts = body.prompts
        if len(prompts) > self._settings.max_prompts:
            raise InvalidRequest(
                f"prompt has {len(prompts)} prompts; at most {self._settings.max_prompts} are allowed", param="prompt"
            )
        _refuse_ranking(body)
        asked = {
            "logprobs": 0 if body.logprobs is None else max(1, body.logprobs),
            "echo": body.echo and body.logprobs is not None,
        }
        requests = []
        for index, prompt in enumerate(prompts):
            if not prompt:
                where = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
                raise InvalidRequest(f"{where} is empty; it must have at least one token", param=where)
            request_id = arrival.request_id if len(prompts) == 1 else f"{arrival.request_id}_{index}"
            requests.append(self._request(body, arrival, RequestID(request_id)) | {"prompt": prompt} | asked)
        return self._prepared(
            "cmpl-",
            body,
            arrival,
            requests,
            logprobs=body.logprobs,
            echoes=[self._text(prompt) for prompt in prompts] if body.echo and body.detokenize else None,
            prompt_only=body.max_tokens == 0,
        )

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _request(self, body: GenerationBody, arrival: Arrival, request_id: RequestID) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "model_name": self.check_model(body.model),
            "request_path": arrival.path,
            "sampling_params": self._sampling(body),
            "dkv_cache_hint": _hint(body.dkv_cache_hint),
            "cache_salt": self._salt(body, arrival),
        }

    def _prepared(
        self,
        prefix: str,
        body: GenerationBody,
        arrival: Arrival,
        requests: list[dict[str, Any]],
        bounds: Mapping[str, Any] = MappingProxyType({}),
        **told: Any,
    ) -> Prepared:
        """`bounds` are arguments of `new_context`, `told` fields of Prepared that only one of the endpoints has."""
        if body.stops and not body.detokenize:
            raise InvalidRequest("stop looks for text; it must be left out where detokenize is false", param="stop")
        if len(requests) * body.n > self._settings.max_choices:
            raise InvalidRequest(
                f"n is {body.n} for {len(requests)} prompts; a request may have {self._settings.max_choices} choices "
                "in all",
                param="n",
            )
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options may only be set when stream is true", param="stream_options")
        deadline = self._deadline(body, arrival)
        target = arrival.headers.get("x-target-endpoint") or body.target_endpoint or None
        told_apart = {
            "session": self._session(body, arrival),
            "priority": self._priority(body),
            "share": share_of(arrival.headers.get(self._settings.share_header, "")),
        }
        named = zip(requests, keys(required_usable(arrival.headers), len(requests)), strict=True)
        return Prepared(
            answer_id=f"{prefix}{arrival.request_id}",
            jobs=[
                self._job(TextGenerationRequest(**request), deadline, target, body.n, key, told_apart, bounds)
                for request, key in named
            ],
            deadline=deadline,
            stops=body.stops,
            stream=body.stream,
            include_usage=body.include_usage,
            num_choices=body.n,
            detokenize=body.detokenize,
            **told,
        )

    def _job(
        self,
        request: TextGenerationRequest,
        deadline: Deadline,
        target: str | None,
        num_choices: int,
        key: str | None,
        told_apart: Mapping[str, Any],
        bounds: Mapping[str, Any],
    ) -> GenerationJob:
        context = self._context(request, bounds)
        context.num_choices = num_choices
        context.priority = told_apart["priority"]
        # The client's word for a node stays outside the context, where only an address that was looked up may be.
        return GenerationJob(
            context=context,
            deadline=deadline,
            model=request.model_name,
            target_endpoint=target,
            hint=request.dkv_cache_hint,
            key=key,
            **told_apart,
        )

    def _context(self, request: TextGenerationRequest, bounds: Mapping[str, Any]) -> TextContext:
        try:
            return self._tokenizer.new_context(request, self._settings.max_length, **bounds)
        except InvalidValue as error:
            theirs = error.param or ""
            name = _HTTP_NAMES.get(theirs, theirs)
            if theirs == "prompt" and request.request_path.endswith("/chat/completions"):
                name = "prompt_tokens"
            raise InvalidRequest(name + error.message.removeprefix(theirs), param=name) from error

    def check_model(self, name: str) -> str:
        """This model's name, of which "" is another where it is the only one."""
        if name == "" and len(self._served) > 1:
            raise InvalidRequest(f"model is missing; it must be one of {listed(self._served)}", param="model")
        if name not in ("", self._settings.model_name):
            raise not_served(name, self._served)
        return self._settings.model_name

    def _sampling(self, body: GenerationBody) -> SamplingParams:
        for token in body.stop_token_ids or ():
            self._check_id("stop_token_ids", token)
        for name in body.logits_processors or ():
            if name not in self._settings.logits_processors:
                known = ", ".join(sorted(self._settings.logits_processors)) or "none"
                raise InvalidRequest(
                    f"logits_processors has {name!r}; this server has: {known}", param="logits_processors"
                )
        given = SamplingParamsInput(
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            temperature=body.temperature,
            thinking_temperature=body.thinking_temperature,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            repetition_penalty=body.repetition_penalty,
            max_new_tokens=body.output_limit,
            min_new_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            stop=body.stops or None,
            stop_token_ids=body.stop_token_ids,
            seed=body.seed,
            detokenize=body.detokenize,
            logits_processors=body.logits_processors or None,
            logit_bias=self._biases(body) or None,
        )
        return SamplingParams.from_input_and_generation_config(given, self._tokenizer.generation_defaults)

    def _biases(self, body: GenerationBody) -> dict[int, float]:
        biases: dict[int, float] = {}
        for name, bias in (body.logit_bias or {}).items():
            if not (name.isascii() and name.isdecimal() and len(name) <= _ID_DIGITS):
                raise InvalidRequest(f"logit_bias has {name[:80]!r}; its keys must be token ids", param="logit_bias")
            self._check_id("logit_bias", int(name))
            biases[int(name)] = bias
        return biases

    def _check_id(self, field: str, token: int) -> None:
        vocab_size = self._tokenizer.vocab_size
        if token >= vocab_size:
            raise InvalidRequest(f"{field} has {token}; the model's ids are 0 to {vocab_size - 1}", param=field)

    def _salt(self, body: GenerationBody, arrival: Arrival) -> str | None:
        in_header = arrival.headers.get("x-cache-salt", "")
        if len(in_header) > MAX_SALT_CHARS:
            raise InvalidRequest(
                f"X-Cache-Salt has {len(in_header)} characters; at most {MAX_SALT_CHARS} are allowed",
                param="X-Cache-Salt",
            )
        return (in_header or body.cache_salt or None) if self._settings.use_client_cache_salt else None

    def _session(self, body: GenerationBody, arrival: Arrival) -> str | None:
        in_header = arrival.headers.get("x-session-id", "")
        if len(in_header) > MAX_SESSION_CHARS:
            raise InvalidRequest(
                f"X-Session-ID has {len(in_header)} characters; at most {MAX_SESSION_CHARS} are allowed",
                param="X-Session-ID",
            )
        return in_header or body.prompt_cache_key or None

    def _priority(self, body: GenerationBody) -> int:
        least = self._settings.most_urgent_priority
        if body.priority < least:
            raise InvalidRequest(f"priority is {body.priority}; it must be at least {least}", param="priority")
        return body.priority

    def _deadline(self, body: GenerationBody, arrival: Arrival) -> Deadline:
        most_s = self._settings.default_deadline_s
        name, asked_s = "timeout", body.timeout
        if in_header := arrival.headers.get("x-request-timeout"):
            name, asked_s = "X-Request-Timeout", _seconds(in_header)
        if asked_s is None:
            asked_s = most_s
        if not 0 < asked_s <= most_s:
            raise InvalidRequest(f"{name} is {asked_s:g} s; it must be above 0 and at most {most_s:g} s", param=name)
        return Deadline.after(arrival.at_s, asked_s)


def not_served(name: str, served: Iterable[str]) -> ModelNotFound:
    return ModelNotFound(f"the model {name!r} does not exist; served: {listed(served)}", param="model")


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _refuse_ranking(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest(
            f"best_of is {body.best_of}, which is not supported: choices are not ranked; accepted: n ({body.n}), null, "
            "or leave it out",
            param="best_of",
            code="unsupported_parameter",
        )


def share_of(credential: str) -> str:
    """A name for whoever sent it, from which nobody learns what it was; the same for all that sent nothing."""
    return hashlib.sha256(credential.encode()).hexdigest()[:SHARE_CHARS] if credential else ""


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"X-Request-Timeout is {text!r}; it must be seconds", param="X-Request-Timeout") from None


def _hint(hint: Any) -> dict[str, Any] | None:
    """A hint of no use is a miss for the connector to count: {} stands for anything that no message should carry."""
    if hint is None:
        return None
    try:
        size = len(msgspec.msgpack.encode(hint))
    except OverflowError:  # an integer beyond 64 bits
        return {}
    return hint if isinstance(hint, dict) and size <= MAX_HINT_BYTES else {}
