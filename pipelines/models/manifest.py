"""What a folder that we built must contain, so that a damaged one is noticed before it is served.

The manifest is written last. Digests guard against torn writes and rot, not against an attacker (XXH3-128).
"""

import json
from pathlib import Path

import xxhash

MANIFEST_FILE = "manifest.json"
_READ_BYTES = 16 * 1024 * 1024


def _entry(path: Path) -> dict[str, int | str]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def write_manifest(folder: Path, **facts: str) -> None:
    """List every file in `folder`; `facts` say where they came from."""
    files = {path.name: _entry(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE}
    content = json.dumps({**facts, "files": files}, indent=2)
    (folder / MANIFEST_FILE).write_text(content + "\n", encoding="utf-8")


def damage(folder: Path, **facts: str) -> str | None:
    """What is wrong with `folder` in a few words; None where every listed file has its bytes and `facts` agree."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if any(manifest[name] != value for name, value in facts.items()):
            return "it was made from something else"
        for name, expected in manifest["files"].items():
            if (folder / name).stat().st_size != expected["bytes"]:
                return f"{name} has the wrong size"
            if _entry(folder / name) != expected:
                return f"{name} has the wrong content"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_FILE} cannot be read"
    return None
