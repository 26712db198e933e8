"""What happened in one simulation, in order: the lines that a failing seed prints, the digest that equal runs share."""

import asyncio
import hashlib


class Story:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lines: list[str] = []
        self._loop = loop

    def tell(self, text: str) -> None:
        self.lines.append(f"{self._loop.time():10.4f}  {text}")

    def digest(self) -> str:
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).hexdigest()
