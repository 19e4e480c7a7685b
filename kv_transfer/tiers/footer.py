"""What lies behind a block's bytes on disk and in object stores, and proves that somebody with the key wrote them.

The footer follows the bytes, so that these start at offset 0: direct I/O and GPUDirect Storage want them aligned.
"""

from __future__ import annotations

import secrets
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from kv_transfer.tiers.base import Block, BlockName
from kv_transfer.tiers.key import StoreKey

__all__ = ["FOOTER_BYTES", "Seal"]

_HEADER = struct.Struct("<8s16s16sQ")  # magic, digest, parent, number of bytes before it
_FOOTER = struct.Struct(f"<{_HEADER.size}s12s4x16s")  # header, nonce, tag
_MAGIC = b"tandemK2"
_NONCE_BYTES = 12  # random: two of 2^32 blocks are the same with a chance of 2^-33
FOOTER_BYTES = _FOOTER.size


class Seal:
    """Makes and checks footers with a key: AES-256-GCM's authentication of a block's bytes and name (GMAC).

    Nothing is encrypted. A block of 360 KB takes 15 us here (26 GB/s), where XXH3, which proves nothing against someone
    who wants to deceive, took 3, HMAC-SHA256 190 and keyed BLAKE2b 280. Used by several threads at once.
    """

    def __init__(self, key: StoreKey) -> None:
        self._algorithm = AES(key.sealing_key)

    def make(self, name: BlockName, data: Block) -> bytes:
        """The footer of this block."""
        header, nonce = _header(name, data), secrets.token_bytes(_NONCE_BYTES)
        encryptor = Cipher(self._algorithm, GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(header)
        encryptor.authenticate_additional_data(data.data)
        encryptor.finalize()
        return _FOOTER.pack(header, nonce, encryptor.tag)

    def is_genuine(self, name: BlockName, data: Block, footer: bytes | bytearray) -> bool:
        """Whether somebody with the key made this footer for these bytes under this name."""
        if len(footer) != FOOTER_BYTES:
            return False
        header, nonce, tag = _FOOTER.unpack(footer)
        if header != _header(name, data):
            return False
        decryptor = Cipher(self._algorithm, GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(header)
        decryptor.authenticate_additional_data(data.data)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True


def _header(name: BlockName, data: Block) -> bytes:
    return _HEADER.pack(_MAGIC, name.digest, name.parent or b"", data.nbytes)
