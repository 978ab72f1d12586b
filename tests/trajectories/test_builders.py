"""The builders, by properties: every delivered token is trained once, and ids are what the engine saw."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_stories import call, completed, delivery, ending, fold, opened, same, session, started

from polar.trajectories import BUILDERS, assemble, whole_calls
from polar.trajectories.builders import per_request, prefix_merging
from schemas.packed import unpack_ids, unpack_logprobs, unpack_mask
from schemas.sessions import CallDelivery

ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@st.composite
def conversations(draw):
    """Calls that go on from, edit, retry or ignore earlier ones, over three tokens so that prefixes collide.

    Of some it was never told whether they were delivered.
    """
    wholes: list[list[int]] = []
    asked: list[tuple[list[int], list[int]]] = []
    records = []
    for number in range(1, draw(st.integers(1, 7)) + 1):
        prompt = draw(ids)
        if wholes and draw(st.booleans()):
            history = draw(st.sampled_from(wholes))
            keep = draw(st.one_of(st.just(len(history)), st.integers(0, len(history))))
            prompt = history[:keep] + draw(st.lists(st.integers(0, 2), max_size=2)) or prompt
        response = draw(ids)
        if asked and draw(st.integers(0, 3)) == 0:
            prompt, response = draw(st.sampled_from(asked))
        asked.append((prompt, response))
        wholes.append(prompt + response)
        auxiliary = draw(st.sampled_from([None, None, None, "title"]))
        records += [started(number, prompt, auxiliary=auxiliary), completed(number, response, version=number % 3)]
        if (delivered := draw(st.sampled_from([True, True, True, False, None]))) is not None:
            records.append(delivery(number, delivered))
    return records


def calls_of(records):
    return whole_calls(fold([opened(), *records]))


def trained(sequences):
    """How often each sampled token (call, position, id, log-prob) is trained."""
    tokens = Counter()
    for sequence in sequences:
        for span in sequence.spans:
            for position in range(span.start, span.end):
                if sequence.loss_mask[position]:
                    token = (int(sequence.response_ids[position]), float(sequence.logprobs[position]), span.version)
                    tokens[(span.call_id, *token)] += 1
        in_spans = np.zeros(len(sequence.loss_mask), bool)
        for span in sequence.spans:
            in_spans[span.start : span.end] = True
        assert not sequence.loss_mask[~in_spans].any()
        assert not sequence.logprobs[sequence.loss_mask == 0].any()
    return tokens


@given(conversations())
def test_each_delivered_token_is_trained_exactly_once(records):
    calls = calls_of(records)
    expected = Counter()
    for c in calls:
        if c.delivered and c.auxiliary is None:
            for token, logprob in zip(c.response_ids.tolist(), c.logprobs.tolist(), strict=True):
                expected[(c.call_id, token, logprob, c.versions[0].version)] += 1
    assert trained(per_request(calls)) == expected
    assert trained(prefix_merging(calls)) == expected


def sampled(c):
    """The tokens that a call sampled, each as all ids up to it."""
    whole = c.ids.tolist()
    return {tuple(whole[: n + 1]) for n in range(len(c.prompt_ids), len(whole))}


@given(conversations())
def test_a_call_whose_delivery_is_inferred_has_no_twin_that_is_trained_too(records):
    calls = [c for c in calls_of(records) if c.delivered]
    told = {record.call_id for record in records if isinstance(record, CallDelivery)}
    for inferred in (c for c in calls if c.call_id not in told):
        twins = [c for c in calls if c is not inferred and c.ids.tolist() == inferred.ids.tolist()]
        assert not any(sampled(inferred) & sampled(twin) for twin in twins)


@pytest.mark.parametrize(
    ("first", "second", "delivered"),
    [
        ([], [], [False, True, True]),
        ([delivery(1)], [], [True, False, True]),
        ([], [delivery(2)], [False, True, True]),
        ([delivery(1, False)], [], [False, True, True]),
        ([delivery(1)], [delivery(2)], [True, True, True]),
    ],
)
def test_of_a_sample_that_came_twice_what_was_told_counts_and_else_the_last(first, second, delivered):
    records = [started(1, [1]), completed(1, [2, 3]), *first, started(2, [1]), completed(2, [2, 3]), *second]
    assert [c.delivered for c in calls_of([*records, *call(3, [1, 2, 3, 4], [5])])] == delivered


def test_a_retry_that_was_given_more_of_the_same_sample_counts_alone():
    cut = [started(1, [1]), completed(1, [2]), started(2, [1]), completed(2, [2, 3])]
    assert [c.delivered for c in calls_of([*cut, *call(3, [1, 2, 3, 4], [5])])] == [False, True, True]
    other = [started(4, [1, 2, 9]), completed(4, [5]), delivery(4)]
    assert [c.delivered for c in calls_of([*cut, *call(3, [1, 2, 3, 4], [5]), *other])] == [True, True, True, True]


@given(conversations())
def test_ids_along_a_sequence_are_what_the_engine_saw(records):
    calls = calls_of(records)
    for builder in BUILDERS.values():
        for sequence in builder(calls):
            whole = np.concatenate([sequence.prompt_ids, sequence.response_ids]).tolist()
            for c in sequence.calls:
                assert c.ids.tolist() == whole[: len(c.ids)]
            assert sequence.calls[-1].ids.tolist() == whole
            assert sequence.loss_mask.any()


@given(conversations())
def test_no_sequence_is_a_prefix_of_what_could_have_been_merged(records):
    """Merging is maximal: no sequence's last call is a parent of another sequence's first fresh call."""
    calls = calls_of(records)
    sequences = prefix_merging(calls)
    assert len(sequences) <= len(per_request(calls))
    leaves = [sequence.calls[-1] for sequence in sequences]
    roots = [sequence.calls[0] for sequence in sequences]
    for leaf in leaves:
        for root in roots:
            n = len(leaf.ids)
            assert not np.array_equal(leaf.ids, root.prompt_ids[:n])


@given(conversations(), st.randoms(use_true_random=False))
def test_building_again_gives_the_same_bytes(records, random):
    whole = [opened(), *records, *ending()]
    shuffled = list(whole)
    random.shuffle(shuffled)
    first, again = assemble(fold(whole)), assemble(fold(shuffled + whole[:3]))
    assert same(first, again)
    assert len({trace.trace_id for trace in first.traces}) == len(first.traces) == first.verdict.traces


def test_a_conversation_is_one_trace_with_tool_results_masked():
    [trace] = assemble(fold(session("s", calls=3))).traces
    assert len(unpack_ids(trace.prompt_ids)) == 4
    assert unpack_mask(trace.loss_mask).tolist() == [1] * 5 + [0] * 4 + [1] * 5 + [0] * 4 + [1] * 5
    assert [(s.start, s.end) for s in trace.spans] == [(0, 5), (9, 14), (18, 23)]
    assert trace.notes == [] and trace.finish_reason == "stop" and trace.branch == 0


def test_a_sub_agent_with_the_parents_history_becomes_a_branch():
    records = [*call(1, [1, 2], [3, 4]), *call(2, [1, 2, 3, 4, 5], [6, 7]), *call(3, [1, 2, 3, 4, 8], [9])]
    first, second = prefix_merging(calls_of(records))
    assert first.loss_mask.tolist() == [1, 1, 0, 1, 1]
    assert second.response_ids.tolist() == [3, 4, 8, 9]
    assert second.loss_mask.tolist() == [0, 0, 0, 1]
    assert [s.call_id for s in second.spans] == ["s-0-c1", "s-0-c3"]
    assert second.notes == [
        "branch 1 begins at call 3: it differs from the prompt of call 2 first at position 4 (5 there, 8 here)"
    ]


def test_a_history_that_was_edited_starts_a_new_root():
    records = [*call(1, [1, 2], [3, 4]), *call(2, [1, 2, 3, 9], [6])]
    first, second = prefix_merging(calls_of(records))
    assert second.prompt_ids.tolist() == [1, 2, 3, 9]
    assert second.notes == [
        "branch 1 begins at call 2: it differs from the response of call 1 first at position 3 (4 there, 9 here)"
    ]
    assert first.notes == []


def test_interleaved_sub_agents_keep_to_their_own_chains():
    records = [
        *call(1, [1], [2]),
        *call(2, [5], [6]),
        *call(3, [1, 2, 3], [4]),
        *call(4, [5, 6, 7], [8]),
        *call(5, [1, 2, 3, 4, 0], [9]),
    ]
    assert [[c.number for c in s.calls] for s in prefix_merging(calls_of(records))] == [[1, 3, 5], [2, 4]]


def test_of_two_calls_with_equal_ids_the_second_continues_from_neither_twice():
    records = [*call(1, [1], [2]), *call(2, [1], [2]), *call(3, [1, 2, 3], [4]), *call(4, [1, 2, 5], [6])]
    paths = [[c.number for c in s.calls] for s in prefix_merging(calls_of(records))]
    assert paths == [[1, 3], [2, 4]]


def test_a_retry_whose_first_answer_did_not_arrive_is_trained_once():
    records = [
        started(1, [1, 2]),
        completed(1, [3]),
        delivery(1, False),
        *call(2, [1, 2], [4]),
        *call(3, [1, 2, 4], [5]),
    ]
    [sequence] = prefix_merging(calls_of(records))
    assert sequence.response_ids.tolist() == [4, 5] and sequence.loss_mask.tolist() == [1, 1]


def test_the_version_and_temperature_of_each_token_are_kept():
    records = [started(1, [1]), completed(1, [2, 3], version=4, logprobs=[-0.25, -0.125]), delivery(1)]
    trace = assemble(fold([opened(), *records, *ending()])).traces[0]
    assert trace.versions == [4] and trace.spans[0].temperature == 1.0
    assert unpack_logprobs(trace.logprobs).tolist() == [-0.25, -0.125]


@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_the_builder_of_the_task_is_used(builder):
    records = [opened(builder=builder), *session("s")[1:]]
    assembly = assemble(fold(records))
    assert {trace.builder for trace in assembly.traces} == {builder}
    assert len(assembly.traces) == {"per_request": 3, "prefix_merging": 1}[builder]
