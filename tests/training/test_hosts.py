"""Workers on two hosts: network namespaces with addresses of their own, or, without root, two programs on loopback."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.python_path import python_path
from traceforge_core.config import RunConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.adapters import hash_adapter
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training import hosts, launch, stages, watch
from traceforge_core.training.records import read_records
from traceforge_core.training.watch import WorkerError

REPOSITORY = Path(__file__).parents[2]
Configure = Callable[..., RunConfig]
FIRST, SECOND = "10.213.7.1", "10.213.7.2"
ON_FIRST = """
    import logging, sys
    from pathlib import Path
    from traceforge_core.training import stages
    from traceforge_core.training.job import Job
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    stages.run_job(Job.read(Path(sys.argv[1])))
"""


@dataclass
class Host:
    """How to start something on a host. `address` is what others reach it by."""

    prefix: list[str]
    address: str
    interface: str

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": self.interface}
        return subprocess.Popen(
            [*self.prefix, *command],
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


HERE = Host([], "127.0.0.1", "lo")


@pytest.fixture
def two_hosts() -> Iterator[tuple[Host, Host]]:
    name = f"tf{os.getpid()}"
    names = (f"{name}a", f"{name}b")

    def ip(*arguments: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0
        return False

    made = all(ip("netns", "add", each) for each in names) and ip(
        "link", "add", names[0], "type", "veth", "peer", names[1]
    )
    for each, address in zip(names, (FIRST, SECOND), strict=True):
        made = made and ip("link", "set", each, "netns", each)
        made = made and ip("-n", each, "addr", "add", f"{address}/24", "dev", each)
        made = made and ip("-n", each, "link", "set", each, "up") and ip("-n", each, "link", "set", "lo", "up")
    try:
        if made:
            inside = [["ip", "netns", "exec", each] for each in names]
            yield Host(inside[0], FIRST, names[0]), Host(inside[1], SECOND, names[1])
        else:
            yield HERE, HERE
    finally:
        for each in names:
            ip("netns", "del", each)


@pytest.mark.slow
def test_two_hosts_train_what_one_does_and_neither_outlives_the_other(
    two_hosts: tuple[Host, Host], inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    first, second = two_hosts
    alone = configure(preference__max_steps=3)
    stages.run_job(stages.preference_job("branch_parallel", alone, inputs, tmp_path / "alone"))

    told = train_on(first, second, configure(**on_two(first), preference__max_steps=3), inputs, tmp_path / "two")
    assert hash_adapter(tmp_path / "two" / "adapter") == hash_adapter(tmp_path / "alone" / "adapter")
    assert "Worker 0 of 2 is connected" in told and (tmp_path / "two" / "logs" / "rank0.log").is_file()

    endless = configure(**on_two(first), preference__max_steps=100_000, preference__schedule="constant")
    seen: list[psutil.Process] = []

    def kill_second(there: subprocess.Popen[str]) -> None:
        seen.extend([psutil.Process(there.pid), *psutil.Process(there.pid).children(recursive=True)])
        for process in seen:  # the agent of a host, or the host itself, dies without a word
            if "torch.distributed.run" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)

    told = train_on(first, second, endless, inputs, tmp_path / "endless", at_first_step=kill_second, fails=True)
    assert "branch_parallel: torchrun, one of 2 hosts, ended with exit status 1" in told
    _, left = psutil.wait_procs(seen, timeout=15)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_a_stop_file_ends_both_hosts_after_the_step_at_work_with_a_checkpoint(
    two_hosts: tuple[Host, Host], inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    first, second = two_hosts
    out = tmp_path / "stopped"
    endless = configure(**on_two(first), preference__max_steps=100_000, preference__checkpoint_steps=100_000)
    told = train_on(first, second, endless, inputs, out, at_first_step=lambda _: (out / "STOP").touch(), fails=True)
    [checkpoint] = (out / "checkpoints").iterdir()
    steps = len(read_records(out / "metrics.jsonl"))
    assert checkpoint.name == f"checkpoint-{steps}" and (checkpoint / "optimizer.pt").is_file()
    assert f"StoppedByFile: branch_parallel: stopped after step {steps} of 100000, with a checkpoint, because" in told


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (
            "StoppedByFile('stopped after step 3 of 9.')",
            StoppedByFile,
            r"^branch_parallel: stopped after step 3 of 9\.$",
        ),
        (
            "TraceForgeError('The loss is NaN.')",
            WorkerError,
            r"^branch_parallel: worker 0 of 2 \(chosen\): The loss is",
        ),
        (
            "RuntimeError('Connection closed by peer')",
            WorkerError,
            "torchrun, one of 2 hosts, ended with exit status 1",
        ),
    ],
)
def test_what_a_worker_said_at_its_end_is_told_and_not_that_torchrun_ended(
    error: str,
    raised: type[TraceForgeError],
    said: str,
    inputs: dict[str, Path],
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it ended before the launcher had looked for the stop file, and where there was one by chance."""
    program = f"""
        import os
        os.environ |= {{"RANK": "0", "TORCHELASTIC_RUN_ID": "one"}}
        from traceforge_core.errors import TraceForgeError
        from traceforge_core.runs.stopping import StoppedByFile
        from traceforge_core.training import worker
        worker._take_seat(worker.Job.read(worker.Path(os.environ["JOB"]))).report({error})
        raise SystemExit(1)
    """
    monkeypatch.setattr(hosts, "here", lambda job, file: [sys.executable, "-c", textwrap.dedent(program)])
    monkeypatch.setattr(watch, "LOOK_SECONDS", 600.0)
    job = stages.preference_job("branch_parallel", configure(**on_two(HERE)), inputs, tmp_path / "out")
    monkeypatch.setenv("JOB", str(tmp_path / "out" / "job.json"))
    (tmp_path / "out").mkdir()
    with pytest.raises(raised, match=said):
        launch.launch(job, [""])


