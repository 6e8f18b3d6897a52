"""Runs on disk: whole or not at all, reused when nothing changed, movable."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Inputs, Run, check_runs_dir, list_runs, not_written, run_stage, write_json
from traceforge_core.runs.files import disk_is_full


def new_run(folder: Path, run_id: str | None = None) -> Run:
    run = Run.create(folder, run_id)
    run.save_config({})
    return run


def write_text(out_dir: Path) -> dict:
    (out_dir / "text.txt").write_text("hello")
    return {"words": 1}


def refuse(out_dir: Path) -> dict:
    raise AssertionError("the stage did its work again")


def test_a_finished_stage_has_a_manifest_with_what_it_was_made_from(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    result = run_stage(run, "alpha", {"x": 1}, Inputs(outside={"files": "abc"}), write_text)
    manifest = json.loads((result.path / "manifest.json").read_text())
    assert manifest["config"] == {"x": 1}
    assert manifest["inputs"] == {"files": "abc"}
    assert manifest["outputs"]["text.txt"]["bytes"] == 5
    assert manifest["versions"]["python"]
    assert result.figures == {"words": 1}
    assert not result.reused


def test_the_same_inputs_and_config_are_reused_and_refresh_forces(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_stage(run, "alpha", {"x": 1}, Inputs(), write_text)
    assert run_stage(run, "alpha", {"x": 1}, Inputs(), refuse).reused
    assert not run_stage(run, "alpha", {"x": 1}, Inputs(), write_text, refresh=True).reused
    assert not run_stage(run, "alpha", {"x": 2}, Inputs(), write_text).reused


def test_a_stage_notices_that_its_input_changed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    first = run_stage(run, "alpha", {"x": 1}, Inputs(), write_text)
    run_stage(run, "beta", {}, Inputs({"alpha": first}), write_text)
    assert run_stage(run, "beta", {}, Inputs({"alpha": first}), refuse).reused
    second = run_stage(run, "alpha", {"x": 2}, Inputs(), write_text)
    assert not run_stage(run, "beta", {}, Inputs({"alpha": second}), write_text).reused


def test_another_run_lends_its_result_and_may_then_be_deleted(tmp_path: Path) -> None:
    first, second = new_run(tmp_path, "one"), new_run(tmp_path, "two")
    run_stage(first, "alpha", {"x": 1}, Inputs(), write_text)
    result = run_stage(second, "alpha", {"x": 1}, Inputs(), refuse)
    shutil.rmtree(first.path)
    assert result.reused
    assert (result.path / "text.txt").read_text() == "hello"


def test_a_failed_stage_never_looks_finished_and_keeps_its_reason(tmp_path: Path) -> None:
    run = new_run(tmp_path)

    def fail(out_dir: Path) -> dict:
        (out_dir / "half.bin").write_bytes(b"half")
        raise TraceForgeError("the tokenizer has no pad token")

    with pytest.raises(TraceForgeError):
        run_stage(run, "alpha", {}, Inputs(), fail)
    assert run.result("alpha") is None
    assert not run.stage_dir("alpha").exists()
    assert run.failure("alpha") == "the tokenizer has no pad token"
    run_stage(run, "alpha", {}, Inputs(), write_text)
    assert run.failure("alpha") is None
    assert sorted(p.name for p in run.stage_dir("alpha").iterdir()) == ["manifest.json", "text.txt"]


def test_a_failed_refresh_leaves_the_old_result_in_place(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_stage(run, "alpha", {}, Inputs(), write_text)
    with pytest.raises(AssertionError):
        run_stage(run, "alpha", {}, Inputs(), refuse, refresh=True)
    assert run.result("alpha") is not None


def test_a_resumable_stage_finds_its_folder_again_only_under_the_same_key_and_says_when_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path)
    seen: list[bool] = []

    def interrupted(out_dir: Path) -> dict:
        seen.append((out_dir / "checkpoint").exists())
        (out_dir / "checkpoint").write_text("step 5")
        raise KeyboardInterrupt

    for config in ({"x": 1}, {"x": 1}, {"x": 2}):
        assert "begins anew" not in caplog.text
        with pytest.raises(KeyboardInterrupt):
            run_stage(run, "alpha", config, Inputs(), interrupted, resumable=True)
    assert seen == [False, True, False]
    assert "Stage alpha begins anew: its last attempt" in caplog.text


def test_a_full_disk_says_which_stage_and_what_to_do(tmp_path: Path) -> None:
    run = new_run(tmp_path)

    def full(out_dir: Path) -> dict:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(TraceForgeError, match="disk is full: stage alpha"):
        run_stage(run, "alpha", {}, Inputs(), full)


@pytest.mark.parametrize("place", ["alpha", ".partial", ".partial/alpha"])
@pytest.mark.parametrize("what", ["a file", "a link"])
def test_something_else_in_the_place_of_a_stage_is_told_before_any_work(tmp_path: Path, place: str, what: str) -> None:
    other, run = new_run(tmp_path, "other"), new_run(tmp_path, "run")
    run_stage(other, "alpha", {}, Inputs(), write_text)  # which would be lent to the other run
    (run.path / place).parent.mkdir(exist_ok=True)
    if what == "a file":
        (run.path / place).write_text("hi")
    else:
        (tmp_path / "elsewhere").mkdir()
        (run.path / place).symlink_to(tmp_path / "elsewhere")
    told = rf"Stage alpha needs the folder {run.path / place}, but {what} is in its place.* Move it away"
    for config, refresh in (({}, False), ({}, True), ({"x": 1}, False)):
        with pytest.raises(TraceForgeError, match=told):
            run_stage(run, "alpha", config, Inputs(), refuse, refresh=refresh)
    (run.path / place).rename(tmp_path / "moved away")
    assert run_stage(run, "alpha", {"x": 1}, Inputs(), write_text).figures == {"words": 1}


def test_a_finished_stage_that_was_put_elsewhere_behind_a_link_is_still_reused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_stage(run, "alpha", {}, Inputs(), write_text)
    run.stage_dir("alpha").rename(tmp_path / "larger disk")
    run.stage_dir("alpha").symlink_to(tmp_path / "larger disk")
    assert run_stage(run, "alpha", {}, Inputs(), refuse).reused


def test_a_folder_without_config_json_is_told_as_that(tmp_path: Path) -> None:
    lost = new_run(tmp_path, "lost")
    run_stage(lost, "alpha", {}, Inputs(), write_text)
    (lost.path / "config.json").unlink()
    (tmp_path / "notes").mkdir()
    for others in ((), ("whole",)):
        for run_id in others:
            new_run(tmp_path, run_id)
        with pytest.raises(
            TraceForgeError, match=r"lost is no run.* config\.json, which every run has, is missing\. Put"
        ):
            Run.open(tmp_path, "lost")
        if not others:
            with pytest.raises(TraceForgeError, match=r"no runs in .* \(config\.json, .* is missing from: lost\)\."):
                Run.open(tmp_path)
    for odd in ("x" * 300, "never", "\0"):
        with pytest.raises(TraceForgeError, match="There is no run"):
            Run.open(tmp_path, odd)


def test_latest_is_the_newest_run_and_unknown_ids_name_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match="no runs"):
        Run.open(tmp_path)
    for index, run_id in enumerate(["b-first", "a-second"]):
        os.utime(new_run(tmp_path, run_id).path / "config.json", (index, index))
    assert Run.open(tmp_path, "latest").run_id == "a-second"
    assert [run.run_id for run in list_runs(tmp_path)] == ["b-first", "a-second"]
    with pytest.raises(TraceForgeError, match="b-first"):
        Run.open(tmp_path, "nonsense")


def test_latest_may_ask_for_stages_and_takes_the_newest_run_where_none_has_them(tmp_path: Path) -> None:
    for index, run_id in enumerate(["old", "good", "typo"]):
        os.utime(new_run(tmp_path, run_id).path / "config.json", (index, index))
    assert Run.open(tmp_path, "latest", having=("alpha",)).run_id == "typo"
    for run_id in ("old", "good"):
        run_stage(Run.open(tmp_path, run_id), "alpha", {}, Inputs(), write_text)
    assert Run.open(tmp_path, "latest", having=("alpha",)).run_id == "good"
    assert Run.open(tmp_path, "latest").run_id == "typo"


def test_outputs_can_be_read_by_whoever_may_read_new_files_here(tmp_path: Path) -> None:
    def private(out_dir: Path) -> dict:
        (out_dir / "weights.bin").write_bytes(b"w")
        (out_dir / "weights.bin").chmod(0o600)
        return {}

    result = run_stage(new_run(tmp_path), "alpha", {}, Inputs(), private)
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert (result.path / "weights.bin").stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize(
    "manifest",
    [
        "[1]",
        '{"outp',
        '{"outputs": []}',
        '{"outputs": {"text.txt": 3}}',
        '{"outputs": null}',
        "[" * 100_000,
        '{"key": 1}',
    ],
)
def test_a_manifest_that_is_none_is_no_finished_stage_and_harms_no_other_run(tmp_path: Path, manifest: str) -> None:
    bad, good = new_run(tmp_path, "bad"), new_run(tmp_path, "good")
    result = run_stage(bad, "alpha", {}, Inputs(), write_text)
    (result.path / "manifest.json").write_text(manifest)
    assert bad.result("alpha") is None
    assert not run_stage(good, "alpha", {}, Inputs(), write_text).reused


def test_a_full_disk_is_told_from_a_weights_file_too(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    def full(out_dir: Path) -> dict:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(TraceForgeError, match="disk is full: stage alpha"):
        run_stage(new_run(tmp_path), "alpha", {}, Inputs(), full)


@pytest.mark.parametrize("run_id", ["../up", "latest", "a b", ""])
def test_a_run_id_cannot_leave_the_runs_folder(tmp_path: Path, run_id: str) -> None:
    if run_id == "":
        assert Run.create(tmp_path, run_id).path.parent == tmp_path.resolve()
        return
    with pytest.raises(TraceForgeError, match="cannot name a run"):
        Run.create(tmp_path, run_id)


def test_two_runs_started_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({new_run(tmp_path).path for _ in range(5)}) == 5


def test_a_run_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    code = (
        "import sys, pathlib; from traceforge_core.runs import Run\n"
        "try:\n"
        "    with Run(pathlib.Path(sys.argv[1])).lock(): print('got it')\n"
        "except Exception as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(run.path)]
    with run.lock():
        refused = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    granted = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"process {os.getpid()}" in refused
    assert granted.strip() == "got it"


def test_a_moved_run_folder_still_reads(tmp_path: Path) -> None:
    run = new_run(tmp_path / "here")
    run_stage(run, "alpha", {}, Inputs(), write_text)
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = Run.open(tmp_path / "there", run.run_id).result("alpha")
    assert moved is not None
    assert (moved.path / "text.txt").is_file()


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: file.write_text("hel")])
def test_a_stage_that_lost_part_of_its_outputs_is_not_finished(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    run = new_run(tmp_path)
    result = run_stage(run, "alpha", {}, Inputs(), write_text)
    harm(result.path / "text.txt")
    assert run.result("alpha") is None


def test_the_command_that_goes_on_with_a_run_works_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Run.create(Path("runs"), "one").command("sft", "oracle") == "traceforge run --run one --stages sft,oracle"
    other = Run.create(Path("my runs"), "two").command()
    assert other == f"traceforge run --run two --runs-dir '{tmp_path.resolve() / 'my runs'}'"


def test_json_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {(1, 2): "a key JSON cannot have"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_run_folder_that_vanishes_while_a_stage_works_is_told_as_that(how: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs")

    def work(folder: Path) -> dict[str, Any]:
        shutil.rmtree(run.path) if how == "removed" else run.path.rename(tmp_path / "elsewhere")
        (folder / "output.txt").write_text("too late")
        return {}

    with pytest.raises(TraceForgeError, match=r"The run folder .* is gone: it was removed or moved while stage sft"):
        run_stage(run, "sft", {}, Inputs(), work)
    assert not run.path.exists()


def test_a_stage_that_makes_its_folders_anew_has_lost_its_run_all_the_same(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs")

    def work(folder: Path) -> dict[str, Any]:
        run.path.rename(tmp_path / "elsewhere")
        (folder / "part").mkdir(parents=True)
        return {}

    with pytest.raises(TraceForgeError, match=r"The run folder .* is gone: it was removed or moved while stage sft"):
        run_stage(run, "sft", {}, Inputs(), work)
    assert run.result("sft") is None


def test_a_disk_that_becomes_read_only_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(tmp_path)

    def work(folder: Path) -> dict[str, Any]:
        monkeypatch.setattr(os, "access", lambda path, mode: path != run.path)  # root may write anywhere else
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder / "output.txt"))

    with pytest.raises(TraceForgeError, match=r"Cannot write to the run folder .*: Read-only file system\. Make it"):
        run_stage(run, "sft", {}, Inputs(), work)


def test_a_run_that_cannot_be_written_to_is_told_as_that_and_nobody_is_at_work_on_it(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    (run.path / ".lock").mkdir()  # root may write to a folder that is read-only
    with pytest.raises(TraceForgeError, match=r"Cannot write to the run folder .*--runs-dir"), run.lock():
        pass
    assert not run.is_at_work()


def test_a_full_disk_is_told_as_that_by_whoever_meets_it_first_and_old_runs_can_still_be_claimed(
    full_disk: Path,
) -> None:
    with pytest.raises(
        TraceForgeError, match=r"The disk is full: cannot write to the folder of runs .*Free some space"
    ):
        check_runs_dir(full_disk / "runs")
    assert [each.name for each in full_disk.iterdir()] == ["fill"]
    run = Run.create(full_disk)  # a folder may still fit
    with run.lock():  # to prune it, which is the cure
        assert run.is_at_work()
        with pytest.raises(TraceForgeError, match="The disk is full: cannot write to the run folder"):
            run.save_config({"seed": 1})
    assert not run.is_at_work() and [each.name for each in run.path.iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_only_a_full_disk_is_told_to_need_space(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert str(not_written(error, "write X", "Name another.")).startswith("The disk is full: cannot write X. Free some")
    denied = OSError(errno.EACCES, "Permission denied")
    assert str(not_written(denied, "write X", "Name another.")) == "Cannot write X: Permission denied. Name another."


@pytest.mark.parametrize("fits", [0, 1 << 20], ids=["not a byte", "the beginning"])
def test_a_checkpoint_of_torch_that_did_not_fit_is_told_as_a_full_disk(fits: int, full_disk: Path) -> None:
    import torch

    with (full_disk / "fill").open("r+b") as file:
        file.truncate((full_disk / "fill").stat().st_size - fits)
    with pytest.raises(RuntimeError) as error:
        torch.save(torch.zeros(1 << 20), full_disk / "optimizer.pt")
    assert disk_is_full(error.value), "its words are not those of the system"


def test_a_folder_of_runs_that_cannot_be_read_is_told_and_a_run_that_cannot_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = tmp_path / ("x" * 300)
    for use in (list_runs, check_runs_dir):
        with pytest.raises(TraceForgeError, match=r"File name too long\. Choose another place"):
            use(too_long)
    run = Run.create(tmp_path)
    run.save_config({})
    (tmp_path / "notes.txt").write_text("of a person")
    (tmp_path / "somebody-elses").symlink_to(tmp_path / "somebody-elses")  # root may look into every folder
    assert list_runs(tmp_path) == [run] and list_runs(tmp_path / "notes.txt") == list_runs(tmp_path / "nowhere") == []
