"""The footer of a block on disk and in object stores. It proves that a holder of the key wrote the block.

The footer follows the bytes, so that they start at offset 0: direct I/O and GPUDirect Storage need them aligned.
"""

from __future__ import annotations

import secrets
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tandem.kv_transfer.tiers.base import Block, BlockName
from tandem.kv_transfer.tiers.key import StoreKey

__all__ = ["FOOTER_BYTES", "BlockAuthenticator"]

_NAME = struct.Struct("<16s16sQ")  # digest, parent, number of bytes before the footer
_TAG_BYTES = 16
_FOOTER = struct.Struct(f"<8s12s4x{_NAME.size + _TAG_BYTES}s")  # magic, nonce, encrypted name with its tag
_MAGIC = b"tandemK2"
_NONCE_BYTES = 12  # random: among 2^32 blocks two have the same one with probability 2^-33
FOOTER_BYTES = _FOOTER.size


class BlockAuthenticator:
    """Makes and checks footers with a key: the block's name in AES-256-GCM, with the block's bytes authenticated.

    The bytes themselves are not encrypted. A block of 360 KB takes 13 us here (28 GB/s); HMAC-SHA256 takes 190 and
    keyed BLAKE2b 280. XXH3 takes 3, but does not stop a forger. Several threads may use it.
    """

    def __init__(self, key: StoreKey) -> None:
        self._cipher = AESGCM(key.sealing_key)

    def make(self, name: BlockName, data: Block) -> bytes:
        """The footer of this block."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _FOOTER.pack(_MAGIC, nonce, self._cipher.encrypt(nonce, _pack_name(name, data), data.data))

    def is_genuine(self, name: BlockName, data: Block, footer: bytes | bytearray) -> bool:
        """Whether a holder of the key made this footer for these bytes under this name."""
        if len(footer) != FOOTER_BYTES:
            return False
        magic, nonce, sealed_name = _FOOTER.unpack(footer)
        if magic != _MAGIC:
            return False
        try:
            return self._cipher.decrypt(nonce, sealed_name, data.data) == _pack_name(name, data)
        except InvalidTag:
            return False


def _pack_name(name: BlockName, data: Block) -> bytes:
    return _NAME.pack(name.digest, name.parent or b"", data.nbytes)
