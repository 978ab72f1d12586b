-- One row an event. Rows are only added (but for offsets and node_heartbeats), each key once: see store.py.
-- Token ids are INTEGER[], log-probs FLOAT[]. Columns ending in _json hold JSON text.

CREATE TABLE offsets (topic VARCHAR, "partition" INTEGER, next_offset BIGINT);

CREATE TABLE task_submissions (
    task_id VARCHAR, "at" TIMESTAMPTZ, policy VARCHAR, purpose VARCHAR, instruction VARCHAR, harness VARCHAR,
    builder VARCHAR, num_samples INTEGER, spec_json VARCHAR);
CREATE TABLE task_cancellations (task_id VARCHAR, "at" TIMESTAMPTZ, reason VARCHAR);

CREATE TABLE node_registrations (
    node_id VARCHAR, incarnation VARCHAR, position BIGINT, "at" TIMESTAMPTZ, init_slots INTEGER, ready_slots INTEGER,
    run_slots INTEGER, postrun_slots INTEGER);
CREATE TABLE node_losses (node_id VARCHAR, incarnation VARCHAR, "at" TIMESTAMPTZ, reason VARCHAR);
CREATE TABLE node_heartbeats (node_id VARCHAR, incarnation VARCHAR, "at" TIMESTAMPTZ);

CREATE TABLE session_plans (
    session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, task_id VARCHAR, group_id VARCHAR, sample_index INTEGER,
    policy VARCHAR, purpose VARCHAR, harness VARCHAR, builder VARCHAR, node_id VARCHAR, incarnation VARCHAR);
CREATE TABLE session_stages (
    session_id VARCHAR, attempt INTEGER, stage INTEGER, type VARCHAR, "at" TIMESTAMPTZ, node_id VARCHAR,
    outcome VARCHAR, reason VARCHAR);
CREATE TABLE session_openings (
    session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, task_id VARCHAR, group_id VARCHAR, sample_index INTEGER,
    policy VARCHAR, purpose VARCHAR, harness VARCHAR, builder VARCHAR, node_id VARCHAR);
CREATE TABLE session_exits (
    session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, exit_code INTEGER, timed_out BOOLEAN, seconds DOUBLE,
    stdout VARCHAR, stderr VARCHAR);
CREATE TABLE session_scores (
    session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, reward DOUBLE, evaluator VARCHAR, error VARCHAR,
    detail_json VARCHAR);
CREATE TABLE session_closings (
    session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, outcome VARCHAR, reason VARCHAR);
CREATE TABLE session_verdicts (
    session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, group_id VARCHAR, usable BOOLEAN, infrastructure BOOLEAN,
    reward DOUBLE, traces INTEGER, reason VARCHAR);

CREATE TABLE call_starts (
    call_id VARCHAR, session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, number INTEGER, dialect VARCHAR,
    model VARCHAR, streamed BOOLEAN, auxiliary VARCHAR, base_call_id VARCHAR, kept_ids INTEGER, kept_messages INTEGER,
    messages_json VARCHAR, tools_json VARCHAR, prompt_ids INTEGER[], sampling_json VARCHAR);
CREATE TABLE call_ends (
    call_id VARCHAR, session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, message_json VARCHAR,
    response_ids INTEGER[], logprobs FLOAT[], response_tokens INTEGER, mean_logprob DOUBLE, finish_reason VARCHAR,
    stop_reason VARCHAR, versions STRUCT("version" INTEGER, "start" INTEGER, "end" INTEGER)[], oldest_version INTEGER,
    newest_version INTEGER, usage_json VARCHAR);
CREATE TABLE call_deliveries (
    call_id VARCHAR, session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, delivered BOOLEAN);
CREATE TABLE call_failures (
    call_id VARCHAR, session_id VARCHAR, attempt INTEGER, "at" TIMESTAMPTZ, reason VARCHAR, infrastructure BOOLEAN,
    detail VARCHAR);

CREATE TABLE traces (
    trace_id VARCHAR, session_id VARCHAR, attempt INTEGER, group_id VARCHAR, task_id VARCHAR, policy VARCHAR,
    purpose VARCHAR, harness VARCHAR, builder VARCHAR, branch INTEGER, "at" TIMESTAMPTZ, prompt_tokens INTEGER,
    response_tokens INTEGER, trained_tokens INTEGER, versions INTEGER[], reward DOUBLE, finish_reason VARCHAR,
    notes VARCHAR[], prompt_ids INTEGER[], response_ids INTEGER[], loss_mask UTINYINT[], logprobs FLOAT[],
    spans STRUCT("start" INTEGER, "end" INTEGER, "version" INTEGER, call_id VARCHAR, temperature DOUBLE)[]);

CREATE TABLE group_closings (
    group_id VARCHAR, "at" TIMESTAMPTZ, task_id VARCHAR, policy VARCHAR, purpose VARCHAR,
    members STRUCT(session_id VARCHAR, attempt INTEGER, usable BOOLEAN, reward DOUBLE, traces INTEGER,
        reason VARCHAR)[]);

CREATE TABLE batches (
    policy VARCHAR, batch INTEGER, "at" TIMESTAMPTZ, traces INTEGER, trained_tokens BIGINT, groups INTEGER,
    sessions INTEGER, reward_mean DOUBLE, oldest_version INTEGER, newest_version INTEGER);
CREATE TABLE batch_traces (policy VARCHAR, batch INTEGER, "index" INTEGER, trace_id VARCHAR);
CREATE TABLE batch_groups (policy VARCHAR, batch INTEGER, group_id VARCHAR);
CREATE TABLE exclusions (policy VARCHAR, group_id VARCHAR, "at" TIMESTAMPTZ, reason VARCHAR, detail VARCHAR);

CREATE TABLE weights (
    policy VARCHAR, "version" INTEGER, "at" TIMESTAMPTZ, path VARCHAR, sha256 VARCHAR, metrics_json VARCHAR);
CREATE TABLE weight_loads (
    policy VARCHAR, "version" INTEGER, engine_id VARCHAR, position BIGINT, "at" TIMESTAMPTZ,
    probe_mean_difference DOUBLE, probe_max_difference DOUBLE, seconds DOUBLE);
