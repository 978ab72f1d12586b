"""Who is let in by the token, and how the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from gateway_app.attempts import Attempts
from gateway_app.capture import Capture, Failure
from gateway_app.gateway import Gateway
from gateway_app.history import Histories
from polar.session_token import sign
from schemas.scheduling import SessionExited

SECRET = "a secret of thirty-two characters"
NONE: Any = None


def test_each_refusal_is_an_exception_of_its_own() -> None:
    attempts = Attempts()
    attempts.evolve(SessionExited(session_id="s", attempt=0, node_id="n", incarnation="i"))
    gateway = Gateway(Capture(NONE, NONE, policy="policy", hold_s=0), attempts, Histories(), NONE, SECRET)
    refusals = []
    for _ in range(2):
        with pytest.raises(Failure) as refusal:
            gateway.admit(sign(SECRET, "s", 0, 60))
        refusals.append(refusal.value)
    assert refusals[0] is not refusals[1]
    assert [(one.reason, one.status) for one in refusals] == [("session_ended", 403)] * 2
