"""Certificate authorities for tests, and the files of a process in a folder, as `pronghorn up --tls-dir` takes them."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pronghorn.credentials import TLS_NAME, TlsFiles

DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        basic = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = _builder(self._name, self._name, self._key).add_extension(basic, critical=True)
        self.pem = _pem(self._certificate.sign(self._key, hashes.SHA256()))

    def issue(self, folder: Path, dns_name: str = TLS_NAME) -> TlsFiles:
        """A new key and its certificate into `folder`, over what is there."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(dns_name)])
        builder = _builder(_name("node"), self._name, key).add_extension(names, critical=False)
        folder.mkdir(exist_ok=True)
        files = TlsFiles.in_folder(str(folder))
        Path(files.cert).write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        Path(files.key).write_bytes(private)
        Path(files.ca).write_bytes(self.pem)
        return files


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
