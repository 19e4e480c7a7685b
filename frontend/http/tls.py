"""TLS of the HTTP port: the server's certificate, which follows its files, and what is counted."""

from __future__ import annotations

import logging
import ssl
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from tandem.protocol.config import RouterConfig
from tandem.runtime.certificates import NamedFile, exposure_of, load_ca, load_identity
from tandem.runtime.followed_tls import FollowedTls, LoadedTls
from tandem.runtime.time_slicer import TimeSlicer

logger = logging.getLogger(__name__)

_READ_BYTES = 4096  # at once: a client can update its keys 150 times with it, each of which takes us 20 us
HandshakeFailure = Literal["client_left", "plain_http", "refused", "shed", "timeout"]


class TlsMetrics:
    """The metrics of an HTTPS port."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_reloads = Counter(
            "tandem_tls_reloads", "Changes of the certificate's files that took effect", registry=registry
        )
        self.expiry = Gauge(
            "tandem_tls_certificate_expiry_timestamp_seconds",
            "When the certificate of the HTTP port expires, as Unix time; the earliest of all processes",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.damaged = Gauge(
            "tandem_tls_files_damaged",
            "1 while the certificate's files cannot be used: an older certificate is in use",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.failures = Counter(
            "tandem_tls_handshake_failures",
            "Connections that ended before the TLS handshake was complete",
            ["reason"],
            registry=registry,
        )


class ServerTls(FollowedTls):
    """The context for new clients, and the state that their connections share."""

    def __init__(self, config: RouterConfig, registry: CollectorRegistry) -> None:
        """Raises `ConfigError` for files that cannot be used."""
        super().__init__(_files(config), lambda: _load(config), self._show)
        self.handshakes = TimeSlicer()
        self.buffer = bytearray(_READ_BYTES)  # of all clients: one's bytes are given to TLS before another's arrive
        self._metrics = TlsMetrics(registry)
        self._num_counted = 0
        self._show()

    def count_failure(self, reason: HandshakeFailure) -> None:
        """Count a connection that ended before its handshake was complete."""
        self._metrics.failures.labels(reason).inc()

    def _show(self) -> None:
        self._metrics.num_reloads.inc(self.num_reloads - self._num_counted)
        self._num_counted = self.num_reloads
        self._metrics.expiry.set(self.loaded.expires_at_s)
        self._metrics.damaged.set(bool(self.damage))


def check_server_tls(config: RouterConfig) -> None:
    """Raise `ConfigError` if TLS is asked for and its files cannot be used. Warns of a key that others can read."""
    if config.tls_cert:
        _load(config)
        if exposure := exposure_of(NamedFile("tls_key", config.tls_key)):
            logger.warning("%s", exposure)


def scheme_of(config: RouterConfig) -> Literal["http", "https"]:
    """The scheme of the server's URL."""
    return "https" if config.tls_cert else "http"


def _files(config: RouterConfig) -> list[NamedFile]:
    return [NamedFile(name, getattr(config, name)) for name in ("tls_cert", "tls_key", "tls_client_ca")]


def _load(config: RouterConfig) -> LoadedTls:
    certificate, key, client_ca = _files(config)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    expires_at_s = load_identity(context, certificate, key)
    if client_ca.path:
        load_ca(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return LoadedTls(context, expires_at_s)
