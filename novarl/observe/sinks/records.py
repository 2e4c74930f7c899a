"""The framing of records in TensorFlow event files, without importing TensorBoard's writer.

    uint64 length, uint32 checksum of it, the record, uint32 checksum of that        (little-endian)

The checksum is CRC-32C (Castagnoli), rotated by 15 bits and offset by a constant.
"""

from __future__ import annotations

import struct

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, bits reversed."""

_SHIFT = 0xA282EAD8


def framed(record: bytes) -> bytes:
    """The record with its length and checksums."""
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
