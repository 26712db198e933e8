import logging
import os
from pathlib import Path

import pytest

from pronghorn.credentials import SILENT, Credentials, TlsFiles, reason
from pronghorn.errors import ConfigurationError
from tests.fakes.certificates import Authority

OURS = Authority("ours")


def test_without_files_everything_is_plaintext_and_never_changes():
    assert Credentials().version() is None


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_a_file_that_is_missing_is_named_at_the_start(tmp_path, missing):
    files = OURS.issue(tmp_path)
    os.remove(getattr(files, missing))
    with pytest.raises(ConfigurationError, match=Path(files.cert).name, check=lambda error: error.param == "tls"):
        Credentials(files)


def test_a_key_of_another_certificate_is_refused_at_the_start(tmp_path):
    files, others = OURS.issue(tmp_path / "a"), OURS.issue(tmp_path / "b")
    with pytest.raises(ConfigurationError):
        Credentials(TlsFiles(files.cert, others.key, files.ca))


def test_a_rotation_changes_the_version(tmp_path):
    credentials = Credentials(OURS.issue(tmp_path))
    before = credentials.version()
    assert credentials.version() == before
    OURS.issue(tmp_path)
    assert credentials.version() != before


@pytest.mark.parametrize("damage", ["half", "garbage", "gone"])
def test_half_a_rotation_changes_nothing_and_the_whole_one_does(tmp_path, damage, caplog):
    files = OURS.issue(tmp_path / "a")
    credentials = Credentials(files)
    before = credentials.version()
    others = OURS.issue(tmp_path / "b")
    match damage:
        case "half":
            Path(files.cert).write_bytes(Path(others.cert).read_bytes())
        case "garbage":
            Path(files.cert).write_bytes(b"no certificate")
        case "gone":
            os.remove(files.cert)
    with caplog.at_level(logging.WARNING):
        assert [credentials.version() for _ in range(3)] == [before] * 3
    assert len(caplog.records) == (0 if damage == "gone" else 1)
    OURS.issue(tmp_path / "a")
    assert credentials.version() != before


def test_what_grpc_says_of_a_handshake_is_put_in_words():
    words, code = reason(
        "failed to connect to all addresses; last error: UNKNOWN: Tls handshake failed (TSI): SSL_ERROR"
    )
    assert code == "tls_refused" and "CA" in words
    words, code = reason("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed")
    assert code == "closed_at_once" and "TLS" in words
    assert reason("Socket closed") == ("Socket closed", None)
    assert reason("Stream removed (ping timeout)") == ("it answered no ping: Stream removed (ping timeout)", SILENT)
    assert reason(None) == ("", None)
