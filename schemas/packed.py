"""Packed token arrays: little-endian bytes, which msgspec writes to JSON as base64.

Token ids are int32, log-probs float32, loss masks uint8. Exact, compact, and read by numpy without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

IDS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")
MASK = np.dtype("u1")


def _pack(values: Iterable[Any], dtype: np.dtype[Any]) -> bytes:
    array = values if isinstance(values, np.ndarray) else np.array(list(values))
    if array.ndim != 1:
        raise ValueError(f"a packed array has one dimension, not {array.ndim}")
    return array.astype(dtype, casting="unsafe", copy=False).tobytes()


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids, shape (n,), to int32 bytes. Raises ValueError for an id outside 0…2³¹−1."""
    array = np.array(list(ids) if not isinstance(ids, np.ndarray) else ids, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError("a token id must lie in 0…2147483647")
    return _pack(array, IDS)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Log-probs in nats, shape (n,), to float32 bytes. Raises ValueError for NaN or a value above 0 (+1e-4)."""
    array = np.array(list(logprobs) if not isinstance(logprobs, np.ndarray) else logprobs, dtype=np.float64)
    if array.size and not (array <= 1e-4).all():
        raise ValueError("a log-prob must be a number that is not above 0")
    return _pack(array, LOGPROBS)


def pack_mask(mask: Iterable[int]) -> bytes:
    """A loss mask of 0 and 1, shape (n,), to uint8 bytes. Raises ValueError for other values."""
    array = np.array(list(mask) if not isinstance(mask, np.ndarray) else mask, dtype=np.int64)
    if array.size and not np.isin(array, (0, 1)).all():
        raise ValueError("a loss mask holds 0 and 1 only")
    return _pack(array, MASK)


def unpack_ids(packed: bytes) -> NDArray[np.int32]:
    """int32 array of shape (n,), read-only."""
    return np.frombuffer(packed, IDS)


def unpack_logprobs(packed: bytes) -> NDArray[np.float32]:
    """float32 array of shape (n,), read-only."""
    return np.frombuffer(packed, LOGPROBS)


def unpack_mask(packed: bytes) -> NDArray[np.uint8]:
    """uint8 array of shape (n,), read-only."""
    return np.frombuffer(packed, MASK)
