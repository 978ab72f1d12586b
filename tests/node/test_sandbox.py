"""The local runtime, for real: what a program in a sandbox can see, change, use and leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from polar.runtimes import bubblewrap
from polar.runtimes.local import LocalRuntime, remove
from polar.runtimes.runtime import Program, RuntimeFault
from schemas.tasks import Limits, RuntimeSpec

LIMITS = Limits(memory_mb=256, processes=32, file_mb=4)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "session_secret").write_text("the secret")
    (tmp_path / "session_secret").chmod(0o600)
    return tmp_path


@pytest.fixture
def runtime(run_dir):
    return LocalRuntime(run_dir / "sessions", hidden=[run_dir])


@pytest.fixture
async def sandbox(runtime):
    sandbox = await runtime.create("session-1", RuntimeSpec(limits=LIMITS, files={"given/a.txt": "a"}))
    yield sandbox
    await sandbox.close()


async def bash(sandbox, command, deadline_s=20.0, **program):
    return await sandbox.run(Program(argv=["bash", "-c", command], **program), deadline_s)


def running(marker: str) -> list[int]:
    """The host's processes with ``marker`` in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if marker.encode() in words:
                found.append(int(folder.name))
    return found


async def test_it_works_in_the_work_folder(sandbox):
    ended = await bash(sandbox, "pwd; cat given/a.txt; echo new > b.txt; echo bad >&2; exit 3")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (3, "/work\na", "bad\n")
    assert (sandbox.work / "b.txt").read_text() == "new\n"
    assert not ended.timed_out and not ended.over_memory and ended.reason == ""


async def test_the_system_cannot_be_written(sandbox):
    for place in ("/usr/bin", "/etc", "/bin", "/opt", "/home", "/polar", "/", "/proc/sys/kernel"):
        ended = await bash(sandbox, f"touch {place}/polar-was-here")
        assert ended.exit_code == 1, place
    assert (await bash(sandbox, "id -u")).stdout.strip() != "0"
    assert (await bash(sandbox, "grep CapEff /proc/self/status")).stdout.split()[1].strip("0") == ""


async def test_neither_the_run_folder_nor_other_sessions_are_seen(sandbox, runtime, run_dir):
    other = await runtime.create("session-2", RuntimeSpec(files={"private.txt": "x"}))
    paths = [run_dir, run_dir / "session_secret", run_dir / "sessions", other.work / "private.txt"]
    ended = await bash(sandbox, "; ".join(f"ls -a {path}" for path in paths) + "; ls /root /var /work/..")
    assert "secret" not in ended.stdout and "private" not in ended.stdout and "session-2" not in ended.stdout
    climb = await bash(sandbox, "cat /proc/1/root/../../../session_secret /proc/*/cwd/../../../session_secret")
    assert climb.stdout == ""


async def test_the_run_folder_is_hidden_even_below_a_system_folder(monkeypatch):
    with tempfile.TemporaryDirectory() as system:
        Path(system).chmod(0o755)
        run_dir = Path(system) / "runs"
        run_dir.mkdir()
        (run_dir / "session_secret").write_text("the secret")
        monkeypatch.setattr(bubblewrap, "SYSTEM", (*bubblewrap.SYSTEM, system))
        for hidden, seen in (([], "session_secret\nsessions\n"), ([run_dir], "")):
            sandbox = await LocalRuntime(run_dir / "sessions", hidden=hidden).create("s", RuntimeSpec())
            assert (await bash(sandbox, f"ls {run_dir}")).stdout == seen
            await sandbox.close()


async def test_the_environment_of_this_process_stays_outside(sandbox, monkeypatch):
    monkeypatch.setenv("POLAR_SESSION_SECRET", "do-not-leak")
    ended = await bash(sandbox, "env; cat /proc/*/environ", environment={"GIVEN": "yes"})
    assert "do-not-leak" not in ended.stdout + ended.stderr
    assert "GIVEN=yes" in ended.stdout and "HOME=/home/agent" in ended.stdout


async def test_the_loader_cannot_be_told_to_load_into_the_sandbox_itself(runtime):
    for name in ("LD_PRELOAD", "a=b", ""):
        with pytest.raises(RuntimeFault, match=f"runtime.environment: '{name}'"):
            await runtime.create("loader", RuntimeSpec(environment={name: "/work/x.so"}))


