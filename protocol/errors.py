"""The exceptions of the product, in one tree.

ServingError
 |- RequestError               the client's fault: 4xx
 |   |- ModelNotFound          404
 |   |- ContextLengthExceeded  400
 |   |- PinNotFound            404
 |   |- PoisonedRequest        422: it killed several workers
 |   |- WorkerNotFound         404
 |   |- RoleRefused            409
 |   |- DrainRefused           409
 |   |- AddRefused             409
 |- Overloaded                 429, with a Retry-After
 |   |- PinQuotaExceeded
 |   |- DeadlineUnmet          the first token would come too late
 |   |- RateLimitExceeded      the limit of an API key
 |- NotServed                501: this kind of model cannot do it
 |- InternalError              500: a bug of ours, which ended only this request
 |- WorkerError                a worker failed or is gone: 502/503/504
 |   |- WorkerLost             its process ended or fell silent
 |   |- WorkerTimeout          504: no token came in time
 |   |- NoWorker               503: nothing can serve this now
 |       |- ShuttingDown
 |- TransferError              KV could not be moved
 |   |- TransferTimeout
 |   |- PeerLost
 |   |- IncompatiblePeer
 |- ConfigError                a bad flag, file or value; one line, no traceback
"""

from __future__ import annotations

from collections.abc import Iterator


class ServingError(Exception):
    """Base of every error that this product raises on purpose.

    `status`, `error_type`, `code` and `param` go into an OpenAI-shaped error response. `may_quote`: its message may
    contain text of a client or of another server, which is only for that client. `num_computed_tokens`: tokens of the
    prompt that a worker had computed before it raised this, or found cached; they count for the limits of API keys.
    `grammar_s`: CPU time that the worker took for the request's grammar; it counts for the tenant's share.
    """

    may_quote = False
    num_computed_tokens = 0
    grammar_s = 0.0
    status = 500
    error_type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def log_text(self) -> str:
        """What a log may show of it: its message, or only its code if the message may quote somebody."""
        return (self.code or type(self).__name__) if self.may_quote else self.message


class RequestError(ServingError):
    """The request is invalid; sending it again cannot help."""

    may_quote = True
    status = 400
    error_type = "invalid_request_error"


def missing_parameter(param: str) -> RequestError:
    """The error for a field that a request must have."""
    return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class ContextLengthExceeded(RequestError):
    """The prompt, with `max_tokens`, does not fit into the model's context.

    `num_tokens` are the prompt's, at least, and `max_tokens` those that it may have, if that is known.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, num_tokens: int | None = None, max_tokens: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class WorkerNotFound(RequestError):
    """There is no worker of this name."""

    status = 404
    code = "worker_not_found"


class RoleRefused(RequestError):
    """The worker cannot switch to this role now."""

    status = 409
    code = "role_refused"


class AddRefused(RequestError):
    """No worker can be added now."""

    status = 409
    code = "add_refused"


class DrainRefused(RequestError):
    """The worker cannot leave now."""

    status = 409
    code = "drain_refused"


class PinNotFound(RequestError):
    """There is no pin with this id."""

    status = 404
    code = "pin_not_found"


class PoisonedRequest(RequestError):
    """Several workers died while they worked on this request, so no other one gets it."""

    status = 422
    code = "poisoned_request"


class Overloaded(ServingError):
    """Too much is waiting already: the request is refused, so that admitted ones are served in time."""

    status = 429
    error_type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class PinQuotaExceeded(Overloaded):
    """One more pin would exceed the number or the size of pins."""

    code = "pin_quota_exceeded"


class DeadlineUnmet(Overloaded):
    """The first token would come later than the request's TTFT SLO allows."""

    code = "ttft_slo_unmet"


class RateLimitExceeded(Overloaded):
    """The API key has used up one of its limits, which the message names."""

    code = "rate_limit_exceeded"


class InternalError(ServingError):
    """A bug of ours ended this request; other requests go on."""

    code = "internal_error"


class NotServed(ServingError):
    """The served model is of a kind that cannot answer requests of this route."""

    status = 501
    error_type = "invalid_request_error"
    code = "not_served"


class WorkerError(ServingError):
    """A worker failed, died or stopped answering while it held the request."""

    status = 502
    code = "worker_failed"


class WorkerLost(WorkerError):
    """The process that held the request has ended or fallen silent."""

    code = "worker_lost"

    def __init__(self, message: str, *, worker_id: str, may_have_read: bool = True) -> None:
        """`may_have_read`: whether it was alive when the request was sent, so that it may have ended because of it."""
        super().__init__(message)
        self.worker_id = worker_id
        self.may_have_read = may_have_read


class WorkerTimeout(WorkerError):
    """No token came within `--request-timeout-s`: its workers are too busy or hang."""

    status = 504
    code = "worker_timeout"


class NoWorker(WorkerError):
    """No worker that could serve the request is ready."""

    status = 503
    code = "no_worker"


class ShuttingDown(NoWorker):
    """The server stops; another one, or this one once it runs again, may serve the request."""

    code = "shutting_down"


class TransferError(ServingError):
    """KV could not be moved between two workers."""

    status = 502
    code = "kv_transfer_failed"


class TransferTimeout(TransferError):
    """KV did not arrive before its lease ended."""

    code = "kv_transfer_timeout"


class PeerLost(TransferError):
    """The other worker of a transfer is gone."""

    code = "kv_peer_lost"


class IncompatiblePeer(TransferError):
    """Two workers differ in something that must be equal before they exchange memory addresses."""

    code = "kv_peer_incompatible"


class ConfigError(ServingError):
    """A flag, config value or file is wrong; the message names it, its value and the remedy."""


def error_kinds(base: type[ServingError] = ServingError) -> Iterator[type[ServingError]]:
    """The class and all classes below it, as far as their modules have been imported."""
    yield base
    for kind in base.__subclasses__():
        yield from error_kinds(kind)
