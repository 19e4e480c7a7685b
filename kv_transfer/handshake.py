"""What two workers must agree on before either describes its memory to the other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.protocol.messages import WIRE_VERSION


def compatibility_fields(
    *,
    model_revision: str,
    namespace: bytes,
    kv_dtype: str,
    block_size: int,
    block_shape: Sequence[int],
    transport: str,
    checksums: str,
) -> dict[str, str]:
    """Fields for `PeerHello.compatibility`. `block_shape` is that of whole blocks.

    The tensor parallel sizes may differ: transports know how each pool is sharded.
    """
    return {
        "wire_version": str(WIRE_VERSION),
        "model_revision": model_revision,
        "namespace": namespace.hex(),
        "kv_dtype": kv_dtype,
        "block_size": str(block_size),
        "block_shape": "x".join(map(str, block_shape)),
        "transport": transport,
        "checksums": checksums,  # otherwise a worker that checks all blocks would accept unchecked ones from a peer
    }


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Each field that differs, with both values, for our own log; "" if none does. A missing field differs."""
    return "; ".join(
        f"{name}: {_show(mine, name)} here, {_show(theirs, name)} there"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    )


def differing_fields(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Only the names of the fields that differ. They are sent to the other side."""
    return ", ".join(sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)))


def _show(fields: Mapping[str, str], name: str) -> str:
    return repr(fields[name]) if name in fields else "missing"
