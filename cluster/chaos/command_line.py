"""`pronghorn`, run as a user runs it, in a process of its own."""

import asyncio
import subprocess
import sys

from pronghorn.errors import ConfigurationError


async def pronghorn(limit_s: float, *arguments: str) -> None:
    """Raises ConfigurationError with what it said, where it fails or does not end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "cluster.cli", *arguments,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise ConfigurationError(f"pronghorn {arguments[0]} did not end within {limit_s:g} s") from None
    if process.returncode != 0:
        raise ConfigurationError(f"pronghorn {arguments[0]} failed: {said.decode(errors='replace').strip()}")
