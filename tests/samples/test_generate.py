"""The shipped samples are what the generator makes, and what they claim is true."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.samples import behaviours
from traceforge_core.samples.agent import commands_of, patch_of, run_agent
from traceforge_core.samples.cases import Case, load_cases
from traceforge_core.samples.generate import DATA, RUNS, behaviour_of, generate, write
from traceforge_core.samples.judge import judge, run_report

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="the samples' agent works in a git checkout")
CASES = load_cases()
BY_NAME = {case.name: case for case in CASES}


def shipped(run: str, case: str) -> dict[str, Any]:
    return json.loads((DATA / run / case / f"{case}.traj.json").read_text(encoding="utf-8"))


def report(run: str) -> dict[str, Any]:
    return json.loads((DATA / run / f"{run}.eval.json").read_text(encoding="utf-8"))


def test_every_run_has_every_case_and_all_of_it_is_small() -> None:
    files = sorted(path.relative_to(DATA).as_posix() for path in DATA.rglob("*") if path.is_file())
    expected = [f"{run}/{case.name}/{case.name}.traj.json" for run in RUNS for case in CASES]
    assert files == sorted(expected + [f"{run}/{run}.eval.json" for run in RUNS])
    assert 8 <= len(CASES) <= 12
    assert sum((DATA / file).stat().st_size for file in files) < 800_000


@needs_git
@pytest.mark.parametrize("run", RUNS)
def test_the_agent_run_again_gives_the_shipped_file(run: str, tmp_path: Path) -> None:
    """One case is enough: over the five runs each behaviour has its turn on it."""
    case = BY_NAME["pagewise__pagewise-3"]
    again = run_agent(case, behaviour_of(CASES, case, run), run)
    old = shipped(run, case.name)
    assert list(commands_of(again)) == list(commands_of(old))
    codes = [[m["extra"]["returncode"] for m in file["messages"] if m["role"] == "tool"] for file in (again, old)]
    assert codes[0] == codes[1]
    made_with = old["info"]["config"]["environment"]["python"]
    if made_with != ".".join(map(str, sys.version_info[:2])):
        pytest.skip(f"tracebacks read differently in other Pythons; the shipped files were made with {made_with}")
    write(tmp_path / "again.json", again)
    assert (tmp_path / "again.json").read_bytes() == (DATA / run / case.name / f"{case.name}.traj.json").read_bytes()


@needs_git
def test_observations_come_from_really_running_the_commands(tmp_path: Path) -> None:
    case = BY_NAME["spanset__spanset-4"]
    mended = tmp_path / "mended"
    shutil.copytree(case.folder, mended)
    (mended / "program" / case.module).write_text(case.right.applied_to(case.source), encoding="utf-8")
    trajectory = run_agent(replace(case, folder=mended), behaviours.steady, "run-2")
    _, _, shown, edited, *_ = (m["extra"] for m in trajectory["messages"] if m["role"] == "tool")
    assert "[(0, 10), (2, 4), (8, 9)] -> [(0, 10)]" in shown["raw_output"]
    assert edited["returncode"] == 1 and "AssertionError: not in the file" in edited["raw_output"]


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_shipped_report_agrees_with_the_tests_run_on_the_shipped_patches(run: str) -> None:
    verdicts = {case.name: judge(case, patch_of(shipped(run, case.name))) for case in CASES}
    assert run_report(verdicts) == report(run)


@needs_git
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_fix_is_right_and_the_wrong_one_is_not(case: Case) -> None:
    def patch(fix: Any) -> str:
        return behaviours.patch_command(case, fix).split("\n", 1)[1].removesuffix("EOF")

    assert judge(case, patch(case.right)) == "resolved"
    assert judge(case, patch(case.wrong)) == "unresolved"


@needs_git
def test_a_patch_that_does_not_apply_is_an_error_and_no_patch_is_empty() -> None:
    case = CASES[0]
    assert judge(case, "--- a/nowhere.py\n+++ b/nowhere.py\n@@ -1 +1 @@\n-x\n+y\n") == "error"
    assert judge(case, " \n") == "empty_patch"


def test_every_case_is_solved_by_some_runs_and_not_by_others() -> None:
    reports = [report(run) for run in RUNS]
    for case in CASES:
        assert sum(case.name in found["resolved_ids"] for found in reports) >= 2
        assert any(case.name in found["unresolved_ids"] for found in reports)


def test_all_runs_of_a_case_begin_with_the_same_messages_and_part_soon() -> None:
    for case in CASES:
        beginnings = {json.dumps(shipped(run, case.name)["messages"][:2]) for run in RUNS}
        assert len(beginnings) == 1
        assert case.issue in beginnings.pop().encode().decode("unicode_escape")
        firsts = {json.dumps(shipped(run, case.name)["messages"][2:4]) for run in RUNS}
        assert len(firsts) == len(RUNS)


def test_trajectories_have_the_shape_of_the_real_ones(shared_trajectories: Path) -> None:
    """Names and types of every field are among those of a real mini-swe-agent v2 file."""
    real = json.loads((shared_trajectories / "mini-swe-agent-v2" / "3.traj.json").read_text(encoding="utf-8"))
    real_kinds: dict[str, dict[str, set[type]]] = {}
    for message in real["messages"]:
        for name, value in message.items():
            real_kinds.setdefault(message["role"], {}).setdefault(name, set()).add(type(value))
    for run in RUNS:
        ours = shipped(run, "pagewise__pagewise-3")
        assert ours.keys() == real.keys() and real["info"].keys() <= ours["info"].keys()
        for message in ours["messages"]:
            for name, value in message.items():
                if name in ("reasoning_content", "provider_specific_fields") or message["role"] == "user":
                    continue
                assert type(value) in real_kinds[message["role"]][name], (message["role"], name)


def test_calls_actions_and_answers_belong_together() -> None:
    for run in RUNS:
        for case in CASES:
            waiting: list[str] = []
            for message in shipped(run, case.name)["messages"]:
                if message["role"] == "assistant":
                    assert not waiting
                    calls = message["tool_calls"]
                    waiting = [call["id"] for call in calls]
                    assert [json.loads(call["function"]["arguments"])["command"] for call in calls] == [
                        action["command"] for action in message["extra"]["actions"]
                    ]
                elif message["role"] == "tool":
                    assert message["tool_call_id"] == waiting.pop(0)
                    code, output = message["extra"]["returncode"], message["extra"]["raw_output"]
                    assert message["content"] == f"<returncode>{code}</returncode>\n<output>\n{output}</output>"
            assert len(waiting) <= 1  # the submitting call, which is answered by the end of the run


def test_some_actions_fail_and_are_mended_and_every_way_to_end_is_there() -> None:
    ends, recovered = set(), 0
    for run in RUNS:
        for case in CASES:
            file = shipped(run, case.name)
            ends.add(file["info"]["exit_status"])
            codes = [m["extra"]["returncode"] for m in file["messages"] if m["role"] == "tool"]
            recovered += any(first != 0 and second == 0 for first, second in pairwise(codes))
    assert ends == {"Submitted", "LimitsExceeded", "RepeatedFormatError", "InternalServerError"}
    assert recovered >= len(CASES)


def test_nothing_of_the_machine_it_was_made_on_is_left() -> None:
    for file in DATA.rglob("*.json"):
        text = file.read_text(encoding="utf-8")
        for trace in ("/tmp", "/home/", "/root", "/Users/", "site-packages", "0x55", "traceforge-"):
            assert trace not in text, (file.name, trace)


@needs_git
@pytest.mark.slow
def test_generating_all_of_it_again_changes_nothing(tmp_path: Path) -> None:
    made_with = shipped(RUNS[0], CASES[0].name)["info"]["config"]["environment"]["python"]
    if made_with != ".".join(map(str, sys.version_info[:2])):
        pytest.skip(f"tracebacks read differently in other Pythons; the shipped files were made with {made_with}")
    (tmp_path / "run-1" / "left-over").mkdir(parents=True)
    generate(tmp_path)
    files = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {path.relative_to(DATA): path.read_bytes() for path in DATA.rglob("*") if path.is_file()}
    assert not (tmp_path / "run-1" / "left-over").exists()
