"""Configuration of the router: HTTP, queues and limits, and the engines of `tandem route`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from tandem.protocol.config.panels import (
    DAY_S,
    ENGINES,
    HTTP,
    LIMITS,
    MODEL,
    QUEUES,
    WORKERS,
    Count,
    CountOrZero,
    Seconds,
)
from tandem.protocol.routing import COST, HEADER, PAIRS, STRATEGIES, is_routing, routing_options
from tandem.protocol.settings import Setting, check_settings, require

_HOST = re.compile(r"\[[0-9a-fA-F:.]+\](:\d+)?|[^\s/:@*,\[\]]+(:\d+)?|[0-9a-fA-F:.]+")
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([^\s/@*,\[\]]+|\[[0-9a-fA-F:.]+\](:\d+)?)")


def _is_host(name: str) -> bool:
    return name == "*" or _HOST.fullmatch(name) is not None


def _is_origin(origin: str) -> bool:
    return origin in ("*", "null") or _ORIGIN.fullmatch(origin) is not None


def _require_both(config: object, *names: str) -> None:
    """Raise `ConfigError` if only one of two settings, a certificate and its key, is given."""
    for name, other in (names, reversed(names)):
        value = getattr(config, name)
        require(not value or bool(getattr(config, other)), f"{name}={value!r} is given without {other}; give both")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The HTTP frontend and placement."""

    host: Annotated[str, Setting("Address to listen on; 0.0.0.0 = reachable from outside.", HTTP)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Setting("TCP port; 0 = any free one.", HTTP)] = 8000
    cors_allow_origins: Annotated[
        tuple[str, ...],
        Setting(
            "Web origin whose pages may call the server, such as http://localhost:3000; repeat the flag for several; "
            "* = all.",
            HTTP,
            metavar="ORIGIN",
            is_valid=_is_origin,
            rule="a web origin such as http://localhost:3000, with nothing after the port, or * for any",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            "Host name that requests may be sent to; repeat the flag for several; * = all. A server on loopback "
            "allows localhost and the machine's own addresses without it; other servers check nothing by default.",
            HTTP,
            metavar="HOST",
            is_valid=_is_host,
            rule="one host name such as api.example.com, or * for any",
        ),
    ] = ()
    tls_cert: Annotated[
        str,
        Setting(
            "PEM file with the certificate for HTTPS, then those of its issuers; read again when it changes "
            "(docs/security.md). Empty = plain HTTP.",
            HTTP,
            metavar="FILE",
        ),
    ] = ""
    tls_key: Annotated[str, Setting("PEM file with the key of --tls-cert.", HTTP, metavar="FILE")] = ""
    tls_client_ca: Annotated[
        str,
        Setting(
            "PEM file with CA certificates; each client must show a certificate that one of them has signed. "
            "Empty = clients need no certificate.",
            HTTP,
            metavar="FILE",
        ),
    ] = ""
    audit_log: Annotated[
        str,
        Setting(
            "File to which one line of JSON is appended for each action of an operator (docs/api_keys.md); "
            "empty = none.",
            HTTP,
            metavar="FILE",
        ),
    ] = ""
    tracing: Annotated[
        bool,
        Setting(
            "Export traces of requests with OpenTelemetry, as the OTEL_* variables say (docs/tracing.md). It needs the "
            "extra otel.",
            HTTP,
        ),
    ] = False
    vllm_metric_names: Annotated[
        bool,
        Setting("Export metrics under vLLM's names too (docs/metrics.md).", HTTP),
    ] = False
    router_processes: Annotated[
        int,
        Meta(ge=1, le=64),
        Setting("Processes that share the HTTP port; more than one is needed beyond about 100 streams.", HTTP),
    ] = 1
    routing: Annotated[
        str,
        Setting(
            "How requests choose workers: cost, kv, prefix, session, round-robin or least-loaded (docs/routing.md). "
            "After a comma: pairs = a decode worker computes no prompt while a prefill worker can; header = clients "
            "may name another strategy in x-tandem-routing.",
            WORKERS,
            metavar="STRATEGY",
            is_valid=is_routing,
            rule=f"one of {', '.join(STRATEGIES)}, then pairs, header or both, separated by commas",
        ),
    ] = COST
    max_queued_prompt_tokens: Annotated[
        int,
        Meta(ge=1, le=2**62),  # so that a simulation can set no limit
        Setting("Most prompt tokens that may wait for one model; requests beyond it get 429.", QUEUES),
    ] = 2_000_000
    max_worker_queue_s: Annotated[
        float,
        Meta(ge=0, le=1e12),  # a very large value lets every request through to the workers' own queues
        Setting(
            "A worker with more predicted seconds of queued prompts gets no more of them; they wait in the router, "
            "where their order can change. 0 = two full steps, or half of one while a tenant sends several "
            "priorities.",
            QUEUES,
            command="route",
        ),
    ] = 0.0
    tool_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "glm45",
            "harmony",
            "hermes",
            "kimi_k2",
            "llama3_json",
            "minimax_m2",
            "mistral",
            "pythonic",
            "qwen3_coder",
            "seed_oss",
            "response_template",
        ],
        Setting(
            "Format in which the model writes tool calls; auto = as its chat template shows, none = refuse tools, "
            "response_template = as the checkpoint's response template says (reasoning too).",
            MODEL,
            command="serve",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "harmony", "kimi", "mistral", "seed_oss", "think"],
        Setting(
            "Format in which the model writes its reasoning; auto = as its chat template shows, none = reasoning "
            "stays in the content.",
            MODEL,
            command="serve",
        ),
    ] = "auto"
    max_body_bytes: Annotated[int, Meta(ge=1, le=2**40), Setting("Largest request body, in bytes.", LIMITS)] = 8 << 20
    max_connections: Annotated[Count, Setting("Most open connections of each router process.", LIMITS)] = 2048
    keep_alive_timeout_s: Annotated[
        Seconds,
        Setting(
            "Seconds that an idle connection is kept; set it above the proxy's own, so that no request "
            "arrives on a closing connection.",
            LIMITS,
        ),
    ] = 120.0
    worker_timeout_s: Annotated[
        Seconds, Setting("Seconds of silence after which a worker or an engine counts as dead.", LIMITS)
    ] = 8.0
    worker_stall_timeout_s: Annotated[
        Seconds,
        Setting(
            "A living worker is replaced if its loop or step makes no progress for this long; a server of vLLM or "
            "SGLang if it computes no token for five times as long.",
            LIMITS,
            command="serve",
        ),
    ] = 60.0
    request_timeout_s: Annotated[
        Seconds, Setting("Longest time between two tokens of an answer, in seconds.", LIMITS)
    ] = 600.0
    max_moves: Annotated[
        int,
        Meta(ge=0, le=100),
        Setting("Times that a request moves to another worker or engine after one died; 0 = it fails instead.", LIMITS),
    ] = 3
    copy_kv_tokens: Annotated[
        CountOrZero,
        Setting(
            "An answer's KV is copied to another decode worker each time it has grown by this many tokens, so that "
            "little is computed again if its worker dies; 0 = never.",
            WORKERS,
            command="serve",
        ),
    ] = 0
    drain_timeout_s: Annotated[
        float, Meta(ge=0, le=DAY_S), Setting("Seconds that running answers get to finish at Ctrl-C.", LIMITS)
    ] = 5.0
    shutdown_delay_s: Annotated[
        float,
        Meta(ge=0, le=DAY_S),
        Setting(
            "Seconds after SIGTERM in which new requests are still served, while load balancers see 503 at `/ready`.",
            LIMITS,
        ),
    ] = 0.0
    shutdown_grace_s: Annotated[
        float,
        Meta(ge=0, le=DAY_S),
        Setting("Seconds after that delay in which running answers may finish.", LIMITS),
    ] = 25.0
    # The rest have no flags.
    header_timeout_s: float = 10.0  # for a client to send a header
    body_timeout_s: float = 30.0  # for a client to send a body, plus 1 s for each 16 KB that has arrived

    @property
    def strategy(self) -> str:
        """Routing strategy of requests that name none."""
        return self.routing.partition(",")[0]

    @property
    def local_prefill(self) -> bool:
        """Whether a decode worker may compute a prompt itself where that is cheaper than a handoff."""
        return PAIRS not in routing_options(self.routing)

    @property
    def allows_routing_header(self) -> bool:
        """Whether clients may name the strategy."""
        return HEADER in routing_options(self.routing)

    def __post_init__(self) -> None:
        check_settings(self)
        _require_both(self, "tls_cert", "tls_key")
        require(
            not self.tls_client_ca or bool(self.tls_cert),
            f"tls_client_ca={self.tls_client_ca!r} is given without tls_cert; give --tls-cert and --tls-key too",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFiles:
    """Files that the command reads before anything starts. The router gets their content."""

    api_key_file: Annotated[
        str,
        Setting(
            "File of API keys, made with `tandem keys`; changes take effect while the server runs "
            "(docs/api_keys.md). Empty = no authentication.",
            HTTP,
            metavar="FILE",
        ),
    ] = ""
    tenants: Annotated[
        str,
        Setting(
            "TOML file with the weight, ttft_slo_ms and max_queue_share of each tenant, and the quotas of pins "
            "(docs/admission.md); empty = all tenants are alike.",
            QUEUES,
            metavar="FILE",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEnginesConfig:
    """How `tandem route` treats its engines."""

    allow_local_engines: Annotated[
        bool,
        Setting("Let engines added over /v1/engines be on this machine, or at link-local addresses.", ENGINES),
    ] = False
    engine_ca: Annotated[
        str,
        Setting(
            "PEM file with the CA certificates of https:// engines; empty = the system's. An engine's own tls_ca "
            "comes first.",
            ENGINES,
            metavar="FILE",
        ),
    ] = ""
    engine_cert: Annotated[
        str,
        Setting(
            "PEM file with the certificate that https:// engines are shown; empty = none. An engine's own tls_cert "
            "comes first.",
            ENGINES,
            metavar="FILE",
        ),
    ] = ""
    engine_key: Annotated[str, Setting("PEM file with the key of --engine-cert.", ENGINES, metavar="FILE")] = ""
    probe_interval_s: Annotated[Seconds, Setting("Seconds between two health checks of an engine.", LIMITS)] = 1.0
    engine_stall_s: Annotated[
        float,
        Meta(ge=0, le=DAY_S),
        Setting(
            "Seconds without a sign that an engine computes, while a stream waits for its next token, after which its "
            "requests leave it; 0 = only --request-timeout-s counts.",
            LIMITS,
        ),
    ] = 30.0
    # The rest have no flags.
    max_attempts: int = 3  # engines that one request is tried on before its first byte
    connect_timeout_s: float = 2.0
    probe_timeout_s: float = 2.0  # for an engine to answer a health check
    max_failed_probes: int = 2  # in a row, after which an engine counts as gone and its requests without a byte move
    breaker_failures: int = 3  # failed requests in a row that open an engine's circuit breaker
    breaker_open_s: float = 1.0  # at first; doubles with each failed trial
    breaker_max_open_s: float = 8.0  # clients give up after 30 s or more: a healthy engine is tried well before that

    def __post_init__(self) -> None:
        check_settings(self)
        _require_both(self, "engine_cert", "engine_key")
