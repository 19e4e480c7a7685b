"""Run by a Python that has vLLM: what its own classes make of the connectors in command lines, which come as JSON.

Raises what vLLM raises for a flag, a connector, a spec or a tier that it does not know.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory


def connectors_of(config: Any) -> list[list[str]]:
    """The classes of a connector and of those in it, each with its offloading spec and tiers."""
    extra = config.kv_connector_extra_config
    name = KVConnectorFactory.get_connector_class(config).__name__
    found = [[name, config.engine_id, *(_offloading(extra) if "spec_name" in extra else [])]]
    for one in extra.get("connectors", []):
        found += connectors_of(KVTransferConfig(**one, engine_id=config.engine_id))
    return found


def _offloading(extra: dict[str, Any]) -> list[str]:
    spec = OffloadingSpecFactory.get_spec_cls(extra)
    spec.build_metric_definitions(extra)
    names = [spec.__name__]
    for tier in extra["secondary_tiers"]:
        made = SecondaryTierFactory.get_tier_class(tier)
        unknown = tier.keys() - {"type"} - inspect.signature(made.__init__).parameters.keys()
        assert not unknown, f"{made.__name__} does not take {unknown}"
        names.append(made.__name__)
    return names


def main(commands: Sequence[Sequence[str]]) -> None:
    found = []
    for command in commands:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("-m") + 2 :])
        found.append(connectors_of(AsyncEngineArgs.from_cli_args(args).kv_transfer_config))
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.load(sys.stdin))
