"""Who may speak on a cluster's channels: whoever reaches a port, or, with mutual TLS, whom its own CA vouches for.

Knows gRPC's credentials, three files, and when they change; not who is at the other end beyond that. Every certificate
is made out to one DNS name, so that it says "of this cluster" whatever address it is dialled at. Invariants: new
channels and new handshakes use what the files say now, and streams that run are left alone; half of a rotation, or a
damaged file, changes nothing and is said once.
"""

import logging
import os
import ssl
from typing import NamedTuple

import grpc
import msgspec
from grpc import aio

from pronghorn.errors import ConfigurationError
from pronghorn.wire import CLIENT_CHANNEL_OPTIONS

log = logging.getLogger(__name__)

TLS_NAME = "pronghorn"
"""The DNS name in every certificate of a cluster."""
TLS_REFUSED = "tls_refused"
"""The code of errors of peers that this process does not trust, or that speak no TLS."""
CLOSED_AT_ONCE = "closed_at_once"
"""The code of errors of peers that closed before the first word, as one does that does not trust this process."""
SILENT = "silent"
"""The code of errors of peers that answer no ping: they may be stopped, cut off, or kept from running by others."""


class TlsFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one process; all PEM. They may be replaced at any time."""

    cert: str
    """Its certificate, made out to the DNS name `pronghorn`, and the chain behind it."""
    key: str
    ca: str
    """Whose certificates its peers must have."""

    @classmethod
    def in_folder(cls, folder: str) -> "TlsFiles":
        """As cert-manager names them in a Kubernetes secret."""
        return cls(*(os.path.join(folder, name) for name in ("tls.crt", "tls.key", "ca.crt")))


class _Loaded(NamedTuple):
    stamp: tuple[tuple[int, int, int], ...]
    cert: bytes
    key: bytes
    ca: bytes


class Credentials:
    """Of one process, for its channels and its server."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        """None: plaintext. Raises ConfigurationError naming the file that cannot be used."""
        self._files = files
        self._loaded = None if files is None else _load(files)
        self._refused_stamp: object = None

    def version(self) -> object:
        """Changes with the files: a channel that was made before should take no new call."""
        loaded = self._current()
        return None if loaded is None else loaded.stamp

    def channel(self, address: str) -> aio.Channel:
        loaded = self._current()
        if loaded is None:
            return aio.insecure_channel(address, options=CLIENT_CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)
        options = [*CLIENT_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME)]
        return aio.secure_channel(address, credentials, options=options)

    def add_port(self, server: aio.Server, address: str) -> int:
        """Have `server` listen; the port. Raises RuntimeError where it cannot."""
        loaded = self._current()
        if loaded is None:
            return server.add_insecure_port(address)
        credentials = grpc.dynamic_ssl_server_credentials(
            _server_configuration(loaded), self._configuration, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        """Asked for by gRPC before each handshake, on a thread of its own."""
        loaded = self._current()
        assert loaded is not None
        return _server_configuration(loaded)

    def _current(self) -> _Loaded | None:
        if self._files is None or self._loaded is None:
            return None
        try:
            stamp = _stamp(self._files)
            if stamp not in (self._loaded.stamp, self._refused_stamp):
                self._loaded = _load(self._files)
                log.info("the TLS files of %s have changed", self._files.cert)
        except OSError as error:
            log.debug("the TLS files cannot be looked at now: %s", error)
        except ConfigurationError as error:
            self._refused_stamp = stamp
            log.warning("the TLS files have changed and cannot be used; the old ones are kept: %s", error.message)
        return self._loaded


def reason(details: str | None) -> tuple[str, str | None]:
    """What a failed call's details say in plain words, and a code where they tell of credentials that do not fit, or
    of one that fell silent behind a connection that stands."""
    said = details or ""
    if "ping timeout" in said:
        return f"it answered no ping: {said}", SILENT
    if "handshake failed" in said.lower():
        return f"it is not of this cluster's CA, or speaks no TLS: {said}", TLS_REFUSED
    if "failed to connect" in said and "Socket closed" in said:
        return (
            f"it closed before the first word, as one that trusts another CA or speaks TLS alone: {said}",
            CLOSED_AT_ONCE,
        )
    return said, None


def _server_configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    found = [os.stat(path) for path in (files.cert, files.key, files.ca)]
    return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)


def _load(files: TlsFiles) -> _Loaded:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        stamp = _stamp(files)
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
        read = []
        for path in (files.cert, files.key, files.ca):
            with open(path, "rb") as file:
                read.append(file.read())
        if stamp != _stamp(files):
            raise ConfigurationError(f"the TLS files beside {files.cert} change while they are read", param="tls")
    except (OSError, ssl.SSLError) as error:
        names = f"{files.cert}, {files.key} and {files.ca}"
        raise ConfigurationError(f"{names} are no certificate, its key and a CA: {error}", param="tls") from error
    return _Loaded(stamp, *read)
