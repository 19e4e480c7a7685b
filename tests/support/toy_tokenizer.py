"""A tiny byte-level tokenizer with a chat template: no model folder is needed to test the frontend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
{%- if message.content == 'forbidden' %}{{ raise_exception('forbidden words') }}{% endif -%}
<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def build_tokenizer(
    folder: Path, chat_template: str | None = CHAT_TEMPLATE, special_tokens: Sequence[str] = ()
) -> Path:
    """Save a tokenizer of all bytes and a few merges, which puts <s> before a text as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("o", "r"), ("Ã", "©")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", *special_tokens)])
    bos = fast.token_to_id("<s>")
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    hf = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    hf.chat_template = chat_template
    hf.save_pretrained(str(folder))
    return folder
