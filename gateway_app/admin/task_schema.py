"""What the API's description says of the body of ``POST /admin/tasks``: one TaskSpec, or a list of them.

The route decodes the body itself (task_check.py), so that its errors name the field; Litestar is told the schema here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.openapi.spec import OpenAPI, OpenAPIMediaType, Operation, RequestBody

from schemas.tasks import TaskSpec

TASKS: Any = TaskSpec | list[TaskSpec]


def _described() -> tuple[Any, dict[str, Any]]:
    """The schema of the body, and those of the parts of a task by name."""
    [body], parts = msgspec.json.schema_components([TASKS], ref_template="#/components/schemas/{name}")
    return body, parts


BODY, PARTS = _described()


@dataclass
class TaskSubmission(Operation):
    """An operation whose body is BODY."""

    def __post_init__(self) -> None:
        self.request_body = RequestBody(content={"application/json": OpenAPIMediaType(schema=BODY)}, required=True)


def add_parts(description: OpenAPI) -> None:
    """Adds what BODY refers to."""
    if description.components is not None:
        description.components.schemas = PARTS | (description.components.schemas or {})
