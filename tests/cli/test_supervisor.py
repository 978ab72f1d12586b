"""The supervisor on real, trivial processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polar.supervisor import RestartPolicy, Service, ServiceFailed, Supervisor, SupervisorError

QUICK = RestartPolicy(crashes=2, window_s=60.0, first_delay_s=0.01, longest_delay_s=0.02)
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def until(condition, supervisor=None, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        if supervisor is not None:
            supervisor.poll()
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_killed_service_comes_back_and_the_restart_is_counted(tmp_path):
    with Supervisor([Service(name="one", argv=SLEEP, ready_line="up")], tmp_path, policy=QUICK) as supervisor:
        supervisor.start()
        first = int(supervisor.pid_path("one").read_text())
        os.kill(first, signal.SIGKILL)
        until(lambda: supervisor.restarts["one"] == 1 and not supervisor.not_ready, supervisor)
        second = int(supervisor.pid_path("one").read_text())
        assert second != first and alive(second)
        assert supervisor.log_path("one").read_text().count("up") == 2


def test_one_that_died_unnoticed_is_no_trouble_at_the_end(tmp_path):
    with Supervisor([Service(name="one", argv=SLEEP, ready_line="up")], tmp_path, policy=QUICK) as supervisor:
        supervisor.start()
        pid = int(supervisor.pid_path("one").read_text())
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
    assert not supervisor.pid_path("one").exists()


def test_what_a_dead_service_left_behind_in_its_group_is_killed(tmp_path):
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print('child', p.pid, '\\nup', flush=True); time.sleep(600)"
    )
    with Supervisor([Service(name="one", argv=python(code), ready_line="up")], tmp_path, policy=QUICK) as supervisor:
        supervisor.start()
        grandchild = int(supervisor.log_path("one").read_text().split()[1])
        assert alive(grandchild)
        os.kill(int(supervisor.pid_path("one").read_text()), signal.SIGKILL)
        until(lambda: not alive(grandchild), supervisor)


def test_a_service_that_crashes_too_often_stops_loudly_with_its_last_log_lines(tmp_path):
    broken = Service(name="broken", argv=python("import time, os; print('the reason', flush=True); os.abort()"))
    with Supervisor([broken], tmp_path, policy=QUICK) as supervisor:
        with pytest.raises(ServiceFailed, match="broken ended 3 times") as failure:
            until(lambda: False, supervisor)
    assert "the reason" in failure.value.log_tail


def test_a_service_that_refuses_to_start_is_not_tried_again(tmp_path):
    refusing = Service(name="refusing", argv=python("raise SystemExit('no tokenizer in /models')"), ready_line="never")
    with Supervisor([refusing], tmp_path, policy=QUICK) as supervisor:
        with pytest.raises(ServiceFailed, match="refusing did not start") as failure:
            supervisor.start()
    assert failure.value.log_tail == "no tokenizer in /models"


def test_a_service_waits_for_what_it_needs_and_all_stop_in_reverse(tmp_path):
    story = tmp_path / "story"
    code = (
        "import signal, sys, time\n"
        f"def say(word): open({str(story)!r}, 'a').write(word + ' {{}}\\n'.format(sys.argv[1]))\n"
        "def end(*_): say('stop'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); say('start'); print('up', flush=True)\n"
        "time.sleep(600)"
    ).replace("{{}}", "{}")
    names = ("kafka", "admin", "node")
    services = [
        Service(name=name, argv=[*python(code), name], ready_line="up", needs=names[max(0, i - 1) : i])
        for i, name in enumerate(names)
    ]
    with Supervisor(services[::-1], tmp_path) as supervisor:
        supervisor.start()
        assert not supervisor.not_ready
    assert story.read_text().split("\n")[:-1] == [
        *(f"start {name}" for name in names),
        *(f"stop {name}" for name in names[::-1]),
    ]
    assert list((tmp_path / "pids").iterdir()) == []


def test_one_that_ignores_sigterm_is_killed_at_its_deadline(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    stubborn = Service(name="stubborn", argv=python(code), ready_line="up", stop_s=0.2)
    with Supervisor([stubborn], tmp_path) as supervisor:
        supervisor.start()
        pid = int(supervisor.pid_path("stubborn").read_text())
    assert not alive(pid)


def test_children_die_with_a_killed_supervisor(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from polar.supervisor import Service, Supervisor\n"
        f"s = Supervisor([Service(name='one', argv={SLEEP!r}, ready_line='up')], Path({str(tmp_path)!r}))\n"
        "s.__enter__(); s.start(); print('all up', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE)
    try:
        assert parent.stdout.readline() == b"all up\n"
        child = int((tmp_path / "pids" / "one.pid").read_text())
        assert alive(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until(lambda: not alive(child))


def test_a_run_folder_has_one_supervisor(tmp_path):
    with Supervisor([], tmp_path):
        with pytest.raises(SupervisorError, match=f"in use by process {os.getpid()}"):
            Supervisor([], tmp_path).__enter__()
    with Supervisor([], tmp_path):
        pass


def test_a_service_that_never_gets_ready_is_named(tmp_path):
    slow = Service(name="slow", argv=SLEEP, ready_line="never said", ready_s=0.05)
    with Supervisor([slow], tmp_path) as supervisor, pytest.raises(ServiceFailed, match="slow is not ready after"):
        supervisor.start()


def test_delays_double_up_to_the_longest_and_old_crashes_are_forgotten():
    policy = RestartPolicy(crashes=4, window_s=10.0, first_delay_s=1.0, longest_delay_s=4.0)
    assert [policy.delay([float(t) for t in range(n)], now=n - 1.0) for n in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 4.0]
    assert policy.delay([0.0, 1.0, 2.0, 3.0, 4.0], now=4.0) is None
    assert policy.delay([0.0, 1.0, 2.0, 3.0, 100.0], now=100.0) == 1.0


def test_a_service_comes_back_only_when_what_it_needs_is_ready_again(tmp_path):
    told = tmp_path / "told"
    kafka = Service(
        name="kafka",
        argv=python(
            "import os, time; from pathlib import Path\n"
            f"told = Path({str(told)!r})\n"
            "first = not told.exists(); told.touch()\n"
            f"gate = Path({str(tmp_path / 'gate')!r})\n"
            "while not first and not gate.exists(): time.sleep(0.01)\n"
            "print('up', flush=True); time.sleep(600)"
        ),
        ready_line="up",
    )
    node = Service(name="node", argv=SLEEP, needs=("kafka",), ready_line="up")
    with Supervisor([kafka, node], tmp_path, policy=QUICK) as supervisor:
        supervisor.start()
        for name in ("kafka", "node"):
            os.kill(int(supervisor.pid_path(name).read_text()), signal.SIGKILL)
        until(lambda: supervisor.restarts == {"kafka": 1, "node": 1}, supervisor)
        until(lambda: supervisor.is_running("kafka"), supervisor)
        assert not supervisor.is_running("node")
        (tmp_path / "gate").touch()
        until(lambda: not supervisor.not_ready, supervisor)
