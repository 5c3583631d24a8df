"""Mutations of bytes that a reader must read or refuse."""

from __future__ import annotations

import random

EDGES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
OPCODES = b"(.0123FIJKLMNPQRSTUVXabcdeghijlopqrstuG]}" + bytes(range(0x80, 0x99))


def mutate(data: bytes, random_: random.Random) -> bytes:
    """One to four changes: a byte, an opcode, a number, a piece cut out or put in again."""
    body = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(body))
        size = random_.choice([1, 2, 4, 8, 16])
        kind = random_.randrange(6)
        if kind == 0:
            body[at] = random_.randrange(256)
        elif kind == 1:
            body[at] = random_.choice(OPCODES)
        elif kind == 2:
            number = random_.choice(EDGES).to_bytes(8, "little")[: min(size, 8)]
            body[at : at + len(number)] = number[: len(body) - at]
        elif kind == 3 and len(body) > size:
            del body[at : at + size]
        elif kind == 4:
            begin = random_.randrange(len(body))
            body[at:at] = body[begin : begin + size]
        else:
            body[at] ^= 1 << random_.randrange(8)
    return bytes(body)
