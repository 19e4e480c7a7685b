"""What only a worker's own node can tell: its address, the model's folder there, whether its tiers can be opened."""

from __future__ import annotations

import os
from dataclasses import replace

from tandem.cluster.model_store import is_path, resolve_model
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import ConfigError
from tandem.worker.kv.tier_check import check_tiers


def name_for_nodes(model: str) -> str:
    """The name under which every node looks for the model itself.

    A relative path becomes absolute, because workers run in other folders. A ~ is the home folder of each node's user.
    """
    return os.path.abspath(model) if is_path(model) and not model.startswith("~") else model


def config_on_node(config: WorkerConfig, address: str) -> WorkerConfig:
    """The config of a worker on this node, which others reach at `address`; the model is fetched if necessary.

    Workers of one node that need the same model fetch it once: the others wait. May block for minutes. Raises
    `ConfigError`, which names the node.
    """
    try:
        check_tiers(config.tiers, is_local=True)
    except ConfigError as exc:
        raise ConfigError(f"on node {address}: {exc}") from exc
    return replace(
        config, host=address, engine=replace(config.engine, model=model_on_node(config.engine.model, address))
    )


def model_on_node(name: str, address: str) -> str:
    """Folder of the model on this node. May block for minutes. Raises `ConfigError`, which names the node."""
    try:
        return str(resolve_model(name, report=_report))
    except ConfigError as exc:
        raise ConfigError(f"on node {address}: {exc}") from exc


def _report(line: str) -> None:
    """Print a stage of fetching the model: Ray shows what its workers print where `tandem serve` runs."""
    print(line, flush=True)
