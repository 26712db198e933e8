"""Streams of a real cluster that run while something happens to it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.fakes.storm import MODEL, ending


class Stream:
    """One completion of exactly `tokens` tokens, read in a thread of its own."""

    def __init__(self, url: str, tokens: int, limit_s: float, model: str) -> None:
        self._body = {"model": model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        self._url = url
        self._limit_s = limit_s
        self._begun = threading.Event()
        self._how = "it did not end"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        text = ""
        try:
            with (
                httpx.Client(base_url=self._url, timeout=self._limit_s, trust_env=False) as client,
                client.stream("POST", "/v1/completions", json=self._body) as response,
            ):
                for piece in response.iter_text():
                    text += piece
                    self._begun.set()
                self._how = ending(response, text)
        except (httpx.HTTPError, json.JSONDecodeError, IndexError) as error:
            self._how = f"broken: {error!r}"
        finally:
            self._begun.set()

    def wait_until_begun(self) -> None:
        assert self._begun.wait(self._limit_s)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def ended(self) -> str:
        """How, as `storm.ending` says, or "broken" where the connection was cut."""
        self._thread.join(self._limit_s)
        return self._how


@contextmanager
def streams(url: str, count: int, tokens: int, limit_s: float = 120.0, model: str = MODEL) -> Iterator[list[Stream]]:
    """`count` of them, each with its first token; all have ended afterwards."""
    running = [Stream(url, tokens, limit_s, model) for _ in range(count)]
    for stream in running:
        stream.wait_until_begun()
    yield running
    for stream in running:
        stream.ended()
        assert not stream.runs
