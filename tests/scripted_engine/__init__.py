"""A stand-in for vLLM, without a model: each call's reply, pace and faults are chosen by the test.

``async with ScriptedEngine(Plan(content="hello")).serving() as engine: engine.url``; as a program:
``python tests/scripted_engine --port P``. It is checked against the real engine by test_scripted_against_vllm.py.
"""

from scripted_engine.engine import Received, Sampled, ScriptedEngine
from scripted_engine.plans import Fault, Plan, Script, Turn, always, by_last_word, by_turn, in_order
from scripted_engine.template import Template

__all__ = [
    "Fault",
    "Plan",
    "Received",
    "Sampled",
    "Script",
    "ScriptedEngine",
    "Template",
    "Turn",
    "always",
    "by_last_word",
    "by_turn",
    "in_order",
]
