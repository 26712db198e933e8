"""`pronghorn doctor` on this host, beside a Redis server and ports that are not as they should be."""

import json
import socket
from pathlib import Path
from typing import Any

from tests.fakes.running_cluster import CommandLine
from tests.fakes.valkey_server import ValkeyServer


def examined(tmp_path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    done = CommandLine(tmp_path)("doctor", "--json", *options)
    assert done.stderr == ""
    findings: list[dict[str, Any]] = json.loads(done.stdout)
    return done.returncode, findings


def test_a_taken_port_is_found_and_a_sound_redis_is_not(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    server.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            code, findings = examined(tmp_path, f"--port={port}", f"--redis-url={server.url}", "--kv-memory=1MiB")
    finally:
        server.stop()
    assert code == 1
    assert [finding["what"] for finding in findings if finding["check"] == "ports"] == [
        f"port {port} is in use by another program"
    ]
    assert not [finding for finding in findings if finding["check"] == "redis"], "it does not evict, and answers"


def test_redis_and_ray_that_do_not_answer_are_found(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        code, findings = examined(tmp_path, f"--redis-url=redis://:secret@{nobody}/0", f"--address={nobody}")
    assert code == 1
    found = {finding["check"]: finding["what"] for finding in findings if finding["level"] == "error"}
    assert f"redis://{nobody}/0" in found["redis"]
    assert nobody in found["ray"]
    assert "secret" not in json.dumps(findings)
