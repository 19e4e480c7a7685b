"""Builds the parts of a worker and connects them: read it from top to bottom to see who tells whom about what."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
import zmq

from tandem.decode_worker.role import DecodeRole
from tandem.engine.engine import Engine
from tandem.kv_transfer.handshake import compatibility_fields
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.transport.base import Transport
from tandem.kv_transfer.transport.factory import create_transport
from tandem.kv_transfer.transport.faulty import with_faults
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.kv_transfer.wire_codec import WireCodec
from tandem.prefill_worker.role import PrefillRole
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.fault_boundary import undone_on_error
from tandem.protocol.messages import PeerAddress
from tandem.runtime.curve import make_keys
from tandem.runtime.dropped import DroppedMessages
from tandem.scheduling.cost_model import CostModel
from tandem.worker.kv.copies import KvCopies
from tandem.worker.kv.cpu_codec import codec_for
from tandem.worker.kv.peer_lender import PeerLender
from tandem.worker.kv.peer_reader import PeerReader
from tandem.worker.kv.pins import WorkerPins
from tandem.worker.kv.tiered_cache import TieredCache, create_tiers
from tandem.worker.long_prompts import LongPrompts
from tandem.worker.replies import RouterReplies
from tandem.worker.sockets import HeartbeatThread, WorkerSockets, socket_endpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerParts:
    """What one worker consists of. The loop drives them; each owns its state."""

    config: WorkerConfig
    kind: str  # workers of one kind compute at one speed
    address: PeerAddress
    engine: Engine
    transport: Transport
    context: zmq.Context[Any]
    sockets: WorkerSockets
    heartbeats: HeartbeatThread
    dropped: DroppedMessages
    replies: RouterReplies
    compatibility: dict[str, str]  # values that must be equal at a peer
    links: PeerLinks
    prefill: PrefillRole
    decode: DecodeRole
    cache: TieredCache
    reader: PeerReader
    lender: PeerLender
    copies: KvCopies
    pins: WorkerPins
    long_prompts: LongPrompts


def assemble(config: WorkerConfig, hub: InProcessHub | None = None) -> WorkerParts:
    """Load the model, bind the sockets and connect the parts. `hub` joins workers of one process (tests)."""
    engine = Engine(config.engine, kv_codec=config.tiers.codec_identity)
    with undone_on_error(engine.close):
        return _connect(config, engine, hub)


def _connect(config: WorkerConfig, engine: Engine, hub: InProcessHub | None) -> WorkerParts:
    wire = _wire_codec(config, engine)
    epoch = time.time_ns()
    name = f"{config.worker_id}-{epoch:x}"

    def endpoint(suffix: str = "") -> str:
        return socket_endpoint(config.socket_folder, config.host, name + suffix)

    transport = create_transport(
        config.transfer.transport,
        worker_id=config.worker_id,
        epoch=epoch,
        pool=engine.kv.shards,
        hub=hub,
        host=config.host,
        mailbox=endpoint(".kv") if config.socket_folder else "",
    )

    if config.transfer.inject_faults:
        logger.warning("%s injects faults into its writes: %s", config.worker_id, config.transfer.inject_faults)
        transport = with_faults(transport, engine.kv.shards[0], config.transfer.inject_faults, name=config.worker_id)
    context, dropped, keys = zmq.Context(), DroppedMessages(), make_keys()
    sockets = WorkerSockets(context, endpoint(), keys, config.router_key, dropped)
    heartbeats = HeartbeatThread(context, endpoint(".beats"), keys, config.transfer.heartbeat_interval_s)
    address = PeerAddress(config.worker_id, epoch, sockets.endpoint, heartbeats.endpoint, keys.public)
    replies = RouterReplies(address, sockets)

    compatibility = _compatibility(config, engine)
    timeout_s = config.transfer.handoff_timeout_s
    links = PeerLinks(address, compatibility, transport, sockets.send_peer, timeout_s=timeout_s, wire=wire)
    prefill = PrefillRole(engine, transport, links, config.transfer, replies.fail, replies.forget, wire)
    first_generation = epoch & 0x7FFFFFFFFFFFFFFF
    decode = DecodeRole(engine, links, config.transfer, replies.fail, first_generation=first_generation, wire=wire)

    kind = _kind(engine)
    reader = PeerReader(engine, transport, links, config.transfer)
    tiers = create_tiers(config.tiers, engine)
    cache = TieredCache(engine, tiers, CostModel().steps(kind), peers=reader, config=config.tiers)
    engine.scheduler.listen(cache)
    lender = PeerLender(engine, cache.memory_tier, links, config.transfer)
    pins = WorkerPins(engine, cache, config.tiers.pin_share)

    return WorkerParts(
        config=config,
        kind=kind,
        address=address,
        engine=engine,
        transport=transport,
        context=context,
        sockets=sockets,
        heartbeats=heartbeats,
        dropped=dropped,
        replies=replies,
        compatibility=compatibility,
        links=links,
        prefill=prefill,
        decode=decode,
        cache=cache,
        reader=reader,
        lender=lender,
        copies=KvCopies(engine, reader),
        pins=pins,
        long_prompts=LongPrompts(engine.namespace, config.engine.block_size, engine.model.vocab_size, sockets.wake),
    )


def _compatibility(config: WorkerConfig, engine: Engine) -> dict[str, str]:
    """What two workers must agree on to exchange KV."""
    return compatibility_fields(
        model_revision=engine.model.revision,
        namespace=engine.namespace,
        kv_dtype=engine.model.kv_type,
        block_size=config.engine.block_size,
        block_shape=engine.kv.block_shape,
        transport=config.transfer.transport,
        checksums=config.transfer.checksums,
    )


def _wire_codec(config: WorkerConfig, engine: Engine) -> WireCodec | None:
    """What packs KV for other workers, and unpacks theirs; None: it is sent as it is."""
    setting, kv = config.transfer.wire_codec, engine.kv
    is_spread = kv.device.type == "cuda" and len(kv.shards) > 1  # over several GPUs, each with its own order of work
    if setting == "raw":
        return None
    if setting == "auto" and (is_spread or kv.dtype is not torch.bfloat16):
        return None
    if is_spread:
        raise ConfigError("wire_codec='exact' packs the KV of one GPU, and this worker has several; use auto")
    codec = codec_for("exact", kv.device)
    packed_bytes = codec.encoded_bytes(kv.block_shape, kv.dtype)
    if packed_bytes < kv.block_bytes:
        return WireCodec(kv.shards, codec, setting)
    if setting == "auto":
        return None
    raise ConfigError(
        f"wire_codec='exact' saves nothing: a block of {kv.block_bytes} bytes has {packed_bytes} packed; "
        "use auto, or raise block_size"
    )


def _kind(engine: Engine) -> str:
    device = engine.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"
    return f"{name} x {engine.model.num_ranks}" if engine.model.num_ranks > 1 else name
