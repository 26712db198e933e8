"""Says where the model lies as a local folder: `python -m cluster.model_folder CACHE [SPEC]`, spoken to by `model.py`.

A process of its own because opening a checkpoint imports torch, which neither the command line nor the supervisor
should carry. Its last line is a note (the folder) or a failure.
"""

import sys
from pathlib import Path

from cluster import signals
from cluster.announce import Announcement, Lines, detail, note
from pipelines.models.fetch import default_model_folder, resolve_model
from pronghorn.errors import PronghornError


def main(cache: Path, spec: str | None) -> int:
    signals.listen(signals.interrupt)
    say = Lines(sys.stdout.buffer)

    def progress(text: str) -> None:
        say(detail(text))

    try:
        folder = default_model_folder(cache, progress) if spec is None else resolve_model(spec, cache, progress)
    except PronghornError as error:
        say(Announcement("failed", error.message))
        return 1
    say(note(str(folder.resolve())))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