async def test_tmp_is_private_and_home_lasts_between_runs(sandbox):
    await bash(sandbox, "echo 1 > /tmp/left; echo 2 > ~/kept; echo 3 > /dev/shm/left")
    assert not Path("/tmp/left").exists()
    assert (await bash(sandbox, "cat ~/kept /tmp/left /dev/shm/left")).stdout == "2\n"
    assert (await bash(sandbox, "ls -a ~", fresh_home=True)).stdout.split() == [".", ".."]


async def test_what_it_starts_ends_with_it(sandbox):
    await bash(sandbox, "setsid sleep 98761 & (setsid nohup sleep 98761 >/dev/null 2>&1 &) ; sleep 98761 & exit 0")
    assert running("98761") == []


async def test_the_deadline_ends_the_whole_tree(sandbox):
    ended = await bash(sandbox, "trap '' TERM; (setsid sleep 98762 &); echo started; sleep 98762", deadline_s=0.5)
    assert (ended.exit_code, ended.timed_out, ended.stdout) == (None, True, "started\n")
    assert running("98762") == []


async def test_a_cancelled_run_leaves_nothing(sandbox):
    task = asyncio.create_task(bash(sandbox, "setsid sleep 98763 & touch up; sleep 98763"))
    while not (sandbox.work / "up").exists():
        await asyncio.sleep(0.01)
    assert running("98763")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running("98763") == []


@pytest.mark.parametrize("milliseconds", range(0, 30, 3))
async def test_a_run_cancelled_while_it_starts_leaves_nothing(sandbox, milliseconds):
    marker = f"67{os.getpid()}{milliseconds}"
    run = asyncio.create_task(sandbox.run(Program(argv=["sleep", marker]), 60.0))
    await asyncio.sleep(milliseconds / 1000)
    run.cancel()
    await asyncio.wait({run})
    assert run.cancelled() and running(marker) == []


async def test_clear_ends_what_outlived_a_former_process(runtime, run_dir):
    sandbox = await runtime.create("session-1", RuntimeSpec(limits=LIMITS))
    marker = f"68{os.getpid()}"
    run = asyncio.create_task(sandbox.run(Program(argv=["sleep", marker]), 60.0))
    while not running(marker):
        await asyncio.sleep(0.01)
    LocalRuntime(run_dir / "sessions", hidden=[run_dir]).clear()
    with pytest.raises(RuntimeFault):
        await run
    assert running(marker) == [] and not (run_dir / "sessions").exists()


async def test_killing_the_process_that_runs_it_ends_the_tree(tmp_path):
    script = f"""
import asyncio
from pathlib import Path
from polar.runtimes.local import LocalRuntime
from polar.runtimes.runtime import Program
from schemas.tasks import RuntimeSpec
async def main():
    sandbox = await LocalRuntime(Path({str(tmp_path)!r}), hidden=[]).create("s", RuntimeSpec())
    await sandbox.run(Program(argv=["bash", "-c", "setsid sleep 98764 & touch up; sleep 98764"]), 60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "s" / "work" / "up").exists():
        assert parent.poll() is None
        await asyncio.sleep(0.02)
    assert running("98764")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    async with asyncio.timeout(10):
        while running("98764"):
            await asyncio.sleep(0.02)


PRIVATE = "x = bytearray(600 * 2**20)"
SHARED = """
import mmap, time
m = mmap.mmap(-1, 600 * 2**20)
for i in range(0, len(m), 4096): m[i] = 1
time.sleep(60)
"""


async def test_memory_of_one_process_is_limited(sandbox):
    ended = await sandbox.run(Program(argv=["python3", "-c", PRIVATE]), 30)
    assert ended.exit_code == 1 and "MemoryError" in ended.stderr


@pytest.mark.parametrize("hog", [SHARED, "x = [bytearray(b'x' * 100 * 2**20) for _ in range(1)]\n" + SHARED])
async def test_shared_memory_is_limited(sandbox, hog):
    ended = await sandbox.run(Program(argv=["python3", "-c", hog]), 30)
    assert ended.over_memory and ended.exit_code is None and "memory" in ended.reason


async def test_memory_of_many_processes_together_is_limited(sandbox):
    script = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(b'x' * (100 * 2**20)); time.sleep(60)\n"
        "time.sleep(60)"
    )
    ended = await sandbox.run(Program(argv=["python3", "-c", script]), 30)
    assert ended.over_memory


async def test_a_fork_bomb_is_bounded(sandbox):
    script = """
