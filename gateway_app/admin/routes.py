"""The routes under ``/admin``. Reads ask DuckDB in a thread; writes go to Kafka and return when it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from litestar import Controller, Request, delete, get, post
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery, QueryParameter
from litestar.response import Stream

from gateway_app.admin.task_check import parse_tasks
from gateway_app.admin.task_intake import Cancelled, Submitted
from gateway_app.admin.task_schema import TaskSubmission
from gateway_app.admin.topic_tail import tail
from polar.store import queries, rows
from schemas.tasks import Purpose
from streams.admin import topic_lag
from streams.topics import TABLE

Text = FromQuery[str | None]
Limit = Annotated[int, QueryParameter(ge=1, le=5000, description="how many at most, the newest first")]


class TaskRoutes(Controller):
    path = "/tasks"
    tags = ("tasks",)

    @post(
        "/",
        operation_class=TaskSubmission,
        summary="Submit one task or a list; a known task_id is not submitted twice",
        description="`sampling` (at most 4 KiB) fixes temperature, top_p, max_tokens, stop and structured_outputs "
        "(one of json, regex, choice, grammar) for each call; `budget` limits a session's calls, sampled tokens and "
        "concurrent calls.",
    )
    async def submit(self, request: Request[Any, Any, Any], state: State) -> Submitted:
        tasks = parse_tasks(await request.body(), state.settings.policy)
        submitted: Submitted = await state.intake.submit(tasks)
        return submitted

    @get("/", summary="Tasks, the newest first", sync_to_thread=True)
    def tasks(self, state: State, limit: Limit = 100, task_id: Text = None) -> list[rows.TaskRow]:
        return queries.tasks(state.store, limit=limit, task_id=task_id)

    @delete("/{task_id:str}", status_code=200, summary="Cancel a task; its running sessions are ended")
    async def cancel(self, task_id: FromPath[str], state: State) -> Cancelled:
        cancelled: Cancelled = await state.intake.cancel(task_id)
        return cancelled


class SessionRoutes(Controller):
    path = "/sessions"
    tags = ("sessions",)

    @get("/", summary="Sessions, the newest first", sync_to_thread=True)
    def sessions(
        self,
        state: State,
        limit: Limit = 100,
        status: Text = None,
        task_id: Text = None,
        voided: FromQuery[bool] = False,
    ) -> list[rows.SessionRow]:
        return queries.sessions(state.store, limit=limit, state=status, task_id=task_id, voided=voided)

    @get("/{session_id:str}", summary="One session's story: attempts, events, calls, traces", sync_to_thread=True)
    def session(self, session_id: FromPath[str], state: State) -> rows.SessionStory:
        story = queries.session(state.store, session_id)
        if story is None:
            raise NotFoundException(f"no session {session_id}: list them with GET /admin/sessions")
        return story


class RecordRoutes(Controller):
    tags = ("records",)

    @get("/groups", sync_to_thread=True)
    def groups(self, state: State, limit: Limit = 100, group_id: Text = None) -> list[rows.GroupRow]:
        return queries.groups(state.store, limit=limit, group_id=group_id)

    @get("/traces", summary="Traces without their tokens", sync_to_thread=True)
    def traces(
        self,
        state: State,
        limit: Limit = 100,
        session_id: Text = None,
        group_id: Text = None,
    ) -> list[rows.TraceRow]:
        return queries.traces(state.store, limit=limit, session_id=session_id, group_id=group_id)

    @get("/traces/{trace_id:str}", summary="One trace with its tokens, mask and log-probs", sync_to_thread=True)
    def trace(self, trace_id: FromPath[str], state: State) -> rows.TraceTokens:
        trace = queries.trace(state.store, trace_id)
        if trace is None:
            raise NotFoundException(f"no trace {trace_id}: list them with GET /admin/traces")
        return trace

    @get("/batches", sync_to_thread=True)
    def batches(self, state: State, limit: Limit = 100) -> list[rows.BatchRow]:
        return queries.batches(state.store, limit=limit)

    @get("/exclusions", summary="Groups that are in no batch, and why", sync_to_thread=True)
    def exclusions(self, state: State, limit: Limit = 100) -> list[rows.ExclusionRow]:
        return queries.exclusions(state.store, limit=limit)

    @get(
        "/weights",
        summary="Weight versions with the metrics of their step and where they were loaded",
        sync_to_thread=True,
    )
    def weights(self, state: State, limit: Limit = 100) -> list[rows.WeightRow]:
        return queries.weights(state.store, limit=limit)

    @get("/status", summary="Slots, sessions by state, reward, loss, weight versions", sync_to_thread=True)
    def status(self, state: State) -> rows.Status:
        return queries.status(state.store)

    @get("/pass-at-1", summary="Mean over tasks of the share of sessions with reward 1", sync_to_thread=True)
    def pass_at_1(
        self,
        state: State,
        purpose: FromQuery[Purpose] = "eval",
        task_id: FromQuery[list[str] | None] = None,
        first_version: FromQuery[int | None] = None,
        last_version: FromQuery[int | None] = None,
    ) -> rows.PassAt1:
        return queries.pass_at_1(
            state.store, purpose, first_version=first_version, last_version=last_version, task_ids=task_id
        )


class TopicRoutes(Controller):
    path = "/topics"
    tags = ("topics",)

    @get("/", summary="Partitions, end offsets, and the lag of each consumer group")
    async def topics(self, state: State) -> Sequence[Any]:
        return await topic_lag(state.settings.kafka_bootstrap)

    @get("/{topic:str}/tail", summary="The last records as NDJSON; with follow=true also those that come")
    async def tail_topic(
        self,
        topic: FromPath[str],
        state: State,
        session: Text = None,
        limit: Limit = 50,
        follow: FromQuery[bool] = False,
    ) -> Stream:
        if topic not in TABLE:
            raise NotFoundException(f"no topic {topic}: there are {', '.join(TABLE)}")
        records = tail(state.settings.kafka_bootstrap, topic, session=session, limit=limit, follow=follow)
        return Stream(records, media_type="application/x-ndjson")
