"""Clients that ask one thing after another while a cluster changes under them, and what each of them got."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.fakes.storm import MODEL, ending

PROMPTS = [
    "The sea was calm when",
    "A list of colours: red,",
    "Once upon a time there was a king who " * 6,
    "def fibonacci(n):",
    "In the year 1848, " * 12,
    "Dear Sir or Madam,",
]


@dataclass(frozen=True)
class Answer:
    prompt: int
    text: str
    how: str
    """As `storm.ending` says, or what broke the connection."""


class SteadyLoad:
    """One client a prompt, each greedy, so that the same prompt has the same answer whatever happens meanwhile."""

    def __init__(self, url: str, tokens: int, limit_s: float, model: str) -> None:
        self.answers: list[Answer] = []
        self._url = url
        self._tokens = tokens
        self._limit_s = limit_s
        self._model = model
        self._stop = threading.Event()
        self._said = threading.Condition()
        self._clients = [threading.Thread(target=self._ask_on, args=(n,), daemon=True) for n in range(len(PROMPTS))]

    def begin(self) -> None:
        for client in self._clients:
            client.start()

    def wait_for(self, more: int) -> None:
        """Until so many more streams have ended."""
        with self._said:
            wanted = len(self.answers) + more
            assert self._said.wait_for(lambda: len(self.answers) >= wanted, self._limit_s), "no stream ends"

    def end(self) -> None:
        """Every stream that has begun ends first."""
        self._stop.set()
        give_up_s = time.monotonic() + self._limit_s
        for client in self._clients:
            client.join(max(0.0, give_up_s - time.monotonic()))
            assert not client.is_alive(), "a stream does not end"

    def texts(self) -> dict[int, set[str]]:
        """What each prompt was answered; AssertionError, with what they heard, where a client got an error."""
        wrong = [answer for answer in self.answers if answer.how != "answered"]
        assert wrong == [], f"{len(wrong)} of {len(self.answers)}: {wrong[:5]}"
        found: dict[int, set[str]] = {}
        for answer in self.answers:
            found.setdefault(answer.prompt, set()).add(answer.text)
        return found

    def _ask_on(self, prompt: int) -> None:
        while not self._stop.is_set():
            answer = Answer(prompt, *self._ask(PROMPTS[prompt]))
            with self._said:
                self.answers.append(answer)
                self._said.notify_all()

    def _ask(self, prompt: str) -> tuple[str, str]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        said = ""
        try:
            with (
                httpx.Client(base_url=self._url, timeout=self._limit_s, trust_env=False) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                for piece in response.iter_text():
                    said += piece
            how = ending(response, said)
        except (httpx.HTTPError, json.JSONDecodeError, LookupError) as error:
            return said, f"broken: {error!r}"
        return _text(said), how


def _text(said: str) -> str:
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", []))


@contextmanager
def steady_load(url: str, tokens: int = 48, limit_s: float = 180.0, model: str = MODEL) -> Iterator[SteadyLoad]:
    load = SteadyLoad(url, tokens, limit_s, model)
    load.begin()
    try:
        load.wait_for(1)
        yield load
    finally:
        load.end()
