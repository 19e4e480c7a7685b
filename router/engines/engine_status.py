"""What engines report in `/metrics` and `/v1/models`, as plain values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tandem.protocol.messages import DISK_TIER, HOST_TIER
from tandem.router.engines.bounded_json import NotJson, dumps, loads

# Names in order of preference. The values of all label sets (for example of data-parallel ranks) are added up.
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
# Counters that grow while an engine computes. The first one grows with each step. Others may rest while a long prompt
# is computed: those of `tandem serve` do, which has some of vLLM's names if it is told to.
_STEPS = "vllm:iteration_tokens_total_count"
_WORK = (
    _STEPS,
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:realtime_tokens_total",  # the others count requests that have ended
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
)
# Prompt tokens by where their KV was. Values of the labels: "device", "host", "p2p", "disk", ...; SGLang's "storage".
_CACHED = {"vllm:prompt_tokens_cached_by_source_total": "source", "sglang:cached_tokens_total": "cache_source"}
_TIER_OF = {HOST_TIER: HOST_TIER, DISK_TIER: DISK_TIER, "storage": DISK_TIER}
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(\.dev)?")
_LOAD_NAMES = (*_RUNNING, *_WAITING, *_USAGE)
_CACHE_CONFIG = "vllm:cache_config_info"
_PAGE_SIZE, _NUM_PAGES = "sglang:page_size", "sglang:num_pages"
MAX_ADAPTERS = 1024  # per engine; later ones in alphabetical order are not served
MAX_NAME_CHARS = 512  # in the name of a model or an adapter
MAX_COUNT = 1 << 40  # largest number of requests, tokens or blocks
MAX_DIGITS = 20
_MAX_VALUE = 1e300  # largest sample. NOTE: prometheus_client parses many digits as an int too large for a float
MAX_CAPABILITIES_CHARS = 8192
MAX_LINES = 200_000
MAX_SAMPLES = 4096  # of the names above, over all ranks
MAX_LINE_CHARS = 8192  # of a sample: prometheus_client's time grows with the square of its labels
_BLOCK_CHARS = 64 * 1024  # that are cut into lines at once
MAX_NAMED_MODELS = 8  # in the message about a model that is not served
_RANK_LABELS = ("engine", "dp_rank")  # vLLM's and SGLang's


class ReportedLoad(NamedTuple):
    """Requests that run and wait in an engine, from any client."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of its KV cache in use

    @property
    def is_busy(self) -> bool:
        """Whether there is any request."""
        return self.num_running + self.num_waiting > 0


class ServedModel(NamedTuple):
    """What an engine serves."""

    name: str
    max_model_len: int  # 0 = not reported
    adapters: tuple[str, ...]  # names of its LoRA adapters
    capabilities: dict[str, Any] | None = None  # as `tandem serve` reports them; None = it does not


class CacheSize(NamedTuple):
    """Size of an engine's KV cache; 0 = not reported."""

    block_size: int
    num_blocks: int


class WorkDone(NamedTuple):
    """What an engine has computed since its start."""

    num_tokens: float  # in no exact unit: it changes with the steps that compute
    is_of_each_step: bool  # whether each step changes it; then an unchanged value shows that no step was computed


class EngineReport(NamedTuple):
    """One reading of an engine's metrics. None stands for what they do not say."""

    load: ReportedLoad | None
    work: WorkDone | None
    loaded_tokens: Mapping[str, int] = MappingProxyType({})  # by tier: prompt tokens from there


class WorkCounter:
    """The latest work that an engine reported. A change shows that the engine computed a step."""

    def __init__(self) -> None:
        self._num_tokens: float | None = None

    def has_changed(self, work: WorkDone | None) -> bool:
        """Note what was read now. Returns whether it differs from the reading before; a first reading does not."""
        if work is None:
            return False
        former, self._num_tokens = self._num_tokens, work.num_tokens
        return former is not None and former != work.num_tokens


def parse_report(text: str, rank: int | None = None) -> EngineReport:
    """What a Prometheus exposition says of one data-parallel rank or of all."""
    return EngineReport(parse_load(text, rank), parse_work(text, rank), parse_loaded_tokens(text, rank))


def parse_loaded_tokens(text: str, rank: int | None = None) -> dict[str, int]:
    """Prompt tokens by the tier that they came from; tiers that gave none are left out."""
    found: Counter[str] = Counter()
    for sample in _samples(text, tuple(_CACHED), rank):
        if tier := _TIER_OF.get(sample.labels.get(_CACHED[sample.name], "")):
            found[tier] += _count(sample.value)
    return dict(+found)


def parse_work(text: str, rank: int | None = None) -> WorkDone | None:
    """The work in a Prometheus exposition, of one data-parallel rank or of all; None if it does not say."""
    samples = list(_samples(text, _WORK, rank))
    if not samples:
        return None
    # SGLang counts when it logs, which is every 40th step.
    is_of_each_step = any(sample.name == _STEPS for sample in samples)
    return WorkDone(sum(sample.value for sample in samples), is_of_each_step)


def parse_load(text: str, rank: int | None = None) -> ReportedLoad | None:
    """The load in a Prometheus exposition, of one data-parallel rank or of all.

    None when it has none of the known names.
    """
    values: dict[str, float] = {}
    for sample in _samples(text, _LOAD_NAMES, rank):
        known = values.get(sample.name, 0.0)
        values[sample.name] = max(known, sample.value) if sample.name in _USAGE else known + sample.value
    running = _first(values, _RUNNING)
    if running is None:
        return None
    usage = min(max(_first(values, _USAGE) or 0.0, 0.0), 1.0)
    return ReportedLoad(_count(running), _count(_first(values, _WAITING) or 0.0), usage)


