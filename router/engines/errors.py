"""The errors of engines.

WorkerError
 |- EngineFailed    the engine broke, hung or is gone: another engine may do better
 |   `- AdapterGone  it has unloaded the LoRA adapter meanwhile
 |- AnswerRefused   its answer cannot be passed on; another engine's would be the same
Overloaded
 |- EngineBusy      it refused for now, and said for how long
RequestError
 |- AnswerNotFound  no engine is known to keep an answer of this id
 |- EngineNotFound  no engine of this name is registered
"""

from __future__ import annotations

from tandem.protocol.errors import Overloaded, RequestError, WorkerError


class EngineFailed(WorkerError):
    """An engine failed the request; so did the others that were tried.

    `is_absent`: nothing listens there. `is_lost`: it closed the connection while it had the request.
    """

    may_quote = True
    code = "engine_failed"

    def __init__(self, engine: str, message: str, *, is_absent: bool = False, is_lost: bool = False) -> None:
        super().__init__(f"engine {engine}: {message}")
        self.engine = engine
        self.is_absent = is_absent
        self.is_lost = is_lost

    @property
    def cause(self) -> str:
        """Why a stream left the engine, for its metric."""
        return "engine_lost" if self.is_lost or self.is_absent else "engine_failed"

    def because(self, obstacle: str) -> EngineFailed:
        """The same error with the reason why the stream did not go on elsewhere."""
        message = f"{self.message.removeprefix(f'engine {self.engine}: ')}; the stream cannot go on: {obstacle}"
        return type(self)(self.engine, message, is_absent=self.is_absent, is_lost=self.is_lost)


class EngineTimeout(EngineFailed):
    """An engine sent nothing within `--request-timeout-s`; so did the others that were tried."""

    status = 504
    code = "engine_timeout"


class AdapterGone(EngineFailed):
    """The engine has unloaded the LoRA adapter since its adapters were listed, which is not its fault."""

    status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"


class AnswerRefused(WorkerError):
    """The answer to this request is too large to be passed on, which is not the engine's fault."""

    code = "answer_too_large"


class EngineBusy(Overloaded):
    """An engine has no room now."""

    may_quote = True
    code = "engine_busy"

    def __init__(self, message: str, *, retry_after_s: float, engine: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.engine = engine


class AnswerNotFound(RequestError):
    """No engine is known to keep an answer of this id."""

    status = 404
    code = "response_not_found"

    def __init__(self, answer_id: str, param: str) -> None:
        super().__init__(
            f"The response '{answer_id[:100]}' is not known: it was not stored, is too old, or its engine is gone. "
            "Send the whole conversation as 'input'.",
            param=param,
        )


class EngineNotFound(RequestError):
    """No engine of this name is registered."""

    status = 404
    code = "engine_not_found"
