"""Checksums of row files: a changed bit anywhere in a file is noticed before Arrow parses the file.

The checksum lies between the data and the footer of a Parquet file, where no reader looks. A program that rewrites the
file drops it, and the file is then read as one of an older tpbench, without a check.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

_BEGIN, _END = b"\xfftpbench-sha256\xfe", b"\xfesha256-tpbench\xff"
"""Marks around the checksum. No valid text contains them. There are two, because a bit may change in one of them."""

_FOOTER_END = 8
"""The last bytes of a Parquet file: the length of the footer and `PAR1`."""


def with_checksum(content: bytes) -> bytes:
    """Return a Parquet file with a checksum of all its bytes. A file that has one already stays as it is."""
    if _BEGIN in content:
        return content
    footer = int.from_bytes(content[-_FOOTER_END:-4], "little")
    cut = len(content) - _FOOTER_END - footer
    before, after = content[:cut] + _BEGIN, _END + content[cut:]
    return before + _digest(before, after) + after


def is_damaged(content: bytes) -> bool:
    """Return True if the file has a checksum, or a part of one, that does not fit its bytes."""
    begin, end = content.rfind(_BEGIN), content.rfind(_END)
    if begin < 0 and end < 0:
        return False
    start, view = begin + len(_BEGIN), memoryview(content)
    return begin < 0 or end < 0 or _digest(view[:start], view[end:]) != content[start:end]


def _digest(before: bytes | memoryview, after: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(before)
    digest.update(after)
    return digest.digest()


def main(files: Sequence[str]) -> None:
    """Add a checksum to the named files of rows: `python -m tpbench.results.checksum FILE...`."""
    for file in map(Path, files):
        file.write_bytes(with_checksum(file.read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1:])
