"""How a session is scored after its agent has ended: ``EVALUATORS`` by kind.

May import `schemas` and `polar.runtimes` only.
"""

from __future__ import annotations

from polar.evaluators import command
from polar.evaluators.evaluator import Evaluator, Score

EVALUATORS: dict[str, Evaluator] = {"command": command.evaluate}

__all__ = ["EVALUATORS", "Evaluator", "Score"]
