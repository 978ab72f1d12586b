"""Who is let in by the token, and how the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from gateway_app.attempts import Attempts
from gateway_app.failures import Failure
from gateway_app.metrics import Metrics
from gateway_app.serving import Serving
from polar.session_token import sign
from schemas.scheduling import SessionExited

SECRET = "a secret of thirty-two characters"
NONE: Any = None


def test_each_refusal_is_an_exception_of_its_own() -> None:
    attempts = Attempts()
    attempts.evolve(SessionExited(session_id="s", attempt=0, node_id="n", incarnation="i"))
    serving = Serving(NONE, NONE, attempts, Metrics(), secret=SECRET, stall_s=1.0)
    refusals = []
    for _ in range(2):
        with pytest.raises(Failure) as refusal:
            serving.admit(sign(SECRET, "s", 0, 60))
        refusals.append(refusal.value)
    assert refusals[0] is not refusals[1]
    assert [(one.reason, one.status) for one in refusals] == [("session_ended", 403)] * 2
