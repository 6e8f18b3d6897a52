"""Every real file beside the checkout: how many messages of each role, actions, reasonings, and what was left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from traceforge_core.trajectories.coverage import check_corpus
from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.reading import read_unit
from traceforge_core.trajectories.survey import Unit

# file: its format, then one line a trajectory: case, system/user/assistant/tool messages, what is not zero of actions,
# turns with reasoning, turns not to be trained on, messages with a return code, outcome, and what was left out
GOLDEN: dict[str, list[str]] = {
    "atif/2.json": [
        "atif",
        "2 0/1/3/5 act=5 observation_title=5",
    ],
    "atif/3.json": [
        "atif",
        "3 1/11/1/5 ",
    ],
    "claude-code/10.jsonl": [
        "claude-code",
        "10 0/7/4/1 act=3 bookkeeping_event=2 line_that_is_no_event=3 turn_without_message=2",
    ],
    "claude-code/2.jsonl": [
        "claude-code",
        "2 0/2/10/13 act=13",
        "2 0/1/3/2 act=2",
        "2 0/1/7/6 act=6",
    ],
    "codex-rollout/4.jsonl": [
        "codex-rollout",
        "4 0/2/35/34 act=34 reason=32 code=34 encrypted_reasoning=1 interface_event=69",
    ],
    "codex-rollout/7.jsonl": [
        "codex-rollout",
        "7 1/1/3/2 act=2 reason=1 code=2 interface_event=4",
    ],
    "malformed/bom.traj.json": [
        "message-list",
        "bom 1/2/2/0 act=2 code=1 exit_message=1",
    ],
    "malformed/claude-torn-last-line.jsonl": [
        "claude-code",
        "claude-torn-last-line 0/2/6/12 act=12 unparsable_line=1",
    ],
    "mini-swe-agent-v1/2.traj.json": [
        "mini-swe-agent-v1",
        "scikit-learn__scikit-learn-25102 1/43/43/0 act=41 reason=1 untrained=2 code=40 trailing_patch=1",
    ],
    "mini-swe-agent-v2/3.traj.json": [
        "mini-swe-agent-v2",
        "sqlfluff__sqlfluff-1733 1/1/157/156 act=157 code=156 exit_message=1",
    ],
    "mini-swe-agent-v2/4.traj.json": [
        "mini-swe-agent-v2",
        "pylint-dev__astroid-1333 1/1/188/187 act=188 code=187 exit_message=1",
    ],
    "mini-swe-agent-v2-oldlist/1.traj.json": [
        "message-list",
        "1 1/10/10/0 act=10 code=9 trailing_patch=1",
    ],
    "nebius/1.sample_raw.json": [
        "nebius-swe-agent",
        "tomerfiliba__plumbum-366 1/6/6/0 act=6 outcome=resolved hidden_test_log=1",
        "tempoCollaboration__OQuPy-74 1/14/14/0 act=14 outcome=resolved hidden_test_log=1",
        "marshmallow-code__apispec-811 1/5/5/0 act=5 outcome=resolved hidden_test_log=1",
        "brightway-lca__brightway2-analyzer-19 1/8/8/0 act=8 outcome=resolved hidden_test_log=1",
        "ReviewNB__treon-25 1/16/16/0 act=16 outcome=resolved hidden_test_log=1",
    ],
    "openhands-completions/1.json": [
        "openhands-completions",
        "1 1/1/6/5 act=6",
    ],
    "openhands-events/1.json": [
        "openhands-v0",
        "1 0/1/2/1 act=2",
    ],
    "openhands-events/5.output.jsonl": [
        "openhands-output",
        "neubig__pr-viewer-5 0/1/4/3 act=4 code=2",
        "neubig__pr-viewer-1 0/1/22/21 act=22 code=1",
    ],
    "openhands-sdk-events/1.events.jsonl": [
        "openhands-sdk",
        "1 0/0/2/3 act=2 reason=2 code=1 bookkeeping_event=5",
    ],
    "sharegpt/1.json": [
        "sharegpt",
        "swe-play-0 1/0/21/20 act=21",
        "swe-play-1 1/0/22/21 act=22",
        "swe-play-2 1/0/32/31 act=32",
        "swe-play-3 1/0/21/20 act=21",
        "swe-play-4 1/0/32/31 act=31",
    ],
    "swe-agent/1.traj": [
        "swe-agent",
        "1 1/13/12/0 act=12",
    ],
    "swe-agent/3.traj": [
        "swe-agent",
        "3 1/1/13/12 act=13 trailing_patch=1",
    ],
    "swe-agent/4.traj": [
        "swe-agent",
        "4 1/5/5/0 act=5",
    ],
    "swe-agent/6.traj": [
        "swe-agent",
        "6 1/1/37/36 act=37 trailing_patch=1",
    ],
    "swe-gym/1.sample_raw.json": [
        "hf-rows",
        "python__mypy-15976 1/3/17/20 act=21 outcome=resolved hidden_test_log=1",
        "Project-MONAI__MONAI-5686 1/3/11/8 act=9 outcome=resolved hidden_test_log=1",
        "Project-MONAI__MONAI-6849 1/3/12/10 act=11 outcome=resolved hidden_test_log=1",
        "getmoto__moto-6387 1/2/18/16 act=17 outcome=resolved hidden_test_log=1",
        "Project-MONAI__MONAI-3715 1/2/30/28 act=29 outcome=resolved hidden_test_log=1",
    ],
    "swe-smith/1.jsonl": [
        "hf-rows",
        "pandas-dev__pandas.95280573.pr_53652 1/37/37/0 act=37",
        "getmoto__moto.694ce1f4.pr_7331 1/44/44/0 act=44",
        "pydantic__pydantic.acb0f10f.pr_8316 1/22/22/0 act=22",
    ],
}

# file: texts that must be in the trajectories, each with the role that says it
KEY_TEXTS: dict[str, list[tuple[str, str]]] = {
    "atif/2.json": [("assistant", "I'll create a comprehensive regex pattern"), ("tool", "EACCES: permission denied")],
    "claude-code/10.jsonl": [("user", "Testing special characters: café"), ("tool", "Error: Tool execution failed")],
    "claude-code/2.jsonl": [
        ("assistant", "I'll help you update the CLAUDE.md file"),
        ("tool", "Todos have been modified"),
    ],
    "codex-rollout/4.jsonl": [("assistant", "**Evaluating repo structure and planning**"), ("tool", "pnpm-lock.yaml")],
    "codex-rollout/7.jsonl": [
        ("assistant", "Inspecting the directory."),
        ("tool", "# Example Project\nA small demo repo."),
    ],
    "mini-swe-agent-v1/2.traj.json": [
        ("assistant", "**Analyzing dtype preservation**"),
        ("user", "<returncode>0</returncode>"),
    ],
    "mini-swe-agent-v2/3.traj.json": [("assistant", 'find . -type f -name "*.py" | grep -i "sqlfluff" | head -20')],
    "nebius/1.sample_raw.json": [("system", "SETTING: You are an autonomous programmer"), ("assistant", "submit")],
    "openhands-completions/1.json": [("assistant", "pwd && ls -la"), ("tool", "[Errno 2] No such file or directory")],
    "openhands-events/1.json": [
        ("user", "Please create a simple 2048 game."),
        ("assistant", "/workspace/game_2048.py"),
    ],
    "openhands-events/5.output.jsonl": [("assistant", "touch LICENSE"), ("tool", "MIT License has been added")],
    "openhands-sdk-events/1.events.jsonl": [("assistant", "Let me chain these properly with && and ;")],
    "sharegpt/1.json": [("assistant", "<function=str_replace_editor>"), ("tool", "EXECUTION RESULT of")],
    "swe-agent/1.traj": [
        ("user", "Here is a demonstration of how to correctly accomplish"),
        ("assistant", "create reproduce_bug.py"),
    ],
    "swe-agent/3.traj": [("assistant", "ls -F"), ("tool", "AUTHORS.rst\t    LICENSE\t RELEASING.md")],
    "swe-agent/6.traj": [("assistant", "Now let's submit our changes again:")],
    "swe-gym/1.sample_raw.json": [("tool", "The `view_range` parameter is not allowed")],
    "swe-smith/1.jsonl": [("assistant", "<function=submit>"), ("user", "OBSERVATION:\n/testbed/scripts/pandas_errors")],
}

# run and case: what is read of it, in the words of GOLDEN
SWEBENCH_RUNS: dict[tuple[str, str], str] = {
    (run, case): rest
    for run, case, rest in (
        line.split(" ", 2)
        for line in Path(__file__).with_name("golden_swebench_runs.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
}


def read(root: Path, name: str) -> list[Trajectory]:
    items = list(read_unit(root, Unit((name,))))
    assert all(isinstance(item, Trajectory) for item in items), items
    return items  # type: ignore[return-value]


def summarise(trajectory: Trajectory) -> str:
    roles = Counter(message.role for message in trajectory.messages)
    counts = "/".join(str(roles[role]) for role in ("system", "user", "assistant", "tool"))
    messages = trajectory.messages
    parts = {
        "act": sum(len(m.actions) for m in messages),
        "reason": sum(m.reasoning is not None for m in messages),
        "untrained": sum(not m.trainable for m in messages),
        "code": sum(m.returncode is not None for m in messages),
        "outcome": trajectory.outcome,
        **dict(sorted(trajectory.left_out.items())),
    }
    return f"{trajectory.case} {counts} " + " ".join(f"{key}={value}" for key, value in parts.items() if value)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_real_file_is_read_as_recorded(shared_trajectories: Path, name: str):
    trajectories = read(shared_trajectories, name)
    assert {trajectory.format for trajectory in trajectories} == {GOLDEN[name][0]}
    assert [summarise(trajectory) for trajectory in trajectories] == GOLDEN[name][1:]


@pytest.mark.parametrize("run", sorted({run for run, _ in SWEBENCH_RUNS}))
def test_a_real_benchmark_run_is_read_as_recorded(shared_trajectories: Path, run: str):
    recorded = {case: rest for (of, case), rest in SWEBENCH_RUNS.items() if of == run}
    found = {}
    for case in recorded:
        (trajectory,) = read(shared_trajectories, f"swebench-runs/{run}/{case}/{case}.traj.json")
        assert trajectory.format == "mini-swe-agent-v1"
        found[case] = summarise(trajectory).removeprefix(f"{case} ")
    assert found == recorded


@pytest.mark.parametrize("name", sorted(KEY_TEXTS))
def test_key_texts_are_said_by_whom_they_were_said(shared_trajectories: Path, name: str):
    said: dict[str, list[str]] = {}
    for trajectory in read(shared_trajectories, name):
        for message in trajectory.messages:
            said.setdefault(message.role, []).append(message.content)
            said[message.role].append(message.reasoning or "")
            said[message.role] += [str(v) for action in message.actions for v in action.arguments.values()]
    for role, text in KEY_TEXTS[name]:
        assert any(text in other for other in said[role]), (role, text)


def test_every_real_file_is_in_the_record(shared_trajectories: Path):
    skipped = ("SOURCES.md", "malformed/truncated.traj.json")
    there = {
        path.relative_to(shared_trajectories).as_posix()
        for path in shared_trajectories.rglob("*")
        if path.is_file() and "outcomes" not in path.parts and not path.name.endswith(".eval.json")
    }
    runs = {f"swebench-runs/{run}/{case}/{case}.traj.json" for run, case in SWEBENCH_RUNS}
    assert there - set(skipped) == set(GOLDEN) | runs


def test_no_text_of_a_real_file_is_lost_without_a_reason(shared_trajectories: Path):
    results = check_corpus(shared_trajectories)
    assert len(results) == 14
    for name, comparison in results.items():
        assert comparison.found > 0, name
        assert dict(comparison.unexplained) == {}, (name, comparison.examples)


def test_what_a_model_may_never_learn_is_not_there(shared_trajectories: Path):
    for name in ("nebius/1.sample_raw.json", "swe-gym/1.sample_raw.json"):
        for trajectory in read(shared_trajectories, name):
            assert trajectory.left_out["hidden_test_log"] == 1
            assert not any("Will execute following command for apply_patch" in m.content for m in trajectory.messages)
    (trajectory,) = read(shared_trajectories, "mini-swe-agent-v1/2.traj.json")
    assert not any(message.content.startswith("diff --git") for message in trajectory.messages)
