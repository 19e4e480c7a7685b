"""What the served model can do, for its card in `/v1/models`."""

from __future__ import annotations

from typing import Any

from tandem.frontend.openai.serving_context import ServingContext
from tandem.protocol.sampling import MAX_LOGPROBS

__all__ = ["model_capabilities"]

_STRUCTURED = ("json_object", "json_schema", "structural_tag", "regex", "choice", "grammar")


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
