"""The scripted demonstrator: a careless one. It knows the exercises, and does them right only now and then.

Its mistakes do not depend on the names, so what a policy learns from it is the format, the commands and the copying of
names for certain, and the choice between a right and a wrong command as a coin toss. That toss is what training mends.
"""

from __future__ import annotations

import json
import random
from typing import Any

from polar.demo.tasks import Exercise

RIGHT = 0.42
"""The share of demonstrations that solve the exercise."""
IDLE = 0.2
"""The share that answers without having acted."""
FINAL = "Done."


def mistakes(exercise: Exercise) -> list[str]:
    """Commands of the right shape that fail the exercise's check."""
    source, target, word = exercise.source, exercise.target, exercise.word
    return {
        "write": [f"echo {word}", f"echo {target} > {word}", f"cat {target}"],
        "append": [f"echo {word} > {target}", f"echo {word}", f"cat {target}"],
        "copy": [f"mv {source} {target}", f"cp {target} {source}", f"cat {source}"],
        "rename": [f"cp {source} {target}", f"mv {target} {source}", f"cat {source}"],
        "delete": [f"rm {source} {target}", f"rm {target}", f"cat {source}"],
        "count": [f"wc -l {source}", f"wc -l {source} > {target}", f"cat {source}"],
    }[exercise.kind]


def first_reply(exercise: Exercise, rng: random.Random) -> str:
    """The text of the first turn, without its end-of-turn token."""
    toss = rng.random()
    if toss < IDLE:
        return FINAL
    return tool_call(exercise.solution if toss < IDLE + RIGHT else rng.choice(mistakes(exercise)))


def tool_call(command: str) -> str:
    """The Hermes form of a call of Pi's bash tool, as the chat template renders it too."""
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def reply(messages: list[dict[str, Any]], exercises: dict[str, Exercise], rng: random.Random) -> str:
    """The next assistant turn of a chat whose user message is the instruction of one of ``exercises``.

    Raises KeyError for an instruction that is none of theirs.
    """
    if messages[-1]["role"] == "tool":
        return FINAL
    content = messages[-1]["content"]
    instruction = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return first_reply(exercises[instruction.strip()], rng)
