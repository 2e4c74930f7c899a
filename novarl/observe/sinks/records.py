"""How a record lies in an event file: TensorFlow's framing, without importing TensorBoard's writer of it.

    uint64 length, uint32 checksum of it, the record, uint32 checksum of that        (little-endian)

A checksum is CRC-32C (Castagnoli), turned by 15 bits and shifted by a constant, as a file that holds checksums may have
to be checked itself.
"""

from __future__ import annotations

import struct

_POLYNOMIAL = 0x82F63B78
"""Of Castagnoli's code, its bits reversed."""

_SHIFT = 0xA282EAD8


def framed(record: bytes) -> bytes:
    """The record as it is written."""
    length = struct.pack("<Q", len(record))
    return b"".join([length, struct.pack("<I", _masked(length)), record, struct.pack("<I", _masked(record))])


def _masked(data: bytes) -> int:
    crc = _crc32c(data)
    return ((crc >> 15 | crc << 17) + _SHIFT) & 0xFFFFFFFF


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_entry(byte) for byte in range(256)]
