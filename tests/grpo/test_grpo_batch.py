"""Records of polar.batches become a batch, or a BatchError: never a batch that is not the sealed one."""

import msgspec
import numpy as np
import pytest
from grpo_material import batch_records, make_trace, random_traces, seal

from polar.grpo.advantages import group_advantages
from polar.grpo.batch import BatchAssembly, train_batch
from polar.grpo.errors import BatchError
from schemas.batches import GroupExcluded
from schemas.traces import SampledSpan


def assemble(records, *, next_number=1):
    assembly = BatchAssembly("policy", next_number)
    return [batch for record in records if (batch := assembly.add(record)) is not None]


def test_batches_come_out_whole_and_in_order():
    records = batch_records(1, random_traces(1)) + batch_records(2, random_traces(2))
    records.insert(3, GroupExcluded(policy="policy", group_id="g", reason="stale"))
    records.insert(5, msgspec.structs.replace(seal(9, []), policy="another"))
    batches = assemble(records)
    assert [batch.number for batch in batches] == [1, 2]
    assert [len(batch.sequences) for batch in batches] == [6, 6]
    assert batches[0].rewards == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_a_sequence_holds_what_the_trace_says():
    trace = make_trace(
        session_id="s",
        group_id="g",
        reward=1.0,
        prompt=[5, 6],
        turns=[([7, 8], True), ([9], False), ([10], True), ([11], False)],
        version=0,
        temperature=0.5,
    )
    other = make_trace(session_id="t", group_id="g", reward=0.0, prompt=[5], turns=[([6], True)])
    batch = train_batch(seal(1, [trace, other]), [trace, other])
    sequence = batch.sequences[0]
    assert sequence.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert sequence.positions.tolist() == [2, 3, 5]
    assert sequence.ids[sequence.positions].tolist() == [7, 8, 10]
    assert sequence.temperatures.tolist() == [0.5] * 3
    assert sequence.sampled_logprobs.tolist() == [-1.0] * 3
    assert [s.advantage for s in batch.sequences] == group_advantages([1.0, 0.0])
    assert batch.trained_tokens == 4


def test_temperature_and_version_follow_each_span():
    trace = make_trace(session_id="s", group_id="g", reward=1.0, prompt=[1], turns=[([2, 3, 4], True)])
    spans = [
        SampledSpan(start=0, end=1, version=0, call_id="c", temperature=0.7),
        SampledSpan(start=1, end=3, version=1, call_id="c", temperature=1.2),
    ]
    trace = msgspec.structs.replace(trace, spans=spans)
    other = make_trace(session_id="t", group_id="g", reward=0.0, prompt=[5], turns=[([6], True)])
    sequence = train_batch(seal(2, [trace, other]), [trace, other]).sequences[0]
    assert sequence.versions.tolist() == [0, 1, 1]
    assert np.allclose(sequence.temperatures, [0.7, 1.2, 1.2])


def test_a_session_without_a_trace_still_counts_in_its_group():
    traces = random_traces(1, groups=1, samples=3)
    batch = train_batch(
        msgspec.structs.replace(seal(1, traces), traces=2, trained_tokens=sum(t.trained_tokens for t in traces[:2])),
        traces[:2],
    )
    assert [s.advantage for s in batch.sequences] == group_advantages([0.0, 1.0, 0.0])[:2]


def without_variance(number):
    return batch_records(number, [msgspec.structs.replace(t, reward=1.0) for t in random_traces(number)])


def trained_twice(number):
    traces = random_traces(number)
    return batch_records(number, [*traces, msgspec.structs.replace(traces[0], trace_id="again", branch=1)])


def from_the_future(number):
    return batch_records(number, random_traces(number + 1))


def without_context(number):
    bad = make_trace(session_id="s", group_id="g", reward=1.0, prompt=[], turns=[([2], True)])
    return batch_records(
        number, [bad, make_trace(session_id="t", group_id="g", reward=0.0, prompt=[1], turns=[([2], True)])]
    )


def greedy(number):
    traces = random_traces(number)
    spans = [msgspec.structs.replace(span, temperature=0.0) for span in traces[0].spans]
    return batch_records(number, [msgspec.structs.replace(traces[0], spans=spans), *traces[1:]])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (batch_records(2, random_traces(2)), "batch 2 came where batch 1"),
        (batch_records(1, random_traces(1)) * 2, "batch 1 came where batch 2"),
        (batch_records(1, random_traces(1))[1:], "trace 1 came where 0"),
        (batch_records(1, random_traces(1))[:2] + batch_records(1, random_traces(1))[3:], "trace 3 came where 2"),
        (batch_records(1, random_traces(1))[:5] + batch_records(1, random_traces(1))[-1:], "the seal names 6 traces"),
        ([seal(1, [])], "no trained token"),
        (without_variance(1), "no variance"),
        (trained_twice(1), "is trained in"),
        (from_the_future(1), "not yet made"),
        (without_context(1), "no context"),
        (greedy(1), "temperature"),
    ],
)
def test_what_must_not_be_trained_is_refused(records, message):
    with pytest.raises(BatchError, match=message):
        assemble(records)


def test_a_trace_of_a_session_that_the_seal_does_not_name_is_refused():
    traces = random_traces(1)
    named = msgspec.structs.replace(seal(1, traces), groups=seal(1, traces[:3]).groups)
    with pytest.raises(BatchError, match="not in the seal"):
        train_batch(named, traces)
