"""The questions that the admin API asks. Each may be called from any thread; raises StoreError.

Lists come newest first and have at most ``limit`` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from polar.store import rows
from polar.store.store import Store
from schemas.tasks import Purpose

A = TypeVar("A", bound=rows.Answer)


def tasks(store: Store, *, limit: int = 100, task_id: str | None = None) -> list[rows.TaskRow]:
    """Tasks, with how far their sessions are."""
    sql = """
        WITH counted AS (
            SELECT task_id, count(*) AS sessions, count(usable) AS done, count(*) FILTER (usable) AS usable,
                avg(reward) FILTER (usable) AS reward_mean
            FROM sessions WHERE NOT void GROUP BY task_id)
        SELECT t.* RENAME ("at" AS submitted_at), c.* EXCLUDE (task_id)
        FROM tasks t LEFT JOIN counted c USING (task_id)
        WHERE $task_id IS NULL OR task_id = $task_id
        ORDER BY submitted_at DESC, task_id DESC LIMIT $limit"""
    found = store.records(sql, {"task_id": task_id, "limit": limit})
    zero = {"sessions": 0, "done": 0, "usable": 0}
    return [_answer(rows.TaskRow, {**row, **{k: row[k] or v for k, v in zero.items()}}) for row in found]


def sessions(
    store: Store, *, limit: int = 100, state: str | None = None, task_id: str | None = None, voided: bool = False
) -> list[rows.SessionRow]:
    """Attempts of sessions; those that a higher attempt made void only with ``voided``."""
    sql = """
        SELECT * EXCLUDE (incarnation) FROM sessions
        WHERE ($state IS NULL OR state = $state) AND ($task_id IS NULL OR task_id = $task_id) AND ($voided OR NOT void)
        ORDER BY "at" DESC, session_id DESC, attempt DESC LIMIT $limit"""
    given = {"state": state, "task_id": task_id, "voided": voided, "limit": limit}
    return [_answer(rows.SessionRow, row) for row in store.records(sql, given)]


def session(store: Store, session_id: str) -> rows.SessionStory | None:
    """Everything about one session, or None where it is not known."""
    sql = "SELECT * EXCLUDE (incarnation) FROM sessions WHERE session_id = ? ORDER BY attempt"
    attempts = [_answer(rows.SessionRow, row) for row in store.records(sql, [session_id])]
    if not attempts:
        return None
    return rows.SessionStory(
        attempts=attempts,
        events=_events(store, session_id),
        calls=calls(store, session_id),
        traces=traces(store, session_id=session_id),
    )


def calls(store: Store, session_id: str, *, attempt: int | None = None) -> list[rows.CallRow]:
    """The calls of a session, in order."""
    sql = """
        SELECT * EXCLUDE (prompt_ids, response_ids, logprobs) FROM calls
        WHERE session_id = $session_id AND ($attempt IS NULL OR attempt = $attempt)
        ORDER BY attempt, number, call_id"""
    found = store.records(sql, {"session_id": session_id, "attempt": attempt})
    return [_answer(rows.CallRow, {**row, "versions": row["versions"] or []}) for row in found]


def groups(store: Store, *, limit: int = 100, group_id: str | None = None) -> list[rows.GroupRow]:
    sql = """
        SELECT * EXCLUDE ("at") FROM groups WHERE $group_id IS NULL OR group_id = $group_id
        ORDER BY "at" DESC, group_id DESC LIMIT $limit"""
    return [_answer(rows.GroupRow, row) for row in store.records(sql, {"group_id": group_id, "limit": limit})]


TRACE = """
    SELECT t.* EXCLUDE (prompt_ids, response_ids, loss_mask, logprobs, spans), b.batch
    FROM traces t LEFT JOIN batch_traces b USING (trace_id)"""


def traces(
    store: Store, *, limit: int = 100, session_id: str | None = None, group_id: str | None = None
) -> list[rows.TraceRow]:
    """Traces without their token arrays."""
    sql = f"""{TRACE}
        WHERE ($session_id IS NULL OR t.session_id = $session_id) AND ($group_id IS NULL OR t.group_id = $group_id)
        ORDER BY t."at" DESC, t.session_id DESC, t.attempt DESC, t.branch LIMIT $limit"""
    found = store.records(sql, {"session_id": session_id, "group_id": group_id, "limit": limit})
    return [_answer(rows.TraceRow, row) for row in found]


def trace(store: Store, trace_id: str) -> rows.TraceTokens | None:
    """One trace with its token arrays."""
    found = store.records(f"{TRACE} WHERE trace_id = ?", [trace_id])
    if not found:
        return None
    arrays = "SELECT prompt_ids, response_ids, loss_mask, logprobs, spans FROM traces WHERE trace_id = ?"
    whole = store.records(arrays, [trace_id])[0]
    return rows.TraceTokens(trace=_answer(rows.TraceRow, found[0]), **whole)


def batches(store: Store, *, limit: int = 100) -> list[rows.BatchRow]:
    sql = "SELECT * FROM batches ORDER BY batch DESC LIMIT ?"
    return [_answer(rows.BatchRow, row) for row in store.records(sql, [limit])]


def steps(store: Store, *, limit: int = 1000) -> list[rows.StepRow]:
    sql = 'SELECT * FROM steps ORDER BY "version" DESC LIMIT ?'
    return [_answer(rows.StepRow, row) for row in store.records(sql, [limit])]


def weights(store: Store, *, limit: int = 100) -> list[rows.WeightRow]:
    """Published versions, each with the engines that loaded it (the newest load of each engine)."""
    newest = """
        SELECT * EXCLUDE (position) FROM weight_loads
        QUALIFY row_number() OVER (PARTITION BY policy, "version", engine_id ORDER BY position DESC) = 1
        ORDER BY engine_id"""
    loads: dict[tuple[str, int], list[rows.LoadRow]] = {}
    for row in store.records(newest):
        loads.setdefault((row.pop("policy"), row.pop("version")), []).append(rows.LoadRow(**row))
    found = store.records('SELECT * FROM weights ORDER BY "version" DESC, policy LIMIT ?', [limit])
    return [_answer(rows.WeightRow, {**row, "loads": loads.get((row["policy"], row["version"]), [])}) for row in found]


def exclusions(store: Store, *, limit: int = 100) -> list[rows.ExclusionRow]:
    sql = 'SELECT * FROM exclusions ORDER BY "at" DESC, group_id DESC LIMIT ?'
    return [_answer(rows.ExclusionRow, row) for row in store.records(sql, [limit])]


def pass_at_1(
    store: Store,
    purpose: Purpose,
    *,
    first_version: int | None = None,
    last_version: int | None = None,
    task_ids: Sequence[str] | None = None,
    pass_reward: float = 1.0,
) -> rows.PassAt1:
    """How often a session's reward reached ``pass_reward``: over tasks, and by task.

    Counts the scored sessions that have their verdict, are not void, cancelled or faults of the infrastructure, and all
    of whose sampled tokens come from the weight versions ``first_version`` to ``last_version``, both included.
    """
    sql = """
        SELECT task_id, count(*) AS sessions, count(*) FILTER (reward >= $pass_reward) AS passed,
            avg(reward) AS mean_reward
        FROM sessions
        WHERE purpose = $purpose AND NOT void AND NOT infrastructure AND state <> 'cancelled' AND reward IS NOT NULL
            AND ($first IS NULL OR oldest_version >= $first) AND ($last IS NULL OR newest_version <= $last)
            AND ($task_ids IS NULL OR list_contains($task_ids::VARCHAR[], task_id))
        GROUP BY task_id ORDER BY task_id"""
    given = {
        "purpose": purpose,
        "pass_reward": pass_reward,
        "first": first_version,
        "last": last_version,
        "task_ids": None if task_ids is None else list(task_ids),
    }
    by_task = [rows.TaskPass(**row) for row in store.records(sql, given)]
    count = sum(task.sessions for task in by_task)
    return rows.PassAt1(
        purpose=purpose,
        pass_at_1=sum(task.passed / task.sessions for task in by_task) / len(by_task) if by_task else None,
        mean_reward=sum(task.mean_reward * task.sessions for task in by_task) / count if by_task else None,
        tasks=len(by_task),
        sessions=count,
        passed=sum(task.passed for task in by_task),
        by_task=by_task,
    )


SESSION_COUNTS = """
    WITH s AS MATERIALIZED (SELECT node_id, state, void, usable, reason FROM sessions)
    SELECT 'state' AS what, state AS key, NULL AS node_id, count(*) FROM s WHERE NOT void GROUP BY state
    UNION ALL SELECT 'unusable', reason, NULL, count(*) FROM s WHERE NOT void AND NOT usable GROUP BY reason
    UNION ALL SELECT 'slots', state, node_id, count(*) FROM s GROUP BY node_id, state
    ORDER BY ALL"""

COUNTS = """
    SELECT (SELECT count(*) FROM tasks), (SELECT count(*) FROM tasks WHERE cancelled), (SELECT count(*) FROM traces),
        (SELECT coalesce(max(batch), 0) FROM batches)"""

GROUP_COUNTS = """
    WITH ids AS (
        SELECT group_id FROM session_plans UNION SELECT group_id FROM session_openings
        UNION SELECT group_id FROM group_closings)
    SELECT CASE WHEN b.batch IS NOT NULL THEN 'batched' WHEN e.group_id IS NOT NULL THEN 'excluded'
        WHEN c.group_id IS NOT NULL THEN 'closed' ELSE 'open' END AS state, count(*)
    FROM ids LEFT JOIN batch_groups b USING (group_id) LEFT JOIN exclusions e USING (group_id)
    LEFT JOIN group_closings c USING (group_id) GROUP BY state ORDER BY state"""

SPLITS = """
    SELECT history_note, count(*) FROM call_starts WHERE history_note IS NOT NULL
    GROUP BY history_note ORDER BY history_note"""

LAST_REWARDS = """
    SELECT avg(reward) FROM (
        SELECT v.reward FROM session_verdicts v JOIN session_openings o USING (session_id, attempt)
        WHERE v.usable AND o.purpose = 'train' ORDER BY v."at" DESC LIMIT 64)"""


def status(store: Store) -> rows.Status:
    """The whole system at one glance."""
    states: dict[str, int] = {}
    unusable: dict[str, int] = {}
    slots: dict[str, dict[str, int]] = {}
    for what, key, node_id, count in store.read(SESSION_COUNTS):
        counts = {"state": states, "unusable": unusable}.get(what)
        (slots.setdefault(node_id, {}) if counts is None else counts)[key] = count
    nodes = [_node(row, slots.get(row["node_id"], {})) for row in store.records("FROM nodes ORDER BY node_id")]
    loads = store.records("SELECT * FROM weight_loads ORDER BY position DESC")
    [(task_count, cancelled, trace_count, last_batch)] = store.read(COUNTS)
    last_step = steps(store, limit=1)
    return rows.Status(
        nodes=nodes,
        ready=sum(node.ready for node in nodes),
        running=sum(node.running for node in nodes),
        sessions=states,
        unusable=unusable,
        groups=dict(store.read(GROUP_COUNTS)),
        exclusions=dict(store.read("SELECT reason, count(*) FROM exclusions GROUP BY reason ORDER BY reason")),
        splits=dict(store.read(SPLITS)),
        tasks=task_count,
        cancelled_tasks=cancelled,
        traces=trace_count,
        last_batch=last_batch,
        version_published=store.read('SELECT max("version") FROM weights')[0][0],
        versions_loaded={load["engine_id"]: load["version"] for load in reversed(loads)},
        probe_mean_difference=loads[0]["probe_mean_difference"] if loads else None,
        probe_max_difference=loads[0]["probe_max_difference"] if loads else None,
        step=last_step[0] if last_step else None,
        reward_mean=store.read(LAST_REWARDS)[0][0],
    )


def _node(row: dict[str, Any], used: dict[str, int]) -> rows.NodeStatus:
    """A sandbox that is told to start holds its READY slot until it is reported as running."""
    return rows.NodeStatus(
        **row,
        preparing=used.get("preparing", 0),
        ready=used.get("ready", 0) + used.get("starting", 0),
        running=used.get("running", 0),
        postrun=used.get("postrun", 0),
    )


EVENTS = """
    SELECT "at", attempt, 'command.prewarm' AS type, 'prepare the sandbox on ' || node_id AS text
        FROM session_plans WHERE session_id = $id
    UNION ALL SELECT "at", attempt, type,
        concat_ws(' ', 'node', node_id, outcome, nullif(reason, '')) FROM session_stages WHERE session_id = $id
    UNION ALL SELECT "at", attempt, 'session.opened', 'harness ' || harness || ' on ' || node_id
        FROM session_openings WHERE session_id = $id
    UNION ALL SELECT "at", attempt, 'session.exited', CASE WHEN timed_out THEN 'deadline reached'
        ELSE 'exit code ' || coalesce(exit_code::VARCHAR, '(signal)') END || ' after ' || round(seconds, 1) || ' s'
        FROM session_exits WHERE session_id = $id
    UNION ALL SELECT "at", attempt, 'session.scored', evaluator || ': '
        || coalesce('reward ' || reward::VARCHAR, 'error: ' || coalesce(error, 'no reward'))
        FROM session_scores WHERE session_id = $id
    UNION ALL SELECT "at", attempt, 'session.closed', concat_ws(': ', outcome, nullif(reason, ''))
        FROM session_closings WHERE session_id = $id
    UNION ALL SELECT "at", attempt, 'report.assembled', concat_ws(': ', CASE WHEN usable THEN 'usable, '
        || traces || ' traces' WHEN infrastructure THEN 'infrastructure' ELSE 'unusable' END, nullif(reason, ''))
        FROM session_verdicts WHERE session_id = $id
    UNION ALL SELECT "at", attempt, 'call.started', concat_ws(' ', 'call', number, dialect, kept_ids || '+'
        || len(prompt_ids) || ' prompt tokens', auxiliary, CASE history WHEN 'exact' THEN 'exact history' END,
        'template history: ' || history_note) FROM call_starts WHERE session_id = $id
    UNION ALL SELECT e."at", e.attempt, 'call.completed', concat_ws(' ', 'call', number,
        e.kept_ids || '+' || len(e.prompt_ids) || ' prompt tokens,', response_tokens, 'tokens,', finish_reason,
        ', version', newest_version)
        FROM call_ends e JOIN call_starts s USING (call_id) WHERE e.session_id = $id
    UNION ALL SELECT e."at", e.attempt, 'call.delivery', concat_ws(' ', 'call', number,
        CASE WHEN delivered THEN 'delivered' ELSE 'not delivered' END)
        FROM call_deliveries e JOIN call_starts s USING (call_id) WHERE e.session_id = $id
    UNION ALL SELECT e."at", e.attempt, 'call.failed', concat_ws(' ', 'call', number, reason, nullif(detail, ''))
        FROM call_failures e JOIN call_starts s USING (call_id) WHERE e.session_id = $id
    ORDER BY attempt, "at" """


def _events(store: Store, session_id: str) -> list[rows.EventRow]:
    return [rows.EventRow(**row) for row in store.records(EVENTS, {"id": session_id})]


def _answer(kind: type[A], row: dict[str, Any]) -> A:
    """``row`` as ``kind``; columns ``x_json`` become fields ``x``."""
    values = {}
    for name, value in row.items():
        if name.endswith("_json"):
            values[name.removesuffix("_json")] = None if value is None else msgspec.json.decode(value)
        else:
            values[name] = value
    if kind is rows.CallRow and values["usage"] is None:
        values["usage"] = {}
    return kind(**values)
