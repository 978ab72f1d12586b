-- Made anew each time the store is opened: what the events say together.

CREATE OR REPLACE VIEW tasks AS
SELECT s.*, c.task_id IS NOT NULL AS cancelled, c.reason AS cancel_reason
FROM task_submissions s LEFT JOIN task_cancellations c USING (task_id);

-- The newest incarnation of each node, and whether it was lost since.
CREATE OR REPLACE VIEW nodes AS
WITH newest AS (
    SELECT * FROM node_registrations
    QUALIFY row_number() OVER (PARTITION BY node_id ORDER BY position DESC) = 1)
SELECT n.node_id, n.incarnation, n."at" AS registered_at, h."at" AS heartbeat_at, l.incarnation IS NOT NULL AS lost,
    n.init_slots, n.ready_slots, n.run_slots, n.postrun_slots
FROM newest n
LEFT JOIN node_heartbeats h ON h.node_id = n.node_id AND h.incarnation = n.incarnation
LEFT JOIN node_losses l ON l.node_id = n.node_id AND l.incarnation = n.incarnation;

-- One row an attempt. A higher attempt makes the lower ones void. Stages: see STAGES in tables.py.
CREATE OR REPLACE VIEW sessions AS
WITH known AS (
    SELECT * FROM session_plans
    UNION ALL BY NAME
    SELECT * FROM session_openings),
attempts AS (
    SELECT session_id, attempt, min("at") AS "at", any_value(task_id) AS task_id, any_value(group_id) AS group_id,
        any_value(sample_index) AS sample_index, any_value(policy) AS policy, any_value(purpose) AS purpose,
        any_value(harness) AS harness, any_value(builder) AS builder, any_value(node_id) AS node_id,
        any_value(incarnation) AS incarnation
    FROM known GROUP BY session_id, attempt),
stages AS (
    SELECT session_id, attempt, max(stage) AS stage, any_value(outcome) AS outcome, any_value(reason) AS reason
    FROM session_stages GROUP BY session_id, attempt),
started AS (SELECT session_id, attempt, count(*) AS calls FROM call_starts GROUP BY session_id, attempt),
sampled AS (
    SELECT session_id, attempt, sum(response_tokens) AS tokens, min(oldest_version) AS oldest_version,
        max(newest_version) AS newest_version
    FROM call_ends GROUP BY session_id, attempt)
SELECT a.*, a.attempt < max(a.attempt) OVER (PARTITION BY session_id) AS void,
    CASE
        WHEN v.usable THEN 'usable'
        WHEN v.infrastructure THEN 'infrastructure'
        WHEN v.session_id IS NOT NULL AND c.outcome = 'cancelled' THEN 'cancelled'
        WHEN v.session_id IS NOT NULL THEN 'unusable'
        WHEN g.stage = 5 AND o.session_id IS NULL AND g.outcome IN ('cancelled', 'infrastructure') THEN g.outcome
        WHEN g.stage = 5 THEN 'finished'
        WHEN a.incarnation IS NOT NULL AND (n.incarnation IS DISTINCT FROM a.incarnation OR n.lost) THEN 'lost'
        WHEN g.stage = 4 THEN 'postrun'
        WHEN g.stage = 3 THEN 'running'
        WHEN g.stage = 2 THEN 'starting'
        WHEN g.stage = 1 THEN 'ready'
        WHEN c.session_id IS NOT NULL THEN 'finished'
        WHEN o.session_id IS NOT NULL THEN 'running'
        ELSE 'preparing'
    END AS state,
    o."at" AS opened_at, c."at" AS closed_at, coalesce(c.outcome, g.outcome) AS outcome,
    coalesce(c.reason, g.reason) AS outcome_reason, x.exit_code, x.timed_out, x.seconds,
    s.reward, s.evaluator, s.error AS evaluator_error, v.usable, v.infrastructure, v.reason,
    coalesce(t.calls, 0) AS calls, coalesce(d.tokens, 0) AS sampled_tokens, coalesce(v.traces, 0) AS traces,
    d.oldest_version, d.newest_version
FROM attempts a
LEFT JOIN nodes n ON n.node_id = a.node_id
LEFT JOIN stages g USING (session_id, attempt)
LEFT JOIN session_openings o USING (session_id, attempt)
LEFT JOIN session_exits x USING (session_id, attempt)
LEFT JOIN session_scores s USING (session_id, attempt)
LEFT JOIN session_closings c USING (session_id, attempt)
LEFT JOIN session_verdicts v USING (session_id, attempt)
LEFT JOIN started t USING (session_id, attempt)
LEFT JOIN sampled d USING (session_id, attempt);

-- The prompt is that of the event that told it; the messages are those of the start, after its own base call.
CREATE OR REPLACE VIEW calls AS
WITH deliveries AS (SELECT call_id, bool_or(delivered) AS delivered FROM call_deliveries GROUP BY call_id)
SELECT s.* EXCLUDE (prompt_ids, kept_ids), coalesce(s.prompt_ids, e.prompt_ids) AS prompt_ids,
    len(coalesce(s.prompt_ids, e.prompt_ids)) AS new_prompt_tokens,
    CASE WHEN s.prompt_ids IS NULL THEN e.kept_ids ELSE s.kept_ids END AS kept_ids,
    CASE WHEN s.prompt_ids IS NULL THEN e.base_call_id ELSE s.base_call_id END AS prompt_base_call_id,
    CASE
        WHEN d.delivered THEN 'delivered'
        WHEN d.call_id IS NOT NULL THEN 'undelivered'
        WHEN e.call_id IS NOT NULL THEN 'completed'
        WHEN f.call_id IS NOT NULL THEN 'failed'
        ELSE 'started'
    END AS state,
    e."at" AS completed_at, e.message_json, e.response_ids, e.logprobs, e.response_tokens, e.mean_logprob,
    e.finish_reason, e.stop_reason, e.versions, e.usage_json, f.reason AS failure, f.detail AS failure_detail,
    f.infrastructure
FROM call_starts s
LEFT JOIN call_ends e USING (call_id)
LEFT JOIN deliveries d USING (call_id)
LEFT JOIN call_failures f USING (call_id);

CREATE OR REPLACE VIEW groups AS
WITH seen AS (
    SELECT group_id, any_value(task_id) AS task_id, any_value(policy) AS policy, any_value(purpose) AS purpose,
        min("at") AS "at", count(*) AS sessions, count(*) FILTER (usable) AS usable,
        avg(reward) FILTER (usable) AS reward_mean, stddev_samp(reward) FILTER (usable) AS reward_std
    FROM sessions WHERE NOT void GROUP BY group_id),
closed AS (SELECT group_id, task_id, policy, purpose, "at" AS closed_at, members FROM group_closings)
SELECT group_id, coalesce(c.task_id, s.task_id) AS task_id, coalesce(c.policy, s.policy) AS policy,
    coalesce(c.purpose, s.purpose) AS purpose, coalesce(s."at", c.closed_at) AS "at", c.closed_at,
    coalesce(len(c.members), s.sessions) AS sessions, coalesce(s.usable, 0) AS usable, s.reward_mean, s.reward_std,
    b.batch, e.reason AS excluded, coalesce(c.members, []) AS members
FROM seen s FULL JOIN closed c USING (group_id)
LEFT JOIN batch_groups b USING (group_id)
LEFT JOIN exclusions e USING (group_id);

-- The optimizer step that made each version; the base model, version 0, has none.
CREATE OR REPLACE VIEW steps AS
SELECT policy, "version", "at", metrics_json FROM weights WHERE "version" > 0;