import os, time
forks = 0
try:
    while forks < 500:
        if os.fork() == 0:
            time.sleep(60)
        forks += 1
except BlockingIOError:
    print("refused after", forks)
"""
    ended = await sandbox.run(Program(argv=["python3", "-c", script]), 30)
    refused = int(ended.stdout.rsplit(" ", 1)[1])
    assert 20 <= refused < LIMITS.processes


async def test_the_size_of_a_file_is_limited(sandbox):
    for place in ("big", "/tmp/big", "/dev/shm/big"):
        ended = await bash(sandbox, f"head -c 9000000 /dev/zero > {place}; stat -c %s {place}")
        assert int(ended.stdout) == LIMITS.file_mb * 2**20


async def test_tmp_as_a_whole_is_limited(sandbox):
    ended = await bash(sandbox, "for i in 1 2 3; do head -c 3000000 /dev/zero > /tmp/$i; done; du -sb /tmp")
    assert "No space left" in ended.stderr
    assert int(ended.stdout.split()[0]) <= LIMITS.file_mb * 2**20 + 4096


async def test_endless_output_neither_blocks_nor_grows(sandbox):
    ended = await bash(sandbox, "head -c 30000000 /dev/zero | tr '\\0' x; echo end")
    assert ended.exit_code == 0 and ended.stdout.endswith("xend\n") and len(ended.stdout) <= 8192


async def test_stdin_is_given_whole_or_empty(sandbox):
    text = "héllo --help @x\n" * 20_000
    assert (await sandbox.run(Program(argv=["wc", "-c"], stdin=text), 10)).stdout.strip() == str(len(text.encode()))
    assert (await sandbox.run(Program(argv=["cat"]), 10)).stdout == ""


@pytest.mark.parametrize("name", ["../out.txt", "/etc/passwd", "a/../../b", "", "x" * 256, "a/" * 600])
async def test_files_stay_inside_the_work_folder(runtime, name):
    with pytest.raises(RuntimeFault, match="relative path"):
        await runtime.create("bad", RuntimeSpec(files={name: "x"}))


async def test_files_for_the_home_are_written_through_no_link(sandbox, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "kept").write_text("kept")
    (sandbox.home / "file").symlink_to(tmp_path / "kept")
    (sandbox.home / "folder").symlink_to(tmp_path / "outside")
    ended = await bash(sandbox, "cat ~/file", home={"file": "new"})
    assert (ended.stdout, (tmp_path / "kept").read_text()) == ("new", "kept")
    with pytest.raises(RuntimeFault, match="symbolic link"):
        await bash(sandbox, "true", home={"folder/a": "new"})
    assert list((tmp_path / "outside").iterdir()) == []


async def test_a_program_that_cannot_be_started_is_a_fault(sandbox):
    with pytest.raises(RuntimeFault, match="could not be started"):
        await sandbox.run(Program(argv=["echo", "a\0b"]), 10)


async def test_closing_removes_what_the_agent_protected(sandbox, run_dir):
    await bash(sandbox, "mkdir -p a/b; touch a/b/c; ln -s /etc a/link; chmod 000 a/b a")
    await sandbox.close()
    assert not sandbox.folder.exists() and Path("/etc/passwd").exists()
    sandbox.folder.mkdir()


DEEP = """
import os
for name in ["d"] * 2000 + ["x" * 250] * 40:
    os.mkdir(name)
    os.chdir(name)
