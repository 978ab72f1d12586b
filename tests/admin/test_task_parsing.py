"""A bad task body gives one line that names the field and what is expected."""

import json

import pytest
from litestar.exceptions import ClientException

from gateway_app.admin.task_check import parse_tasks
from polar.harnesses import HARNESSES

KNOWN = ", ".join(sorted(HARNESSES))
GOOD = {"instruction": "say hi", "evaluator": {"command": "true"}, "task_id": "t-1"}


def evaluator(**fields):
    return {**GOOD, "evaluator": {"command": "true", **fields}}


def runtime(**fields):
    return {**GOOD, "runtime": fields}


def sampling(**fields):
    return {**GOOD, "sampling": fields}


def structured(**fields):
    return sampling(structured_outputs=fields)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**GOOD, "num_samples": "8"}, "task.num_samples: expected int, got str"),
        ({**GOOD, "num_samples": 0}, "task.num_samples: expected int >= 1"),
        ({**GOOD, "colour": 1}, "task: unknown field colour"),
        ({"instruction": "x"}, "task: missing required field evaluator"),
        (
            [GOOD, {**GOOD, "runtime": {"limits": {"processes": 0.5}}}],
            "tasks[1].runtime.limits.processes: expected int",
        ),
        ({**GOOD, "purpose": "play"}, "task.purpose: invalid enum value 'play'"),
        ({**GOOD, "deadlines": {"agent_s": -1}}, "task.deadlines.agent_s: expected float > 0"),
        ({**GOOD, "task_id": "a/b"}, "task.task_id: expected 1 to 128 letters"),
        ([], "expected 1 to 10000 tasks, got 0"),
        ([GOOD, GOOD], "two tasks of this request have the same task_id"),
        (3, "task: expected object, got int"),
        ({**GOOD, "harness": {"name": "nobody"}}, f"task.harness.name: expected one of {KNOWN}, got 'nobody'"),
        ({**GOOD, "harness": {"name": "pi", "options": {"tool": []}}}, "task.harness.options: unknown field tool"),
        ({**GOOD, "builder": "none"}, "task.builder: expected one of per_request, prefix_merging, got 'none'"),
        ({**GOOD, "evaluator": {"kind": "wish", "command": "x"}}, "task.evaluator.kind: expected one of command"),
        ({**GOOD, "runtime": {"kind": "moon"}}, "task.runtime.kind: expected one of local, got 'moon'"),
        ({**GOOD, "instruction": " "}, "task.instruction: expected text, got none"),
        ({**GOOD, "policy": "other"}, "task.policy: expected one of policy, got 'other'"),
        ({**GOOD, "harness": {"options": {"tools": ["fly"]}}}, "task.harness.options: tool 'fly' is unknown"),
        ({**GOOD, "harness": {"options": {"max_tokens": 0}}}, "task.harness.options.max_tokens: expected int >= 1"),
        ({**GOOD, "harness": {"name": "shell", "options": {"command": " "}}}, "task.harness.options: options.command"),
        (evaluator(reward_file="../r"), "task.evaluator.reward_file: expected a relative path inside the work folder"),
        (evaluator(reward_file="x" * 256), "task.evaluator.reward_file: expected a relative path"),
        (evaluator(command="a\0b"), "task.evaluator.command: expected text without NUL characters"),
        (runtime(files={"/etc/passwd": ""}), "task.runtime.files: expected a relative path"),
        (runtime(files={"a/" + "x" * 256: ""}), "task.runtime.files: expected a relative path"),
        (runtime(environment={"LD_PRELOAD": "x"}), "task.runtime.environment: expected letters, digits and _"),
        (runtime(environment={"a=b": "x"}), "got 'a=b'"),
        (runtime(environment={"A": "\0"}), "task.runtime.environment.A: expected text without NUL"),
        (runtime(prepare=["true", "\0"]), "task.runtime.prepare[1]: expected text without NUL"),
        (sampling(temperature=3), "task.sampling.temperature: expected float <= 2.0"),
        (sampling(top_p=0), "task.sampling.top_p: expected float > 0.0"),
        (sampling(seed=1), "task.sampling: unknown field seed"),
        (sampling(stop=["a", ""]), "task.sampling.stop: expected texts that are not empty"),
        (sampling(stop=["x" * 5000]), "task.sampling: expected at most 4096 bytes of JSON, got 5"),
        (
            structured(),
            "task.sampling.structured_outputs: expected exactly one of json, regex, choice, grammar, got none",
        ),
        (structured(json={}, regex="a"), "expected exactly one of json, regex, choice, grammar, got 'json', 'regex'"),
        (structured(json_object=True), "expected exactly one of json, regex, choice, grammar, got 'json_object'"),
        (structured(json=[]), "task.sampling.structured_outputs.json: expected "),
        (structured(regex=1), "task.sampling.structured_outputs.regex: expected str, got int"),
        (structured(choice=["a", 1]), "task.sampling.structured_outputs.choice[1]: expected str, got int"),
        (structured(choice=[]), "task.sampling.structured_outputs.choice: expected one that is not empty"),
        (structured(grammar=""), "task.sampling.structured_outputs.grammar: expected one that is not empty"),
        (structured(json={"enum": ["é" * 2100]}), "it travels in the URL of each call, so make the schema smaller"),
        ({**GOOD, "budget": {"calls": 0}}, "task.budget.calls: expected int >= 1"),
    ],
)
def test_the_error_names_the_field_and_what_is_expected(body, message):
    with pytest.raises(ClientException) as error:
        parse_tasks(json.dumps(body).encode(), "policy")
    assert message in error.value.detail
    assert "\n" not in error.value.detail and "`" not in error.value.detail


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"not json", b'{"instruction": NaN}'])
def test_what_is_not_json_is_said_to_be_so(body):
    with pytest.raises(ClientException, match="the body is not JSON"):
        parse_tasks(body, "policy")


@pytest.mark.parametrize(
    "structure",
    [
        {"json": {"type": "object"}},
        {"json": "{}"},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
    ],
)
def test_each_kind_of_structured_output_is_taken(structure):
    (task,) = parse_tasks(json.dumps(structured(**structure)).encode(), "policy")
    assert task.sampling.structured_outputs == structure


def test_one_task_or_a_list():
    assert [task.task_id for task in parse_tasks(json.dumps(GOOD).encode(), "policy")] == ["t-1"]
    assert len(parse_tasks(json.dumps([GOOD, {**GOOD, "task_id": "t-2"}]).encode(), "policy")) == 2


def test_what_pi_can_do_is_taken_where_pi_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("POLAR_HARNESS_DIR", str(tmp_path))
    assert parse_tasks(json.dumps({**GOOD, "harness": {"name": "pi"}}).encode(), "policy")