def on_two(first: Host) -> dict[str, object]:
    return {"hosts__count": 2, "hosts__address": f"{first.address}:{free_port()}"}


def train_on(
    first: Host,
    second: Host,
    config: RunConfig,
    inputs: dict[str, Path],
    out_dir: Path,
    at_first_step: Callable[[subprocess.Popen[str]], None] | None = None,
    fails: bool = False,
) -> str:
    """Train as two people would: one starts it, the other types what the log says. Returns what was told."""
    job = stages.preference_job("branch_parallel", config, inputs, out_dir)
    job_file = out_dir.parent / f"{out_dir.name}.json"
    job.write(job_file)
    told: list[str] = []
    there: subprocess.Popen[str] | None = None
    with first.start([sys.executable, "-c", textwrap.dedent(ON_FIRST), str(job_file)]) as here:
        assert here.stdout is not None
        for line in here.stdout:
            told.append(line)
            if "Start on another host" in line:
                program, *arguments = shlex.split(line.split("checkout there: ")[1])
                assert program == "torchrun"
                there = second.start([sys.executable, "-m", "torch.distributed.run", *arguments])
                assert there.stdout is not None
                threading.Thread(target=there.stdout.read, daemon=True).start()
            if at_first_step and "step 1/" in line and there is not None:
                at_first_step(there)
                at_first_step = None
    assert there is not None, "".join(told)
    assert (here.returncode != 0) is fails, "".join(told)
    there.wait(timeout=60)
    return "".join(told)


def test_workers_that_hosts_cannot_share_equally_are_refused(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    config = configure(hosts__count=3, hosts__address="10.0.0.1:29500", preference__replicas=2)
    job = stages.preference_job("branch_parallel", config, inputs, tmp_path)
    with pytest.raises(TraceForgeError, match="4 workers, which 3 hosts cannot share equally"):
        hosts.workers_here(job)
    assert stages.preference_job("oracle", config, inputs, tmp_path).hosts == 1
    assert stages.sft_job(config, inputs, tmp_path).hosts == 1


def test_several_hosts_need_an_address_and_change_no_key() -> None:
    with pytest.raises(TraceForgeError, match=r"hosts.count above 1 needs hosts.address"):
        load_config(assignments=["hosts.count=2"])
    with pytest.raises(TraceForgeError, match=r"hosts.address"):
        load_config(assignments=["hosts.count=2", "hosts.address=nowhere"])
    from traceforge_core.stages import STAGES

    assert not any(section.startswith("hosts") for stage in STAGES.values() for section in stage.sections)
