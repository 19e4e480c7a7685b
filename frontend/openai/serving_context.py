"""What every route of `tandem serve` works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from tandem.frontend.http.json_body import decode_body, read_json
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.request_options import key_use_of, tenant_of
from tandem.frontend.http.text_work import work_on_text
from tandem.frontend.openai.answer_formats import AnswerFormats
from tandem.frontend.openai.constraint_fields import constraint_of
from tandem.frontend.openai.other_fields import check_other_fields
from tandem.frontend.openai.request_limits import check_grammar
from tandem.frontend.openai.sampling import UNKNOWN_CONTEXT_TOKENS
from tandem.frontend.openai.schema import GenerationFields
from tandem.frontend.response_store import ResponseStore
from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import ModelNotFound, RequestError
from tandem.protocol.sampling import MAX_LOGPROBS
from tandem.router.backend import Backend
from tandem.scheduling.admission.tenants import CacheScopes
from tandem.text.structured_output.checker import GrammarChecker
from tandem.text.structured_output.constraint import Constraint
from tandem.text.token_lengths import PromptLimit
from tandem.text.tokenizer import Tokenizer, TokenizerPool

_STRUCTURED = ("json_object", "json_schema", "structural_tag", "regex", "choice", "grammar")

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The parts of one app."""

    backend: Backend
    tokenizer: Tokenizer
    pool: TokenizerPool
    metrics: FrontendMetrics
    scopes: CacheScopes
    formats: AnswerFormats
    grammars: GrammarChecker
    responses: ResponseStore

    def cache_scope(self, request: Request, cache_salt: str | None) -> CacheScope:
        """The scope within which a request shares cached blocks. Raises `RequestError`."""
        return self.scopes.of(tenant_of(request), cache_salt or "")

    def check_model(self, name: str | None) -> None:
        """Raise `ModelNotFound` if a request names a model, and it is not the one that is served."""
        if name and name != self.backend.model:
            text = f"The model '{name[:200]}' does not exist; this server has '{self.backend.model}'."
            raise ModelNotFound(text, param="model")

    async def work_on_text(
        self, request: Request, work: Callable[[], T], num_bytes: int, *, is_encoding: bool = True
    ) -> T:
        """As `frontend.http.text_work.work_on_text`, in this app's threads."""
        return await work_on_text(request, self.pool, work, num_bytes, is_encoding=is_encoding)

    async def checked_grammar(self, request: Request, constraint: Constraint) -> str:
        """The constraint's grammar, checked in the turn of the request's tenant. Raises `RequestError`."""
        use = key_use_of(request)
        note_cpu = None if use is None else use.note_cpu
        return await self.grammars.grammar(constraint, tenant_of(request), note_cpu, self.cache_scope(request, None))

    async def grammar_of(self, fields: GenerationFields, request: Request, num_prompts: int = 1) -> str:
        """The grammar that each answer must match, checked; empty if there is none. Raises `RequestError`."""
        constraint = constraint_of(fields)
        if constraint is None:
            return ""
        grammar = await self.checked_grammar(request, constraint)
        check_grammar(grammar, num_prompts * (fields.n or 1), constraint.param)
        return grammar

    def prompt_limit(self, param: str) -> PromptLimit:
        """The longest prompt that the request's field `param` may hold."""
        return PromptLimit(self.backend.max_model_len or UNKNOWN_CONTEXT_TOKENS, param)


async def read_body(request: Request, request_type: type[R]) -> tuple[bytes, R]:
    """The body of a request, raw and decoded. Raises `RequestError`, also for fields misspelt or not served."""
    body = await read_json(request)
    check_other_fields(body, request_type)
    return body, decode_body(body, request_type)


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let a `RequestError` about a field of chat name that of another API. `names`: its own by chat's.

    Only chat's tools have a `function`; the fields of other APIs' tools are not nested.
    """
    try:
        yield
    except RequestError as exc:
        param = exc.param or ""
        if (name := names.get(param, param.replace("].function.", "]."))) != param:
            exc.message = exc.message.replace(f"'{exc.param}'", f"'{name}'")
            exc.param = name
        raise


def model_capabilities(context: ServingContext) -> dict[str, Any]:
    """By feature: whether it is served, or how. Formats have the names of `--tool-parser` and `--reasoning-parser`."""
    formats, has_chat = context.formats, bool(context.tokenizer.chat_template)
    if formats.template is not None:
        tools: str | None = "response_template"
        reasoning: str | None = "response_template"
    else:
        tools = None if formats.tools is None else formats.tools.name
        reasoning = None if formats.reasoning is None else formats.reasoning.name
    return {
        "completions": True,
        "chat": has_chat,
        "embeddings": False,
        "tools": tools if has_chat else None,
        "forced_tools": has_chat and formats.tools is not None,
        "reasoning": reasoning if has_chat else None,
        "structured_output": list(_STRUCTURED),
        "max_logprobs": MAX_LOGPROBS,
        "prompt_logprobs": True,
        "token_ids": True,
    }
