"""`pronghorn`, run as a user runs it, in a process of its own, which a Ctrl-C in our terminal does not reach."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping

from pronghorn.errors import ConfigurationError

END_S = 240.0
"""What a command is left that is told to end: one that starts a cluster ends it first."""


async def pronghorn(limit_s: float, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
    """`environ`: another than our own. Raises ConfigurationError with what it said, where it fails or does not end.
    Cancelled, it ends the command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "cluster.cli", *arguments, start_new_session=True, env=environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            said, _ = await process.communicate()
    except TimeoutError:
        raise ConfigurationError(f"pronghorn {arguments[0]} did not end within {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            await _end(process)
    if process.returncode != 0:
        raise ConfigurationError(f"pronghorn {arguments[0]} failed: {said.decode(errors='replace').strip()}")


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
