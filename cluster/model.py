"""The model that the user named: its local folder, fetched and checked where need be, and what it is called."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.announce import Announce, read_lines
from cluster.die_with_parent import bound
from pronghorn.errors import ConfigurationError

END_GRACE_S = 5.0
"""In which a download or a conversion that is not wanted any more removes what it has begun."""
DEFAULT_NAME = "smollm2-135m-instruct"


def served_name(spec: str | None) -> str:
    """What clients call the model unless told otherwise: the last part of what the user called it."""
    if spec is None:
        return DEFAULT_NAME
    path = Path(spec).expanduser()
    return path.stem if path.is_file() else path.resolve().name if path.is_dir() else path.name


def named_spec(spec: str) -> tuple[str | None, str]:
    """ "name=path" as name and path; anything else, and what is there as it is written, has no name of its own."""
    name, equals, path = spec.partition("=")
    return (name, path) if equals and not Path(spec).expanduser().exists() else (None, spec)


@contextlib.contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whoever leaves early does not leave it behind, nor what it has started."""
    try:
        yield
    except BaseException:
        if child.poll() is None:  # not reaped, so that its number is nobody else's
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
        raise


def find(spec: str | None, cache: Path, announce: Announce) -> Path:
    """The folder. Raises ConfigurationError in one line where the model is missing, damaged or not supported."""
    arguments = [str(cache)] if spec is None else [str(cache), spec]
    command = bound([sys.executable, "-P", "-m", "cluster.model_folder", *arguments])
    folder: Path | None = None
    with (
        tempfile.TemporaryFile() as chatter,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=chatter, start_new_session=True) as child,
        _ended(child),
    ):
        assert child.stdout is not None
        for said in read_lines(child.stdout):
            match said.kind:
                case "failed":
                    raise ConfigurationError(said.text, param="model")
                case "note":
                    folder = Path(said.text)
                case _:
                    announce(said)
        chatter.seek(0)
        last_words = chatter.read().decode(errors="replace").strip().splitlines()
    if folder is None:
        raise ConfigurationError(
            f"the model could not be opened: {last_words[-1] if last_words else 'no reason given'}"
        )
    return folder
