"""The ingest stage as a whole: real runs, shards, resumption, errors that a user can mend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.python_path import python_path
from tests.trajectories.make import mini_v1, mini_v2
from traceforge_core.config import load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run
from traceforge_core.stages import perform
from traceforge_core.trajectories import ingest as ingest_module
from traceforge_core.trajectories import shards
from traceforge_core.trajectories.ingest import corpus_folder, ingest


def configure(folder: Path, workers: int = 1):
    return load_config(assignments=[f"ingest.path={json.dumps(str(folder))}", f"ingest.workers={workers}"])


def fill(write: Any, count: int) -> Path:
    folder = write("first.json", mini_v1("z__z-9", note="first"))
    for number in range(count):
        write(
            f"run-{number % 3}/a__b-{number // 3}/a__b-{number // 3}.traj.json",
            mini_v2(f"a__b-{number // 3}", note=str(number)),
        )
    return folder


def test_the_real_runs_add_up_and_match_their_reports(shared_trajectories: Path, run_ingest):
    runs = shared_trajectories / "swebench-runs"
    result = run_ingest(runs)
    assert (result.figures["found"], result.figures["read"]) == (64, 64)
    expected: dict[tuple[str, str], str | None] = {}
    for report in runs.glob("*/*.eval.json"):
        value = json.loads(report.read_text())
        for case in (path.name for path in report.parent.iterdir() if path.is_dir()):
            solved, failed = case in value["resolved_ids"], case in value["unresolved_ids"] + value["empty_patch_ids"]
            expected[case, report.parent.name] = "resolved" if solved else "unresolved" if failed else None
    assert {(t.case, t.run): t.outcome for t in result.trajectories} == expected
    assert result.figures["by_outcome"] == {"resolved": 32, "unknown": 1, "unresolved": 31}
    assert result.figures["left_out"] == {"trailing_patch": 60, "exit_message": 4}


def test_ids_and_bytes_are_the_same_again_and_for_any_number_of_processes(write, run_ingest, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 5000)
    monkeypatch.setattr(ingest_module, "plan", lambda units: shards.plan(units, 5000))
    folder = fill(write, 24)
    results = [run_ingest(folder, workers=n, out=tmp_path / f"out-{n}") for n in (1, 2)]
    assert results[0].figures == results[1].figures and results[0].figures["shards"] > 3
    files = [sorted((r.out / "trajectories").iterdir()) for r in results]
    assert [f.name for f in files[0]] == [f.name for f in files[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def test_duplicates_in_other_shards_are_left_out(write, run_ingest, monkeypatch):
    monkeypatch.setattr(ingest_module, "plan", lambda units: shards.plan(units, 1))
    for name in ("a", "b", "c"):
        write(f"{name}/x.traj.json", mini_v2("a__b-1"))
    folder = write("c/y.traj.json", mini_v2("a__b-2"))
    result = run_ingest(folder)
    assert (result.figures["shards"], result.figures["read"], result.figures["duplicates"]) == (4, 2, 2)
    assert [t.source for t in result.trajectories] == ["a/x.traj.json", "c/y.traj.json"]


def test_an_interrupted_ingest_goes_on_with_the_missing_shards(write, run_ingest, tmp_path, monkeypatch):
    monkeypatch.setattr(ingest_module, "plan", lambda units: shards.plan(units, 5000))
    folder = fill(write, 24)
    whole = run_ingest(folder, out=tmp_path / "whole")
    read: list[int] = []
    original = shards.read_unit

    def failing(root, unit, watch=None):
        if len(read) == 10:
            raise KeyboardInterrupt
        read.append(1)
        return original(root, unit, watch)

    monkeypatch.setattr(shards, "read_unit", failing)
    out = tmp_path / "interrupted"
    out.mkdir()
    with pytest.raises(KeyboardInterrupt):
        ingest(configure(folder), {}, out)
    assert not (out / "report.json").exists()
    again: list[int] = []
    monkeypatch.setattr(
        shards, "read_unit", lambda root, unit, watch=None: again.append(1) or original(root, unit, watch)
    )
    resumed = run_ingest(folder, out=out)
    assert resumed.figures == whole.figures
    assert 0 < len(again) < 25
    assert not (out / ".shards").exists()
    assert [t.trajectory_id for t in resumed.trajectories] == [t.trajectory_id for t in whole.trajectories]


def test_a_changed_corpus_does_not_reuse_old_shards(write, run_ingest, tmp_path, monkeypatch):
    folder = fill(write, 3)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(ingest_module, "_take_over", lambda *_: (_ for _ in ()).throw(OSError("stop here")))
    with pytest.raises(OSError, match="stop here"):
        ingest(configure(folder), {}, out)
    monkeypatch.undo()
    write("first.json", mini_v1("z__z-9", note="changed"))
    result = run_ingest(folder, out=out)
    assert any("changed" in m.content for t in result.trajectories for m in t.messages)


def test_shards_can_be_read_by_someone_else(write, tmp_path):
    folder = fill(write, 6)
    out = tmp_path / "out"
    out.mkdir()
    taken: list[int] = []

    def elsewhere(jobs):
        for job in jobs:
            taken.append(job.index)
            yield shards.read_shard(job)

    assert ingest(configure(folder), {}, out, elsewhere)["read"] == 7
    assert taken == [0]


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_with_advice_and_leaves_no_process(write, tmp_path):
    folder = fill(write, 24)
    script = tmp_path / "die.py"
    script.write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from traceforge_core.config import load_config\n"
        "from traceforge_core.errors import TraceForgeError\n"
        "from traceforge_core.trajectories import ingest as module, shards\n"
        "module.plan = lambda units: shards.plan(units, 5000)\n"
        "def die(job, should_stop): os._exit(9)\n"
        "shards.read_shard = die\n"
        "if __name__ == '__main__':\n"
        "    config = load_config(assignments=[f'ingest.path={json.dumps(sys.argv[1])}', 'ingest.workers=2'])\n"
        "    try: module.ingest(config, {}, Path(sys.argv[2]))\n"
        "    except TraceForgeError as error: print(error); sys.exit(1)\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": python_path(os.getcwd())},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Set ingest.workers lower" in done.stdout
    assert not (out / "report.json").exists()


@pytest.mark.slow
def test_killing_the_parent_ends_its_workers(write, tmp_path):
    folder = fill(write, 24)
    script = tmp_path / "wait.py"
    script.write_text(
        "import json, os, sys, time\n"
        "from pathlib import Path\n"
        "from traceforge_core.config import load_config\n"
        "from traceforge_core.trajectories import ingest as module, shards\n"
        "module.plan = lambda units: shards.plan(units, 5000)\n"
        "def wait(job, should_stop):\n"
        "    Path(job.folder, f'pid-{os.getpid()}').touch(); time.sleep(300)\n"
        "shards.read_shard = wait\n"
        "if __name__ == '__main__':\n"
        "    config = load_config(assignments=[f'ingest.path={json.dumps(sys.argv[1])}', 'ingest.workers=2'])\n"
        "    module.ingest(config, {}, Path(sys.argv[2]))\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(out)], env={**os.environ, "PYTHONPATH": python_path(os.getcwd())}
    )
    deadline = time.monotonic() + 100
    while len(pids := list(out.glob(".shards/pid-*"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(_runs(int(path.name.removeprefix("pid-"))) for path in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_empty_folder_says_what_to_do(tmp_path, run_ingest):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceForgeError, match=r"it is empty\)\. Set ingest\.path"):
        run_ingest(tmp_path / "empty")
    (tmp_path / "empty" / "readme.md").write_text("hello")
    with pytest.raises(TraceForgeError, match="outcome files: 0, other files: 1"):
        run_ingest(tmp_path / "empty")


def test_a_path_that_is_not_there_says_so(tmp_path):
    with pytest.raises(TraceForgeError, match=r"There is no folder or file .*nowhere"):
        corpus_folder(str(tmp_path / "nowhere"))


def test_a_corpus_of_nothing_but_bad_files_is_reported_and_empty(write, run_ingest):
    result = run_ingest(write("bad.json", "{"))
    assert (result.figures["found"], result.figures["read"], result.trajectories) == (1, 0, [])


def test_secrets_are_replaced_and_counted(write, run_ingest):
    value = mini_v2(note="sk-ant-" + "api03" + "Zy9" * 12)
    value["messages"][3]["content"] = "GITHUB=ghp_" + "a1B2" * 9 + " and AKIAIOSFODNN7EXAMPLE"
    result = run_ingest(write("a.traj.json", value))
    text = json.dumps([m.content for m in result.trajectories[0].messages]) + str(
        result.trajectories[0].messages[2].actions
    )
    assert "sk-ant" not in text and "ghp_" not in text and "AKIA" not in text
    assert "[GitHub token removed]" in text and "[api key removed]" in text
    assert result.figures["left_out"]["secret_replaced"] == 4  # two turns name the key, one observation two others


def test_as_a_stage_an_interrupted_ingest_goes_on_and_a_finished_one_is_not_done_again(write, tmp_path, monkeypatch):
    monkeypatch.setattr(ingest_module, "plan", lambda units: shards.plan(units, 5000))
    config = configure(fill(write, 24))
    run = Run.create(tmp_path / "runs")
    run.save_config(config.model_dump(mode="json"))
    original, read = shards.read_unit, []

    def counting(root, unit, watch=None):
        if len(read) == 12:
            raise KeyboardInterrupt
        read.append(unit)
        return original(root, unit, watch)

    monkeypatch.setattr(shards, "read_unit", counting)
    with pytest.raises(KeyboardInterrupt):
        perform("ingest", config, run)
    assert run.result("ingest") is None
    before = len(read)
    monkeypatch.setattr(
        shards, "read_unit", lambda root, unit, watch=None: read.append(unit) or original(root, unit, watch)
    )
    read.clear()
    result = perform("ingest", config, run)
    assert result.figures["read"] == 25 and len(read) < 25 and len(read) + before >= 25
    assert {path.name for path in result.path.iterdir()} == {
        "manifest.json",
        "quarantine.jsonl",
        "report.json",
        "trajectories",
    }
    assert perform("ingest", config, run).reused
