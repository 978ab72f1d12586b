"""Which groups make which batch, by example and by property."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from traces_made import POLICY, closed, member, trace, whole_group

from polar.batching.former import Batch, State, evolve, resume, safe_offsets
from schemas.batches import GroupExcluded
from schemas.traces import GroupClosed, Trace


def former(batch_groups: int = 2, staleness_limit: int = 1) -> State:
    return State(batch_groups=batch_groups, staleness_limit=staleness_limit)


def feed(state: State, records: list, partition: int = 0) -> list:
    first = state.positions.get(partition, 0)
    actions = [evolve(state, partition, first + n, record) for n, record in enumerate(records)]
    return [action for action in actions if action is not None]


def excluded(records: list, **limits) -> tuple[str, str]:
    [action] = feed(former(**limits), records)
    assert isinstance(action, GroupExcluded)
    return action.reason, action.detail


def test_a_full_batch_is_numbered_and_holds_whole_groups_in_the_order_of_sessions_and_branches():
    state = former()
    first = [trace("g", "s2", reward=1.0), trace("g", "s1", branch=1, reward=0.0), trace("g", "s1", reward=0.0)]
    first.append(closed("g", [member("s2"), member("s1", reward=0.0, traces=2), member("s3", reward=None, traces=0)]))
    assert feed(state, first) == []
    [batch] = feed(state, whole_group("h", version=1))
    assert [t.trace.session_id for t in batch.traces] == ["s1", "s1", "s2", "h-s0", "h-s1"]
    assert [t.trace.branch for t in batch.traces[:2]] == [0, 1]
    assert [(t.batch, t.index) for t in batch.traces] == [(1, n) for n in range(5)]
    seal = batch.seal
    assert (seal.batch, seal.traces, seal.trained_tokens, seal.oldest_version, seal.newest_version) == (1, 5, 10, 0, 1)
    assert [(g.group_id, [(s.session_id, s.reward) for s in g.sessions]) for g in seal.groups] == [
        ("g", [("s1", 0.0), ("s2", 1.0)]),
        ("h", [("h-s0", 0.0), ("h-s1", 1.0)]),
    ]
    assert state.pending == {}


def test_reasons_to_leave_a_group_out_each_with_what_a_person_needs_to_know():
    unusable = [member("s", reward=None), member("t", reward=None)]
    assert excluded([closed("g", unusable)]) == ("no_usable_session", "2 × infrastructure")
    assert excluded(whole_group("g", rewards=(1.0, 1.0))) == ("no_variance", "2 sessions of reward 1")
    assert excluded(whole_group("g", trained=0)) == ("no_trained_token", "2 traces")
    records = whole_group("g")
    assert excluded([records[0], records[-1]]) == ("traces_missing", "session g-s1: 0 of 1 traces")


def test_one_trained_token_that_is_too_old_makes_the_group_stale_and_the_limit_itself_does_not():
    state = former(batch_groups=1, staleness_limit=1)
    state.sealed[POLICY] = 3
    assert isinstance(feed(state, whole_group("fresh", version=2))[0], Batch)
    records = [*whole_group("old", version=3)[:1], *whole_group("old", version=2)[1:]]
    [action] = feed(state, records)
    assert (action.reason, action.detail) == ("stale", "version 2, needed 3")


def test_an_untrained_token_may_be_old_and_a_session_without_trained_tokens_keeps_its_reward():
    state = former(batch_groups=1, staleness_limit=0)
    state.sealed[POLICY] = 5
    records = [trace("g", "a", version=5), trace("g", "b", version=0, trained=0, reward=0.0)]
    [batch] = feed(state, [*records, closed("g", [member("a"), member("b", reward=0.0)])])
    assert [t.trace.session_id for t in batch.traces] == ["a"]
    assert [s.session_id for s in batch.seal.groups[0].sessions] == ["a", "b"]


def test_eval_groups_are_in_no_batch_and_leave_nothing_behind():
    state = former(batch_groups=1)
    assert feed(state, whole_group("e", purpose="eval")) == []
    assert (state.pending, state.done, safe_offsets(state)) == ({}, set(), {0: 3})


def test_policies_have_their_own_numbers():
    state = former(batch_groups=1)
    other = [trace("o", "a", policy="other"), trace("o", "b", policy="other", reward=0.0)]
    other.append(closed("o", [member("a"), member("b", reward=0.0)], policy="other"))
    batches = feed(state, [*whole_group("g"), *other, *whole_group("h")])
    assert [(b.seal.policy, b.seal.batch) for b in batches] == [(POLICY, 1), ("other", 1), (POLICY, 2)]


@st.composite
def logs(draw) -> list[list]:
    """Three partitions of whole groups, with void attempts, repeated traces, and groups interleaved."""
    partitions: list[list] = [[], [], []]
    for number in range(draw(st.integers(1, 10))):
        group = f"g{number}"
        rng = random.Random(draw(st.integers(0, 2**16)))
        purpose = rng.choice(["train", "train", "train", "eval"])
        members, traces = [], []
        for session in (f"{group}-{name}" for name in "abc"):
            attempt, count = rng.randint(1, 2), rng.randint(1, 2)
            reward = rng.choice([0.0, 1.0, 1.0, None])
            version = rng.choice([0, 1, 2, 3])
            fields = {"reward": reward or 0.0, "version": version, "purpose": purpose, "trained": rng.choice([0, 2, 3])}
            if attempt == 2:
                traces.append(trace(group, session, attempt=1, **fields))
            kept = [trace(group, session, attempt=attempt, branch=b, **fields) for b in range(count)]
            traces += kept if reward is not None else []
            traces += kept[: rng.randint(0, 1)] if reward is not None else []
            members.append(member(session, attempt=attempt, reward=reward, traces=count if reward is not None else 0))
        story = [*traces, closed(group, members, purpose=purpose)]
        partition = partitions[number % 3]
        place = max((n + 1 for n, r in enumerate(partition) if isinstance(r, GroupClosed)), default=0)
        place = rng.randint(0, place)
        merged, rest = partition[:place], partition[place:]
        while story or rest:
            source = story if story and (not rest or rng.random() < 0.5) else rest
            merged.append(source.pop(0))
        partitions[number % 3] = merged
    return partitions


def reading_order(partitions: list[list], rng: random.Random) -> list[tuple[int, int, object]]:
    rest = [[(p, offset, record) for offset, record in enumerate(log)] for p, log in enumerate(partitions)]
    order = []
    while any(rest):
        order.append(rng.choice([log for log in rest if log]).pop(0))
    return order


def run(order: list, state: State, crash_at: set[int], changed: random.Random | None, partitions: list) -> list:
    """The actions that are written when the process dies before the moves ``crash_at``, and starts again each time."""
    written, offsets, moves = [], {}, 0
    limits = {"batch_groups": state.batch_groups, "staleness_limit": state.staleness_limit}
    todo = list(order)
    while todo:
        moves += 1
        if moves in crash_at:
            state = State(**limits)
            for action in written:
                resume(state, action.seal if isinstance(action, Batch) else action)
            todo = [one for one in order if one[1] >= offsets.get(one[0], 0)]
            if changed is not None:
                again = reading_order(partitions, changed)
                todo = [one for one in again if one[1] >= offsets.get(one[0], 0)]
            continue
        partition, offset, record = todo.pop(0)
        action = evolve(state, partition, offset, record)
        if action is not None:
            written.append(action)
            before, offsets = offsets, {**offsets, **safe_offsets(state)}
            assert all(offsets[p] >= at for p, at in before.items()), "a committed offset goes back"
    return written


def told(actions: list) -> list:
    """Actions without the clock that stamped them."""
    plain = [
        ([msgspec.structs.replace(t, at=None) for t in a.traces], msgspec.structs.replace(a.seal, at=None))
        if isinstance(a, Batch)
        else msgspec.structs.replace(a, at=None)
        for a in actions
    ]
    return plain


CRASHES = st.sets(st.integers(2, 120), max_size=6)


@settings(max_examples=150, deadline=None)
@given(partitions=logs(), seed=st.integers(0, 99), crashes=CRASHES, groups=st.integers(1, 3), limit=st.integers(0, 3))
def test_a_restart_at_any_moment_gives_the_same_batches(partitions, seed, crashes, groups, limit):
    order = reading_order(partitions, random.Random(seed))
    unharmed = run(order, former(groups, limit), set(), None, partitions)
    assert told(run(order, former(groups, limit), crashes, None, partitions)) == told(unharmed)


@settings(max_examples=150, deadline=None)
@given(partitions=logs(), seed=st.integers(0, 99), crashes=CRASHES, groups=st.integers(1, 3), limit=st.integers(0, 3))
def test_every_train_group_is_in_one_batch_or_excluded_once_with_a_true_reason(
    partitions, seed, crashes, groups, limit
):
    """Also when partitions are read in another order after a restart."""
    order = reading_order(partitions, random.Random(seed))
    actions = run(order, former(groups, limit), crashes, random.Random(seed + 1), partitions)
    batches = [action for action in actions if isinstance(action, Batch)]
    assert [batch.seal.batch for batch in batches] == list(range(1, len(batches) + 1))
    assert all(len(batch.seal.groups) == groups for batch in batches)
    records = [record for log in partitions for record in log]
    train = {r.group_id: r for r in records if isinstance(r, GroupClosed) and r.purpose == "train"}
    ends = Counter(group.group_id for batch in batches for group in batch.seal.groups)
    ends.update(action.group_id for action in actions if isinstance(action, GroupExcluded))
    assert set(ends.values()) <= {1}
    assert ends.keys() <= train.keys()
    assert len(train) - len(ends) < groups, "only less than a batch may wait"
    for batch in batches:
        floor = batch.seal.batch - 1 - limit
        assert all(version >= floor for one in batch.traces for version in one.trace.versions)
        assert [one.index for one in batch.traces] == list(range(len(batch.traces)))
        wanted = {
            (one.session_id, one.attempt)
            for group in batch.seal.groups
            for one in train[group.group_id].members
            if one.usable
        }
        expected = {
            r.trace_id: r
            for r in records
            if isinstance(r, Trace) and (r.session_id, r.attempt) in wanted and r.trained_tokens
        }
        assert Counter(one.trace.trace_id for one in batch.traces) == Counter(list(expected))
        places = [
            ([g.group_id for g in batch.seal.groups].index(t.trace.group_id), t.trace.session_id, t.trace.branch)
            for t in batch.traces
        ]
        assert places == sorted(places)
    for action in actions:
        if isinstance(action, GroupExcluded):
            rewards = {m.reward for m in train[action.group_id].members if m.usable}
            assert (action.reason == "no_usable_session") == (len(rewards) == 0)
            assert (action.reason == "no_variance") == (len(rewards) == 1)
            assert action.reason != "traces_missing"
