"""Bitmaps over record indices or positions: bit i is bit i % 8 of byte i // 8, lowest first."""

from collections.abc import Iterator


def empty(bits: int) -> bytearray:
    return bytearray((bits + 7) // 8)


def padded(bitmap: bytes, bits: int) -> bytearray:
    """A copy that has room for `bits`."""
    return bytearray(bitmap) + bytearray(max(0, (bits + 7) // 8 - len(bitmap)))


def get(bitmap: bytes | bytearray, bit: int) -> bool:
    """False beyond the end, so that a bitmap may be stored without trailing zeros."""
    byte = bit >> 3
    return byte < len(bitmap) and bool(bitmap[byte] >> (bit & 7) & 1)


def set_bit(bitmap: bytearray, bit: int) -> None:
    bitmap[bit >> 3] |= 1 << (bit & 7)


def count(bitmap: bytes | bytearray) -> int:
    return int.from_bytes(bitmap, "little").bit_count()


def unset(bitmap: bytes | bytearray, bits: int, start: int = 0) -> Iterator[int]:
    """The bits below `bits`, from `start` on, that are not set, ascending; full bytes are skipped whole."""
    bit = start
    while bit < bits:
        if not bit & 7 and bit >> 3 < len(bitmap) and bitmap[bit >> 3] == 0xFF:
            bit += 8
            continue
        if not get(bitmap, bit):
            yield bit
        bit += 1


def first_unset(bitmap: bytes | bytearray, bits: int, start: int = 0) -> int:
    """The lowest bit from `start` on that is not set, or `bits`."""
    return next(unset(bitmap, bits, start), bits)
