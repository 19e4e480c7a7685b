"""What lies behind a block's bytes on disk and in object stores, and shows that they are those that were written.

The footer follows the bytes, so that these start at offset 0: direct I/O and GPUDirect Storage want them aligned.
"""

from __future__ import annotations

import struct

import xxhash

from kv_transfer.tiers.base import Block, BlockName

__all__ = ["FOOTER_BYTES", "make_footer"]

_FOOTER = struct.Struct("<8s16s16sQQ8x")  # magic, digest, parent, number of bytes before it, their checksum
_MAGIC = b"tandemK1"
FOOTER_BYTES = _FOOTER.size


def make_footer(name: BlockName, data: Block) -> bytes:
    """The footer of this block; bytes whose stored footer is another one are not this block. 64 bytes.

    XXH3 runs at 12 GB/s on one core here, where CRC-32 reaches 2 and would be slower than the disk. It lets go of the
    interpreter lock.
    """
    return _FOOTER.pack(_MAGIC, name.digest, name.parent or b"", data.nbytes, xxhash.xxh3_64_intdigest(data.data))
