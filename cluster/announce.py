"""What bringing a cluster up says while it does so: typed lines, shown on a terminal or sent through a pipe.

The supervisor of `up` speaks to the terminal itself; that of `up --detach` writes lines, which its parent shows.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from cluster.run_folder import RunState


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: Literal["stage", "detail", "note", "ready", "failed", "ended"]
    """A stage goes on until the next announcement that is no detail of it."""
    text: str = ""
    state: RunState | None = None


Announce = Callable[[Announcement], None]


def stage(text: str) -> Announcement:
    return Announcement("stage", text)


def detail(text: str) -> Announcement:
    return Announcement("detail", text)


def note(text: str) -> Announcement:
    return Announcement("note", text)


class Lines:
    """Announcements as JSON lines into a stream; a reader that has gone is no reason to stop."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __call__(self, announcement: Announcement) -> None:
        try:
            self._stream.write(msgspec.json.encode(announcement) + b"\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            return


def read_lines(stream: Iterable[bytes]) -> Iterator[Announcement]:
    for line in stream:
        try:
            yield msgspec.json.decode(line, type=Announcement)
        except msgspec.DecodeError:
            yield detail(line.decode(errors="replace").strip())


class Terminal:
    """A spinner with the stage in progress on a terminal; one line per finished stage everywhere.

    A terminal that was closed is no reason to stop: what is said to it is lost.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: str | None = None
        self._since_s = 0.0
        self._status: Status | None = None

    def __call__(self, announcement: Announcement) -> None:
        with contextlib.suppress(OSError):
            self._show(announcement)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Ends the stage in progress, as failed where an error leaves it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self._drop_stage()
            raise
        self(Announcement("ended"))

    def _show(self, announcement: Announcement) -> None:
        text = escape(announcement.text)  # an error may quote a [path], which is no markup
        match announcement.kind:
            case "stage":
                self._finish_stage()
                self._begin_stage(text)
            case "detail":
                if self._status is not None:
                    self._status.update(f"{self._stage}: {text}")
            case "note":
                self._console.print(f"  {text}", highlight=False)
            case "ready":
                self._finish_stage()
                if announcement.state is not None:
                    self._console.print(ready_message(announcement.state), highlight=False, soft_wrap=True)
            case "failed":
                self._drop_stage()
                self._console.print(f"[red]error:[/red] {text}", highlight=False, soft_wrap=True)
            case "ended":
                self._finish_stage()
                if text:
                    self._console.print(text, highlight=False)

    def _begin_stage(self, text: str) -> None:
        self._stage, self._since_s = text, time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(text)
            self._status.start()

    def _finish_stage(self) -> None:
        text, self._stage = self._stage, None
        self._drop_stage()
        if text is not None:
            took_s = time.monotonic() - self._since_s
            self._console.print(f"[green]✓[/green] {text} [dim]{took_s:.1f} s[/dim]", highlight=False)

    def _drop_stage(self) -> None:
        self._stage = None
        if self._status is not None:
            self._status.stop()
            self._status = None


def ready_message(state: RunState) -> str:
    several = len(state.models) > 1
    named = f'"model": "{state.models[0]}", ' if several else ""
    body = f'{{{named}"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "stream": true}}'
    lines = [
        "",
        f"Pronghorn is ready at [bold]{state.url}/v1[/bold]",
        f"Ray dashboard       {state.dashboard_url}" if state.dashboard_url else "",
        "",
        "Try:",
        f"  curl -N {state.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        '  pronghorn chat "Why is the sky blue?"' + (f" --model {state.models[0]}" if several else ""),
    ]
    return "\n".join(lines)
