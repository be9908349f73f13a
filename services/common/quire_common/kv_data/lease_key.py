"""Derives values from the key of a lease. The key itself is sent only over gRPC, and is secret. The handle need not be
secret; the keys of a connection are, and are not sent.

handle   names the lease on data connections: who overhears it can neither make frames nor use it over gRPC
keys     of one connection, a pair: for frames to the store and from it. Both ends' nonces go in, so that nothing
         that was ever sent is valid on another connection
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 32
HANDLE_BYTES = 16
NONCE_BYTES = 16
# Frames about a lease that the serving end does not know are made with this; it proves nothing.
NO_KEY = bytes(KEY_BYTES)


def handle_of(lease_key: bytes) -> bytes:
    """Return the lease's name on data connections, 16 bytes: a hash of the key from which the key cannot be derived."""
    return hashlib.blake2b(key=lease_key, person=b"quire kv handle", digest_size=HANDLE_BYTES).digest()


def connection_keys(lease_key: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[bytes, bytes]:
    """Return two keys for one connection: that of frames to the store, and that of frames from it."""
    person = b"quire kv frames"
    both = hashlib.blake2b(server_nonce + client_nonce, key=lease_key, person=person, digest_size=2 * KEY_BYTES)
    return both.digest()[:KEY_BYTES], both.digest()[KEY_BYTES:]
