"""The scripted demonstrator: a careless one. It knows the exercises, and does them right only now and then.

Its mistakes do not depend on the names, so what a policy learns from it is the format, the commands and the copying of
names for certain, and the choice between a right and a wrong command as a coin toss. That toss is what training mends.
"""

from __future__ import annotations

import json
import random
from typing import Any

from polar.demo.tasks import Exercise

RIGHT, IDLE, LOOK = 0.40, 0.34, 0.22
"""Shares of demonstrations that solve the exercise, that answer without acting, and that look at a file only. The rest
makes a mistake of the exercise's kind."""
FINAL = "Done."


def look(exercise: Exercise) -> str:
    """The harmless command that changes nothing."""
    return f"cat {exercise.names.target if exercise.kind in ('write', 'append') else exercise.names.source}"


def mistakes(exercise: Exercise) -> list[str]:
    """Commands of the right shape that fail the exercise's check."""
    source, target, word = exercise.names.source, exercise.names.target, exercise.names.word
    return {
        "write": [f"echo {word}", f"echo {target} > {word}"],
        "append": [f"echo {word} > {target}", f"echo {word}"],
        "copy": [f"mv {source} {target}", f"cp {target} {source}"],
        "rename": [f"cp {source} {target}", f"mv {target} {source}"],
        "delete": [f"rm {source} {target}", f"rm {target}"],
        "count": [f"wc -l {source}", f"wc -l {source} > {target}"],
    }[exercise.kind]


def first_reply(exercise: Exercise, rng: random.Random) -> str:
    """The text of the first turn, without its end-of-turn token."""
    kinds = [exercise.solution, None, look(exercise), rng.choice(mistakes(exercise))]
    [command] = rng.choices(kinds, [RIGHT, IDLE, LOOK, 1 - RIGHT - IDLE - LOOK])
    return FINAL if command is None else tool_call(command)


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
