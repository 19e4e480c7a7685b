"""Certificates, their keys and CA certificates in files: checked by name, and loaded into `ssl` contexts."""

from __future__ import annotations

import errno
import os
import ssl
import stat
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tandem.protocol.errors import ConfigError
from tandem.runtime.file_signature import open_at_once

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MAX_FILE_BYTES = 1 << 20
_EXPOSED_MODE = stat.S_IWGRP | stat.S_IRWXO
_BEGIN_KEY = b"PRIVATE KEY-----"


class NamedFile(NamedTuple):
    """A file, and the setting that names it."""

    setting: str
    path: str  # "" = none is given

    def __str__(self) -> str:
        return f"{self.setting}={self.path!r}"


def load_identity(
    context: ssl.SSLContext, certificate: NamedFile, key: NamedFile, now: Callable[[], float] = time.time
) -> float:
    """Make the context show this certificate. Returns when it expires, as Unix time. Raises `ConfigError`.

    The file has the certificate first, then those of its issuers. The key is in another file, or in the same one.
    """
    first = _certificates_in(certificate, _content_of(certificate))[0]
    _content_of(key)
    _check_dates(certificate, first, now())

    def refuse_passphrase() -> NoReturn:
        raise ConfigError(
            f"{key} is encrypted with a passphrase, and a server cannot ask for it; decrypt it into a file "
            "that only this user can read: openssl pkey -in FILE -out FILE"
        )

    try:
        context.load_cert_chain(certificate.path, key.path, password=refuse_passphrase)
    except ssl.SSLError as exc:
        raise ConfigError(_pair_error(certificate, key, exc)) from exc
    except OSError as exc:  # replaced since it was read above
        raise _unreadable(certificate, exc) from exc
    return first.not_valid_after_utc.timestamp()


def load_ca(context: ssl.SSLContext, ca: NamedFile) -> None:
    """Make the context trust the certificates of this file. Raises `ConfigError`."""
    content = _content_of(ca)
    _certificates_in(ca, content)
    try:
        context.load_verify_locations(cadata=content.decode("ascii", errors="replace"))
    except ssl.SSLError as exc:
        raise ConfigError(f"{ca} has a certificate that cannot be used: {exc.reason or exc}; give another") from exc


def exposure_of(key: NamedFile) -> str:
    """A warning if users beyond this one and its group can read or change the key; otherwise ""."""
    try:
        mode = stat.S_IMODE(os.stat(key.path).st_mode)
    except OSError:
        return ""
    if not mode & _EXPOSED_MODE:
        return ""
    return f"{key} has mode {mode:04o}, by which other users can read or change it; run: chmod 600 {key.path}"


def _content_of(file: NamedFile) -> bytes:
    try:
        with open(file.path, "rb", opener=open_at_once) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise ConfigError(f"{file} is not a regular file; give a file in PEM form")
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise _unreadable(file, exc) from exc
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} has more than {MAX_FILE_BYTES} bytes; give a file with only the certificates needed")
    return content


def _unreadable(file: NamedFile, exc: OSError) -> ConfigError:
    remedy = "give a file that exists" if exc.errno == errno.ENOENT else "give a file that this user can read"
    return ConfigError(f"{file} cannot be read: {exc.strerror}; {remedy}")


def _certificates_in(file: NamedFile, content: bytes) -> Sequence[Certificate]:
    """All certificates of a file, at least one."""
    from cryptography.x509 import load_pem_x509_certificates  # here, because only users of TLS need it

    try:
        return load_pem_x509_certificates(content)
    except ValueError as exc:
        if b"-----BEGIN CERTIFICATE-----" in content:
            raise ConfigError(f"{file} has a certificate that cannot be read: {exc}; give another file") from exc
        holds = "a private key" if _BEGIN_KEY in content else "something else"
        raise ConfigError(
            f"{file} has {holds} and no certificate in PEM form (-----BEGIN CERTIFICATE-----); give the certificate"
        ) from exc


def _check_dates(file: NamedFile, certificate: Certificate, now_s: float) -> None:
    now = datetime.fromtimestamp(now_s, UTC)
    if (end := certificate.not_valid_after_utc) <= now:
        raise ConfigError(f"{file} expired on {end:%Y-%m-%d %H:%M} UTC; renew the certificate")
    if (begin := certificate.not_valid_before_utc) > now:
        raise ConfigError(
            f"{file} is not valid before {begin:%Y-%m-%d %H:%M} UTC; correct this machine's clock, or wait"
        )


def _pair_error(certificate: NamedFile, key: NamedFile, exc: ssl.SSLError) -> str:
    """What is wrong with a certificate that can be read, and with its key."""
    reason = exc.reason or str(exc)
    if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
        return (
            f"{key} does not fit the first certificate of {certificate}; give the key that it was made for, and put "
            "the certificate itself before those of its issuers"
        )
    if reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        return (
            f"{certificate} is too weak for TLS today ({reason}); make one with RSA of 2048 bits or more, or with an "
            "elliptic curve"
        )
    return f"{key} has no private key that can be used ({reason}); give the key of {certificate} in PEM form"