def parse_cache_size(text: str, rank: int | None = None) -> CacheSize:
    """Block size and number of blocks: labels of vLLM's `cache_config_info`, or two gauges of SGLang."""
    pages: dict[str, int] = {}
    for sample in _samples(text, (_CACHE_CONFIG, _PAGE_SIZE, _NUM_PAGES), rank):
        if sample.name == _CACHE_CONFIG:
            return CacheSize(_whole(sample.labels.get("block_size")), _whole(sample.labels.get("num_gpu_blocks")))
        pages[sample.name] = _count(sample.value)
    return CacheSize(pages.get(_PAGE_SIZE, 0), pages.get(_NUM_PAGES, 0))


def served_model(catalog: Any, wanted: str) -> ServedModel:
    """The model in the body of `/v1/models`: the wanted one or the first non-adapter. Raises `LookupError`."""
    cards = catalog.get("data") if isinstance(catalog, dict) else None
    listed = cards if isinstance(cards, list) else []
    named = [card for card in listed if isinstance(card, dict) and _is_name(card.get("id"))]
    bases = [card for card in named if not _is_adapter(card)]
    card = next((card for card in bases if not wanted or card["id"] == wanted), None)
    if card is None:
        names = ", ".join(card["id"] for card in bases[:MAX_NAMED_MODELS])
        raise LookupError(f"it serves {names or 'no model'}" + (", ..." if len(bases) > MAX_NAMED_MODELS else ""))
    length = card.get("max_model_len")
    adapters = sorted(card["id"] for card in named if _is_adapter(card))
    length = _count(length) if isinstance(length, int) else 0
    return ServedModel(card["id"], length, tuple(adapters[:MAX_ADAPTERS]), _capabilities(card))


def vllm_gives_token_ids(version: bytes) -> bool:
    """Whether a vLLM with this answer to `/version` knows `return_token_ids`: all versions since 0.10.2 do.

    Builds outside of releases, whose version begins with 0.1.dev, count as newer.
    """
    try:
        told = loads(version)
    except NotJson:
        return False
    found = _VERSION.match(str(told.get("version"))) if isinstance(told, dict) else None
    if found is None:
        return False
    major, minor, patch = (min(int(part or 0), MAX_COUNT) for part in found.group(1, 2, 3))
    return (major, minor, patch) >= (0, 10, 2) or ((major, minor) == (0, 1) and found.group(4) is not None)


def _capabilities(card: dict[str, Any]) -> dict[str, Any] | None:
    """The capabilities on a card, unless they are larger than any sensible ones."""
    found = card.get("capabilities")
    try:
        is_usable = isinstance(found, dict) and len(dumps(found)) <= MAX_CAPABILITIES_CHARS
    except NotJson:  # it could not be shown to clients
        is_usable = False
    return found if is_usable else None


def _is_name(name: object) -> bool:
    """Whether a name can be shown and sent on: others would break lines of logs, or could not be encoded."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _is_adapter(card: dict[str, Any]) -> bool:
    """Whether a card of `/v1/models` is a LoRA adapter's: vLLM and SGLang name its base model as `parent`."""
    return isinstance(card.get("parent"), str) and bool(card["parent"])


def _samples(text: str, names: tuple[str, ...], rank: int | None = None) -> Iterator[Sample]:
    """The samples of these names and this rank. Skips lines that cannot be parsed and infinite values.

    Only lines that begin with one of the names are parsed: 0.6 ms for the 2,900 lines of a vLLM with eight ranks, which
    are read once a second, instead of 41 ms for all of them. Raises `ValueError` for too many. No step takes long, so
    that a thread which does this lets others run.
    """
    num_samples = 0
    for line in _lines(text):
        if not line.startswith(names) or len(line) > MAX_LINE_CHARS:
            continue
        num_samples += 1
        if num_samples > MAX_SAMPLES:
            raise ValueError(f"its /metrics has more than {MAX_SAMPLES} samples of its load")
        try:
            [family] = text_string_to_metric_families(line)
        except (ValueError, OverflowError):  # a time stamp of very many digits overflows
            continue
        yield from (
            one
            for one in family.samples
            if one.name in names and -_MAX_VALUE <= one.value <= _MAX_VALUE and _is_of_rank(one.labels, rank)
        )


def _lines(text: str) -> Iterator[str]:
    if text.count("\n") > MAX_LINES:
        raise ValueError(f"its /metrics has more than {MAX_LINES} lines")
    rest = ""
    for start in range(0, len(text), _BLOCK_CHARS):
        *lines, rest = (rest[: MAX_LINE_CHARS + 1] + text[start : start + _BLOCK_CHARS]).split("\n")
        yield from lines
    yield rest


def _is_of_rank(labels: Mapping[str, str], rank: int | None) -> bool:
    """Whether a sample belongs to this rank: one without a label for ranks belongs to all of them."""
    found = next((labels[name] for name in _RANK_LABELS if name in labels), None)
    return rank is None or found is None or found == str(rank)


def _first(values: dict[str, float], names: Iterable[str]) -> float | None:
    return next((values[name] for name in names if name in values), None)


def _whole(text: str | None) -> int:
    return min(int(text), MAX_COUNT) if text and len(text) <= MAX_DIGITS and text.isdecimal() else 0


def _count(value: float) -> int:
    """A number of things, within bounds: an engine may report anything, and its numbers are added up and shown."""
    return int(min(max(value, 0.0), MAX_COUNT))