"""
"""Deeper than Python recurses, and longer than a path may be."""


async def test_closing_removes_a_tree_deeper_than_a_path_can_say(sandbox, run_dir):
    assert (await sandbox.run(Program(argv=["python3", "-c", DEEP]), 20)).exit_code == 0
    await sandbox.close()
    assert not sandbox.folder.exists()


async def test_clear_logs_what_the_disk_keeps(runtime, run_dir, monkeypatch, caplog):
    await runtime.create("left", RuntimeSpec())
    monkeypatch.setenv("PATH", str(run_dir))
    runtime.clear()
    assert (run_dir / "sessions" / "left").exists()
    assert "sessions stays: rm cannot be run" in caplog.text


def test_what_rm_cannot_remove_is_logged(tmp_path, monkeypatch, caplog):
    (tmp_path / "rm").symlink_to("/bin/false")
    (tmp_path / "chmod").symlink_to("/bin/true")
    (tmp_path / "kept").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    remove(tmp_path / "kept")
    assert f"{tmp_path / 'kept'} stays: rm -rf fails" in caplog.text


async def test_clear_removes_what_a_former_process_left(runtime, run_dir):
    await runtime.create("left", RuntimeSpec(files={"a": "b"}))
    runtime.clear()
    assert not (run_dir / "sessions").exists()
    assert (run_dir / "session_secret").exists()


async def test_without_bubblewrap_it_refuses_in_one_line(runtime, monkeypatch, tmp_path):
    await runtime.check()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeFault, match=r"needs bwrap.*POLAR_UNSAFE_LOCAL") as fault:
        await runtime.check()
    assert "\n" not in str(fault.value)


async def test_unsafe_local_runs_and_ends_its_session(run_dir):
    runtime = LocalRuntime(run_dir / "sessions", hidden=[run_dir], unsafe=True)
    await runtime.check()
    sandbox = await runtime.create("unsafe", RuntimeSpec(limits=LIMITS))
    ended = await bash(sandbox, "pwd; sleep 98765 & sleep 98765 & exit 4")
    assert (ended.exit_code, ended.stdout.strip()) == (4, str(sandbox.work))
    assert running("98765") == []
    assert (await bash(sandbox, "echo $HOME")).stdout.strip() == str(sandbox.home)
    assert (await bash(sandbox, "sleep 98765", deadline_s=0.3)).timed_out
    with pytest.raises(RuntimeFault, match="could not be started"):
        await sandbox.run(Program(argv=["echo", "\0"]), 10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_runs_without_root():
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, 23456, 23456)
        _run_without_root(place)


def _run_without_root(place):
    """The same isolation by a user namespace: no root outside, limits and hidden folders as before."""
    script = f"""
import asyncio, concurrent.futures.thread, os
from pathlib import Path
from polar.runtimes.local import LocalRuntime
from polar.runtimes.runtime import Program
from schemas.tasks import Limits, RuntimeSpec
BOMB = '''
import os, time
n = 0
try:
    while n < 300:
        if os.fork() == 0: time.sleep(60)
        n += 1
except BlockingIOError: print(n)
'''
async def main():
    runtime = LocalRuntime(Path({str(place)!r}), hidden=[Path({str(place)!r})])
    await runtime.check()
    box = await runtime.create("s", RuntimeSpec(limits=Limits(processes=32, memory_mb=256)))
    run = lambda *argv, **k: box.run(Program(argv=list(argv)), k.get("s", 20))
    ended = await run("bash", "-c", "touch /usr/x /etc/x; (setsid sleep 98766 &); ls {place}; echo out > a; cat a")
    assert ended.stdout == "out\\n", ended
    assert int((await run("python3", "-c", BOMB)).stdout) < 32
    assert (await run("python3", "-c", {SHARED!r})).over_memory
    assert "MemoryError" in (await run("python3", "-c", {PRIVATE!r})).stderr
    assert (await run("python3", "-c", {DEEP!r} + "os.chmod('.', 0)")).exit_code == 0
    await run("bash", "-c", "mkdir e; touch e/f; chmod 000 e; chmod 500 d/d/d d")
    await box.close()
    assert not (Path({str(place)!r}) / "s").exists()
os.setgroups([]); os.setgid(23456); os.setuid(23456)
asyncio.run(main())
print("ok")
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert done.stdout == "ok\n", done.stderr
    assert running("98766") == []


def test_remove_follows_no_symbolic_link(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    remove(tmp_path / "gone")
    assert (tmp_path / "kept" / "file").exists() and not (tmp_path / "gone").exists()
