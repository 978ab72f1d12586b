from __future__ import annotations

import time
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import derived_id, new_id, trace_id
from schemas.packed import pack_ids, pack_logprobs, pack_mask, unpack_ids, unpack_logprobs, unpack_mask

IDS = st.lists(st.integers(0, 2**31 - 1))
LOGPROBS = st.lists(st.floats(max_value=0.0, allow_nan=False, width=32))
MASK = st.lists(st.integers(0, 1))


@given(IDS)
def test_token_ids_come_back_exactly(ids):
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


@given(LOGPROBS)
def test_float32_logprobs_come_back_bit_for_bit(logprobs):
    assert unpack_logprobs(pack_logprobs(logprobs)).tobytes() == np.array(logprobs, "<f4").tobytes()


@given(MASK)
def test_masks_come_back_exactly(mask):
    assert unpack_mask(pack_mask(mask)).tolist() == mask


@given(IDS, IDS)
def test_packing_is_concatenation(first, second):
    assert pack_ids(first) + pack_ids(second) == pack_ids(first + second)


@given(IDS)
def test_arrays_generators_and_lists_pack_alike(ids):
    packed = pack_ids(ids)
    assert packed == pack_ids(iter(ids)) == pack_ids(np.array(ids, np.int64)) == pack_ids(unpack_ids(packed))


def test_the_bytes_are_little_endian():
    assert pack_ids([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert pack_logprobs([-1.0]) == b"\0\0\x80\xbf"


def test_unpacked_arrays_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        unpack_ids(pack_ids([1]))[0] = 2


@given(IDS, st.integers(max_value=-1) | st.integers(min_value=2**31, max_value=2**62))
def test_an_id_outside_int32_is_refused(ids, wrong):
    if wrong < -(2**62):
        wrong = -1
    with pytest.raises(ValueError, match="token id"):
        pack_ids([*ids, wrong])


@pytest.mark.parametrize("wrong", [float("nan"), 0.001, float("inf")])
def test_what_is_no_logprob_is_refused(wrong):
    with pytest.raises(ValueError, match="log-prob"):
        pack_logprobs([-0.5, wrong])


def test_rounding_above_zero_is_a_logprob():
    assert unpack_logprobs(pack_logprobs([5e-5])).tolist() == pytest.approx([5e-5])


@pytest.mark.parametrize("wrong", [2, -1, 255])
def test_a_mask_holds_zero_and_one_only(wrong):
    with pytest.raises(ValueError, match="mask"):
        pack_mask([0, wrong])


def test_two_dimensions_are_refused():
    with pytest.raises(ValueError, match="one dimension"):
        pack_ids(np.zeros((2, 2), np.int64))


def test_new_ids_are_uuid7_of_the_present():
    before = time.time_ns() // 1_000_000
    identity = uuid.UUID(new_id())
    assert (identity.version, identity.variant) == (7, uuid.RFC_4122)
    assert before <= identity.int >> 80 <= time.time_ns() // 1_000_000


def test_new_ids_differ():
    assert len({new_id() for _ in range(1000)}) == 1000


@given(st.text(), st.integers(0, 9), st.text(), st.integers(0, 9))
def test_trace_ids_depend_on_their_parts_alone(session, attempt, builder, branch):
    assert trace_id(session, attempt, builder, branch) == trace_id(session, attempt, builder, branch)
    assert trace_id(session, attempt, builder, branch) != trace_id(session, attempt + 1, builder, branch)
    uuid.UUID(derived_id(session, attempt))
