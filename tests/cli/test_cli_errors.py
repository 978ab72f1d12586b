"""A user's mistake is one line on stderr and exit code 1."""

import json
import socket

import pytest

from polar.cli import main

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("POLAR_ADMIN_URL", "POLAR_ADMIN_KEY", "POLAR_KAFKA_BOOTSTRAP", "POLAR_ENGINE_URL", "POLAR_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    captured = capsys.readouterr()
    return exit.value.code, captured.out, captured.err


def refused(capsys, *arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == "", (code, out, err)
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    "command", [["status"], ["sessions"], ["show", "abc"], ["weights"], ["tasks", "list"], ["tasks", "cancel", "t"]]
)
def test_without_an_admin_api_it_says_how_to_start_one(capsys, command):
    err = refused(capsys, "--url", NOWHERE, *command)
    assert f"no admin API at {NOWHERE}" in err and "polar up" in err


def test_tailing_without_an_admin_api(capsys):
    assert "no admin API" in refused(capsys, "--url", NOWHERE, "topics", "tail", "polar.sessions")
    assert "no admin API" in refused(capsys, "--url", NOWHERE, "topics", "list")


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://"])
def test_a_url_that_is_none(capsys, url):
    refused(capsys, "--url", url, "status")


def test_a_task_file_that_is_missing_or_no_json(capsys, tmp_path):
    assert "cannot read none.json: No such file" in refused(capsys, "tasks", "submit", "none.json")
    (tmp_path / "bad.json").write_text('{"instruction": ')
    assert "bad.json is not JSON" in refused(capsys, "tasks", "submit", "bad.json")


def test_json_lines_are_tasks_too(capsys, tmp_path):
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"n": n}) for n in range(2)) + "\n")
    assert "no admin API" in refused(capsys, "--url", NOWHERE, "tasks", "submit", "tasks.jsonl")


@pytest.mark.parametrize("arguments", [["stauts"], ["status", "--wach"], ["sessions", "--limit", "no"], ["show"]])
def test_a_command_line_that_is_wrong(capsys, arguments):
    assert "--help)" in refused(capsys, *arguments)


def test_a_model_folder_without_a_tokenizer(capsys, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.setenv("POLAR_MODEL_DIR", "model")
    for command in (["up"], ["demo"]):
        assert "has no tokenizer.json" in refused(capsys, *command, "--run-dir", "run")
    assert not (tmp_path / "run").exists()


def test_a_setting_that_is_no_number(capsys, monkeypatch):
    monkeypatch.setenv("POLAR_RUN_SLOTS", "four")
    assert "POLAR_RUN_SLOTS='four'" in refused(capsys, "up")


def test_a_taken_port(capsys, tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).touch()
    monkeypatch.setenv("POLAR_MODEL_DIR", "model")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("POLAR_ADMIN_PORT", str(port))
        assert f"port {port} (admin) is taken" in refused(capsys, "up", "--run-dir", "run")


@pytest.mark.parametrize("command", [[], ["tasks"], ["topics"]])
def test_help_shows_the_commands(capsys, command):
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0 and "Usage:" in out
