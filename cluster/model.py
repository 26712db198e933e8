"""The model that the user named: its local folder, fetched and checked where need be, and what it is called."""

import subprocess
import sys
from pathlib import Path

from cluster.announce import Announce, read_lines
from pronghorn.errors import ConfigurationError

DEFAULT_NAME = "smollm2-135m-instruct"


def served_name(spec: str | None) -> str:
    """What clients call the model unless told otherwise: the last part of what the user called it."""
    if spec is None:
        return DEFAULT_NAME
    path = Path(spec).expanduser()
    return path.stem if path.is_file() else path.resolve().name if path.is_dir() else path.name


def find(spec: str | None, cache: Path, announce: Announce) -> Path:
    """The folder. Raises ConfigurationError in one line where the model is missing, damaged or not supported."""
    arguments = [str(cache)] if spec is None else [str(cache), spec]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "cluster.model_folder", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        folder: Path | None = None
        for said in read_lines(child.stdout):
            match said.kind:
                case "failed":
                    raise ConfigurationError(said.text, param="model")
                case "note":
                    folder = Path(said.text)
                case _:
                    announce(said)
        last_words = child.stderr.read().decode(errors="replace").strip().splitlines()
    if folder is None:
        raise ConfigurationError(
            f"the model could not be opened: {last_words[-1] if last_words else 'no reason given'}"
        )
    return folder
