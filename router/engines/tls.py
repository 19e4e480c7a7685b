"""TLS towards engines: which CA must have signed an engine's certificate, and which certificate we show.

A connection that cannot be checked is never used.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Iterable

from tandem.protocol.config import ExternalEnginesConfig
from tandem.router.engines.config import EngineSpec
from tandem.runtime.certificates import NamedFile, load_ca, load_identity
from tandem.runtime.followed_tls import FollowedTls, LoadedTls


def engine_tls(spec: EngineSpec, config: ExternalEnginesConfig) -> FollowedTls | None:
    """The context for connections to this engine, which follows its files; None if it speaks plain HTTP.

    Raises `ConfigError` for files that cannot be used.
    """
    if not spec.url.startswith("https://"):
        return None
    files = _files(spec, config)
    return FollowedTls(files, lambda: _load(*files))


def check_engine_tls(specs: Iterable[EngineSpec], config: ExternalEnginesConfig) -> None:
    """Raise `ConfigError` if the files for an engine, or those for all, cannot be used."""
    _load(*_files_for_all(config))
    for spec in specs:
        engine_tls(spec, config)


def tls_reason(exc: OSError) -> str:
    """What is wrong with a connection, in words that name the certificate where that is the reason."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):  # said by the engine
        return f"it refuses our certificate or our TLS: {(exc.reason or '').lower().replace('_', ' ')}"
    if isinstance(exc, ssl.SSLError):
        return f"it does not speak TLS as it should: {exc.reason or exc}"
    return str(exc) or type(exc).__name__


def _files(spec: EngineSpec, config: ExternalEnginesConfig) -> list[NamedFile]:
    """CA, certificate and key: those of the engine, else those for all."""
    ca, certificate, key = _files_for_all(config)
    if spec.tls_ca:
        ca = NamedFile(f"engine {spec.name}: tls_ca", spec.tls_ca)
    if spec.tls_cert:
        certificate = NamedFile(f"engine {spec.name}: tls_cert", spec.tls_cert)
        key = NamedFile(f"engine {spec.name}: tls_key", spec.tls_key)
    return [ca, certificate, key]


def _files_for_all(config: ExternalEnginesConfig) -> list[NamedFile]:
    return [NamedFile(name, getattr(config, name)) for name in ("engine_ca", "engine_cert", "engine_key")]


def _load(ca: NamedFile, certificate: NamedFile, key: NamedFile) -> LoadedTls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if ca.path:
        load_ca(context, ca)
    else:
        context.load_default_certs()  # the system's, and those of SSL_CERT_FILE
    return LoadedTls(context, load_identity(context, certificate, key) if certificate.path else math.inf)
