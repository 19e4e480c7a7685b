"""Second names for metrics: those of vLLM, so that what was written for vLLM can read a Tandem server.

The names, types and labels are those of vLLM 0.32, and two that it had before. Nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

# Families by vLLM's name, and the family of ours that has the same values.
_SAME = {
    "vllm:prompt_tokens": "tandem_router_prompt_tokens",
    "vllm:generation_tokens": "tandem_router_generation_tokens",
    "vllm:prefix_cache_queries": "tandem_router_prompt_tokens",
    "vllm:prefix_cache_hits": "tandem_router_cached_prompt_tokens",
    "vllm:num_preemptions": "tandem_worker_preemptions",
    "vllm:request_success": "tandem_router_finished",
    "vllm:time_to_first_token_seconds": "tandem_router_ttft_seconds",
    "vllm:inter_token_latency_seconds": "tandem_router_itl_seconds",
    "vllm:time_per_output_token_seconds": "tandem_router_itl_seconds",  # its name before 0.11
    "vllm:e2e_request_latency_seconds": "tandem_router_request_duration_seconds",
}
_RUNNING, _WAITING, _QUEUED = "tandem_worker_running", "tandem_worker_waiting", "tandem_router_queue_requests"
_BLOCKS, _FREE = "tandem_worker_blocks", "tandem_worker_free_blocks"
# Gauges that one value of ours does not give.
_COMPUTED = {
    "vllm:num_requests_running": (_RUNNING,),
    "vllm:num_requests_waiting": (_WAITING, _QUEUED),
    "vllm:kv_cache_usage_perc": (_BLOCKS, _FREE),
    "vllm:gpu_cache_usage_perc": (_BLOCKS, _FREE),  # its name before 0.11
}
VLLM_SOURCES: dict[str, tuple[str, ...]] = _COMPUTED | {name: (source,) for name, source in _SAME.items()}
_NEEDED = {source for sources in VLLM_SOURCES.values() for source in sources}
# Labels of ours that are kept, by the name that vLLM has for them.
_LABELS = {"le": "le", "reason": "finished_reason", "worker": "engine"}


def with_vllm_names(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """The families, then those that vLLM has too, under its names. `model` is the label `model_name`.

    The server is shown as one engine, 0. Only a counter of each worker names the worker there: such counters restart
    one by one, and their sum would fall.
    """
    found: dict[str, Metric] = {}
    for family in families:
        if family.name in _NEEDED:
            found[family.name] = family
        yield family
    labels = {"model_name": model, "engine": "0"}
    for name, source in _SAME.items():
        if source in found:
            yield _renamed(found[source], name, labels)
    for name, value in _gauges(found):
        gauge = GaugeMetricFamily(name, _text(name), labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        yield gauge


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    renamed = Metric(name, _text(name), family.type)
    for sample in family.samples:
        kept = {_LABELS[label]: value for label, value in sample.labels.items() if label in _LABELS}
        renamed.add_sample(name + sample.name.removeprefix(family.name), {**labels, **kept}, sample.value)
    return renamed


def _gauges(found: Mapping[str, Metric]) -> Iterator[tuple[str, float]]:
    """The gauges of the process that knows the workers."""
    for name, sources in _COMPUTED.items():
        if all(source in found for source in sources):
            families = [found[source] for source in sources]
            value = _usage(*families) if _BLOCKS in sources else sum(map(_total, families))
            if value is not None:
                yield name, value


def _usage(blocks: Metric, free: Metric) -> float | None:
    """The used share of the KV blocks of the role that is fuller: a full pool is not helped by that of another role.

    None while there are no workers.
    """
    roles = {sample.labels["role"] for sample in blocks.samples}
    totals = [(_total(blocks, role), _total(free, role)) for role in roles]
    return max((1 - num_free / num_blocks for num_blocks, num_free in totals if num_blocks), default=None)


def _total(family: Metric, role: str = "") -> float:
    """The sum of its samples, of all roles or of one."""
    return float(sum(sample.value for sample in family.samples if role in ("", sample.labels.get("role"))))


def _text(name: str) -> str:
    return f"From {' and '.join(VLLM_SOURCES[name])}"
