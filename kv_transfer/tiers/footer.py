"""What lies behind a block's bytes on disk and in object stores, and proves that somebody with the key wrote them.

The footer follows the bytes, so that these start at offset 0: direct I/O and GPUDirect Storage want them aligned.
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
_FOOTER = struct.Struct(f"<8s12s4x{_NAME.size + _TAG_BYTES}s")  # magic, nonce, the name encrypted and its tag
_MAGIC = b"tandemK2"
_NONCE_BYTES = 12  # random: two of 2^32 blocks have the same with a chance of 2^-33
FOOTER_BYTES = _FOOTER.size


class BlockAuthenticator:
    """Makes and checks footers with a key: the block's name in AES-256-GCM, with the block's bytes authenticated.

    The bytes themselves are not encrypted. One of 360 KB takes 13 us here (28 GB/s), where XXH3, which proves nothing
    against someone who wants to deceive, takes 3, HMAC-SHA256 190 and keyed BLAKE2b 280. Several threads may use it.
    """

    def __init__(self, key: StoreKey) -> None:
        self._cipher = AESGCM(key.sealing_key)

    def make(self, name: BlockName, data: Block) -> bytes:
        """The footer of this block."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _FOOTER.pack(_MAGIC, nonce, self._cipher.encrypt(nonce, _pack_name(name, data), data.data))

    def is_genuine(self, name: BlockName, data: Block, footer: bytes | bytearray) -> bool:
        """Whether somebody with the key made this footer for these bytes under this name."""
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
