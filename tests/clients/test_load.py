"""A load client: every one of its hundred requests is answered."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config import cache_dir, environment
from pipelines.models.fetch import default_model_folder

pytestmark = pytest.mark.timeout(300)

REQUESTS = 100


@pytest.mark.conformance(70)
def test_guidellm_sees_no_failure_in_a_hundred_requests(server: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            Path(sys.executable).with_name("guidellm"),
            "run",
            f"--backend=kind=openai_http,target={server.url},model={server.model}",
            "--profile=kind=concurrent,streams=8",
            f"--constraint=kind=max_requests,count={REQUESTS}",
            f"--tokenizer=kind=huggingface_auto,model={default_model_folder(cache_dir(environment()))}",
            "--data=kind=synthetic_text,prompt_tokens=24,output_tokens=6",
            f"--output=kind=json,path={report}",
            "--disable-console",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
