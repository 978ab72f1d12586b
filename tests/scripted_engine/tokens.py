"""A tokenizer that needs no model: markers, then groups of three printable ASCII characters, then single bytes.

No group reaches over a line's end, so that text has the same ids at the start of a reply as in its history. It is
reversible (``decode(encode(text)) == text``), quick (8,000 ids in half a millisecond) and, like a learned one, not
unique: ``encode(text, shift=1)`` gives other ids for the same text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

MARKERS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
)
TURN_START, TURN_END = 1, 2
CONTROL = frozenset((0, TURN_START, TURN_END))
"""Markers that are no text to a client; the others are ordinary text with an id of their own."""

ALPHABET = bytes(range(0x20, 0x7F))
BASE = len(ALPHABET)
BYTES = 16
PAIRS = BYTES + 256
TRIPLES = PAIRS + BASE**2
VOCABULARY = TRIPLES + BASE**3
SMALL = 300
"""Runs up to this length are remembered; numpy's own cost is more than theirs."""

RANK = bytes(ALPHABET.index(byte) if byte in ALPHABET else 0 for byte in range(256))
WEIGHTS = np.array([BASE**2, BASE, 1], dtype=np.int32)
SPLIT = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
RUNS = re.compile(r"[ -~]+|[^ -~]+")
MARKER_IDS = {text: number for number, text in enumerate(MARKERS)}


def encode(text: str, shift: int = 0) -> list[int]:
    """The ids of ``text``. With ``shift`` 1 or 2 the groups of each run start that many characters later."""
    ids: list[int] = []
    for part in SPLIT.split(text):
        marker = MARKER_IDS.get(part)
        if marker is not None:
            ids.append(marker)
        elif part:
            for run in RUNS.findall(part):
                ids += _small(run, shift) if len(run) <= SMALL else _run(run, shift)
    return ids


def _run(run: str, shift: int) -> Sequence[int]:
    raw = run.encode("utf-8", "surrogatepass")
    if len(raw) != len(run) or raw[0] not in ALPHABET:
        return [BYTES + byte for byte in raw]
    head, rest = raw[:shift], raw[shift:]
    whole = len(rest) - len(rest) % 3
    ranks = np.frombuffer(rest[:whole].translate(RANK), dtype=np.uint8).astype(np.int32).reshape(-1, 3)
    return [*_tail(head), *(ranks @ WEIGHTS + TRIPLES).tolist(), *_tail(rest[whole:])]


_small = lru_cache(maxsize=4096)(lambda run, shift: tuple(_run(run, shift)))


def _tail(raw: bytes) -> list[int]:
    if len(raw) == 2:
        return [PAIRS + RANK[raw[0]] * BASE + RANK[raw[1]]]
    return [BYTES + byte for byte in raw]


class _Pieces(dict[int, bytes]):
    """The bytes of each id that was ever asked for; an id that is in no vocabulary has none."""

    def __missing__(self, token: int) -> bytes:
        if BYTES <= token < PAIRS:
            piece = bytes((token - BYTES,))
        elif PAIRS <= token < TRIPLES:
            first, second = divmod(token - PAIRS, BASE)
            piece = bytes((ALPHABET[first], ALPHABET[second]))
        elif TRIPLES <= token < VOCABULARY:
            rest, third = divmod(token - TRIPLES, BASE)
            first, second = divmod(rest, BASE)
            piece = bytes((ALPHABET[first], ALPHABET[second], ALPHABET[third]))
        else:
            piece = MARKERS[token].encode() if 0 <= token < len(MARKERS) else b""
        self[token] = piece
        return piece


PIECES = _Pieces()


def raw_text(ids: Iterable[int], *, control: bool) -> bytes:
    """The bytes of ``ids``, those of control markers only with ``control``."""
    return b"".join(map(PIECES.__getitem__, ids if control else [token for token in ids if token not in CONTROL]))


def decode(ids: Iterable[int], *, control: bool = True) -> str:
    """The text of ``ids``. A character that its last bytes do not finish is left out, as vLLM does."""
    return Decoder(control=control).push(ids)


class Decoder:
    """Text as ids come: a character waits until all its bytes are there."""

    def __init__(self, *, control: bool = True) -> None:
        self._control = control
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._bytes.decode(raw_text(ids, control=self._control))


LOGPROBS = [float(np.float32(-(((number * 7919) % 1009) + 1) / 331.0)) for number in range(1009)]


def logprob(token: int) -> float:
    """A float32 below 0 that the id alone decides."""
    return LOGPROBS[token % 1009]
