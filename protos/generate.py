"""Makes the committed stubs: `python -m protos.generate` (or `make protos`), run from the project's root."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["protos/node.proto"]


def generate(out_dir: Path) -> None:
    """Write `node_pb2.py` and `node_pb2.pyi` below `out_dir`; raises SystemExit where protoc refuses a source."""
    args = ["protoc", f"-I{ROOT}", f"--python_out={out_dir}", f"--pyi_out={out_dir}", *SOURCES]
    if protoc.main(args) != 0:
        sys.exit(f"protoc refused one of {SOURCES}")


if __name__ == "__main__":
    generate(ROOT)
