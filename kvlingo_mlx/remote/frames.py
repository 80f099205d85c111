"""How an answer of one machine to another is framed: a stream of payloads, each with its digest."""

import hashlib
import struct

HEAD = struct.Struct(">cQ32s")  # a kind, the bytes that follow, and their digest
WAIT, CHUNK, FAILED = b"w", b"c", b"f"  # not yet; a payload; why there will be none


def digest(key: str, kind: bytes, payload: bytes) -> bytes:
    """The sha256 of a frame; ``key`` is the question's, so that no other's answer is taken."""
    found = hashlib.sha256(key.encode() + kind)
    found.update(payload)
    return found.digest()


def head(key: str, kind: bytes, payload: bytes = b"") -> bytes:
    """What precedes a payload."""
    return HEAD.pack(kind, len(payload), digest(key, kind, payload))
