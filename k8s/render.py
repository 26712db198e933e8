"""The chart as the manifests that Kubernetes gets: `python -m k8s.render [--values FILE] [--out FOLDER]`, or
`make manifests`. Helm itself renders it, as a library; no cluster is asked.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parent / "chart"


def render(values: dict[str, Any], name: str = "pronghorn") -> dict[str, str]:
    """Manifests by file name. Raises helm_python.HelmError where `values` do not fit the chart's schema."""
    found: dict[str, str] = helm_python.Chart.load(str(CHART)).render(values, name=name)
    return {Path(path).name: text.strip() + "\n" for path, text in sorted(found.items()) if text.strip()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=Path, help="a YAML file of values")
    parser.add_argument("--name", default="pronghorn", help="of the release")
    parser.add_argument("--out", type=Path, help="a folder for the files; standard output where not given")
    options = parser.parse_args(arguments)
    values = yaml.safe_load(options.values.read_text(encoding="utf-8")) if options.values else {}
    try:
        manifests = render(values or {}, options.name)
    except helm_python.HelmError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for name, text in manifests.items():
        if options.out is None:
            sys.stdout.write(f"---\n{text}")
        else:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
