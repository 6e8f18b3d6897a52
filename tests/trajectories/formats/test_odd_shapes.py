"""Shapes that real files have and that the other tests of a format do not show: one small file each, through ingest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trajectories.make import mini_v1, mini_v2
from traceforge_core.trajectories.model import Message

Write = Callable[[str, Any], Path]
Ingest = Callable[..., Any]


def call(name: str = "bash", arguments: Any = '{"command": "ls"}', number: str = "c1") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def claude(kind: str, uuid: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, **({"id": f"m-{uuid}"} if kind == "assistant" else {})}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def short(message: Message) -> tuple[Any, ...]:
    """Role, text, reasoning and calls; the last two only where there are any."""
    calls = [(action.name, action.arguments) for action in message.actions]
    return (message.role, message.content, *filter(None, [message.reasoning, calls]))


GO = {"role": "user", "content": "go"}
LS = [("bash", {"command": "ls"})]
SHAPES: dict[str, tuple[Any, str, list[tuple[Any, ...]]]] = {
    # name of the file: what it holds, the format it is read as, the messages
    "mini/no-instance-id.traj.json": (
        {key: value for key, value in mini_v2(turns=0).items() if key != "instance_id"},
        "mini-swe-agent-v2",
        [("system", "You fix bugs."), ("user", "Fix a__b-1.")],
    ),
    "mini/thinking-blocks.traj.json": (
        {
            **mini_v2(),
            "messages": [
                GO,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [call()],
                    "function_call": None,
                    "thinking_blocks": [{"type": "thinking", "thinking": "Why not.", "signature": "xx"}],
                },
                {
                    "role": "tool",
                    "tool_call_id": "c1",
                    "content": [{"type": "text", "text": "a\r\n\x1b[1mb\x1b[0m NaN"}],
                },
            ],
        },
        "mini-swe-agent-v2",
        [("user", "go"), ("assistant", "", "Why not.", LS), ("tool", "a\r\n\x1b[1mb\x1b[0m NaN")],
    ),
    "mini/interrupted-by-a-person.traj.json": (
        {
            **mini_v2(),
            "messages": [
                GO,
                GO,
                {"role": "assistant", "content": "", "tool_calls": [call()]},
                {"role": "user", "content": "Stop that."},
                {"role": "assistant", "content": "Stopped."},
            ],
        },
        "mini-swe-agent-v2",
        [
            ("user", "go"),
            ("user", "go"),
            ("assistant", "", LS),
            ("user", "Stop that."),
            ("assistant", "Stopped."),
        ],
    ),
    "mini/v1-ends-with-the-model.traj.json": (
        {**mini_v1(), "messages": [GO, {"role": "assistant", "content": "```bash\nls\n```"}]},
        "mini-swe-agent-v1",
        [("user", "go"), ("assistant", "```bash\nls\n```", LS)],
    ),
    "mini/v1-that-writes-python.traj.json": (
        {
            **mini_v1(),
            "messages": [
                GO,
                {"role": "assistant", "content": "```python\nprint(1)\n```"},
                {"role": "user", "content": "1"},
            ],
        },
        "mini-swe-agent-v1",
        [("user", "go"), ("assistant", "```python\nprint(1)\n```"), ("user", "1")],
    ),
    "swe-agent/0.x.traj": (
        {
            "environment": "swe_main",
            "trajectory": [
                {
                    "action": "ls\n",
                    "observation": "x.py",
                    "response": "Look.\n```\nls\n```",
                    "state": '{"open_file": "n/a", "working_dir": "/x"}',
                    "thought": "Look.",
                    "messages": [
                        {"role": "user", "content": "go"},
                        {"role": "assistant", "content": "Look.\n```\nls\n```"},
                    ],
                }
            ],
            "history": [
                {"role": "user", "content": "go", "agent": "primary"},
                {"role": "assistant", "content": "Look.\n```\nls\n```", "thought": "Look.", "action": "ls\n"},
                {"role": "user", "content": "x.py", "agent": "primary"},
            ],
            "info": {"exit_status": None, "model_stats": {"instance_cost": 1.0}},
            "replay_config": json.dumps({"agent": {"model": {"name": "m/x"}}}),
        },
        "swe-agent",
        [("user", "go"), ("assistant", "Look.\n```\nls\n```", LS), ("user", "x.py")],
    ),
    "swe-agent/1.x.traj": (
        {
            "trajectory": [{"action": "ls", "observation": "x.py", "response": "Look.", "state": {"open_file": ""}}],
            "history": [
                {"role": "user", "content": [{"type": "text", "text": "go"}], "message_type": "observation"},
                {
                    "role": "assistant",
                    "content": "Look.",
                    "thought": "Look.",
                    "action": "ls",
                    "tool_calls": [call(arguments='{"command": "ls"}')],
                    "thinking_blocks": [{"type": "thinking", "thinking": "Deep."}],
                },
                {
                    "role": "tool",
                    "content": [{"type": "text", "text": "x.py", "cache_control": {"type": "ephemeral"}}],
                    "tool_call_ids": ["c1"],
                    "cache_control": {"type": "ephemeral"},
                },
            ],
            "info": {"exit_status": "exit_context", "swe_agent_version": "1.0.1", "edited_files30": ""},
        },
        "swe-agent",
        [("user", "go"), ("assistant", "Look.", "Deep.", LS), ("tool", "x.py")],
    ),
    "openhands/thought-without-response.json": (
        [
            {"id": 0, "source": "user", "action": "message", "args": {"content": "go"}},
            {"id": 3, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "Look."}},
            {"id": 4, "source": "agent", "observation": "null", "content": "", "extras": {}},
            {"id": 5, "source": "agent", "observation": "run", "content": "x.py", "cause": 3, "extras": {}},
        ],
        "openhands-v0",
        [("user", "go"), ("assistant", "Look.", [("run", {"command": "ls"})]), ("tool", "x.py")],
    ),
    "openhands/sdk.jsonl": (
        [
            {"kind": "SystemPromptEvent", "id": "0", "source": "agent", "system_prompt": {"type": "text", "text": "S"}},
            {
                "kind": "ActionEvent",
                "id": "1",
                "source": "agent",
                "thought": [],
                "responses_reasoning_item": {"type": "reasoning", "summary": ["Sum."], "encrypted_content": None},
                "tool_name": "terminal",
                "tool_call_id": "c1",
                "action": {"command": "ls", "kind": "TerminalAction"},
                "llm_response_id": "r",
            },
            {
                "kind": "ObservationEvent",
                "id": "2",
                "source": "environment",
                "tool_call_id": "c1",
                "observation": {"content": [{"type": "text", "text": "x.py"}], "is_error": False},
            },
        ],
        "openhands-sdk",
        [
            ("system", "S"),
            ("assistant", "", "Sum.", [("terminal", {"command": "ls", "kind": "TerminalAction"})]),
            ("tool", "x.py"),
        ],
    ),
    "openhands/completion-of-a-model-without-calls.json": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "go"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "<function=bash>\n<parameter=command>ls</parameter>"}],
                },
                {"role": "user", "content": [{"type": "text", "text": "EXECUTION RESULT of [bash]:\nx.py"}]},
            ],
            "raw_messages": [GO],
            "response": {"model": "m", "choices": [{"message": {"role": "assistant", "content": "Done."}}]},
            "kwargs": {},
            "cost": 0.1,
        },
        "openhands-completions",
        [
            ("user", "go"),
            ("assistant", "<function=bash>\n<parameter=command>ls</parameter>", LS),
            ("user", "EXECUTION RESULT of [bash]:\nx.py"),
            ("assistant", "Done."),
        ],
    ),
    "rows/swe-rebench-openhands.json": (
        {
            "trajectory_id": "t",
            "instance_id": "a__b-1",
            "repo": "a/b",
            "trajectory": [
                GO,
                {"role": "assistant", "content": None, "tool_calls": [call(arguments={"command": "ls"})]},
                {"role": "tool", "content": "x.py", "tool_call_id": "c1", "name": "bash"},
                {"role": "assistant", "content": "x", "tool_calls": [call("finish", None, "c2")]},
            ],
            "tools": [],
            "exit_status": "submit",
            "resolved": 1,
            "gen_tests_correct": 0.5,
        },
        "hf-rows",
        [("user", "go"), ("assistant", "", LS), ("tool", "x.py"), ("assistant", "x", [("finish", {})])],
    ),
    "rows/roles-of-others.json": (
        {
            "messages": [
                {"role": "developer", "content": "S"},
                GO,
                {
                    "role": "assistant",
                    "content": "",
                    "function_call": {"name": "bash", "arguments": '{"command": "ls"}'},
                },
                {"role": "function", "name": "bash", "content": "x.py"},
                {"role": "assistant", "content": "ok", "reasoning": "Why."},
            ]
        },
        "openai-chat",
        [("system", "S"), ("user", "go"), ("assistant", "", LS), ("tool", "x.py"), ("assistant", "ok", "Why.")],
    ),
    "rows/sharegpt.json": (
        {
            "conversations": [
                {"from": "human", "value": "go"},
                {"from": "gpt", "value": "<think>\nWhy.\n</think>\n\nok"},
                {"from": "tool", "value": "x"},
                {
                    "from": "function_call",
                    "value": "Look.\n<function=bash>\n<parameter=command>ls</parameter>\n</function>",
                },
                {"from": "ipython", "value": "y"},
            ]
        },
        "sharegpt",
        [
            ("user", "go"),
            ("assistant", "ok", "Why."),
            ("tool", "x"),
            ("assistant", "Look.\n<function=bash>\n<parameter=command>ls</parameter>\n</function>", LS),
            ("tool", "y"),
        ],
    ),
    "claude/agent-1.jsonl": (
        [
            claude("user", "1", None, "go", isSidechain=True, agentId="1"),
            claude(
                "assistant",
                "2",
                "1",
                [
                    {"type": "redacted_thinking", "data": "xx"},
                    {"type": "thinking", "thinking": "Why.", "signature": "xx"},
                    {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}},
                ],
                isSidechain=True,
                agentId="1",
                requestId=None,
            ),
            claude(
                "user",
                "3",
                "2",
                [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x.py"}]}],
                isSidechain=True,
                agentId="1",
                toolUseResult="Error: no",
            ),
            {"type": "summary", "summary": "S", "leafUuid": "3"},
        ],
        "claude-code",
        [("user", "go"), ("assistant", "", "Why.", [("Bash", {"command": "ls"})]), ("tool", "x.py")],
    ),
    "codex/rollout.jsonl": (
        [
            {"timestamp": "t", "type": "session_meta", "payload": {"id": "x", "cwd": "/", "instructions": None}},
            *(
                {"timestamp": "t", "type": "response_item", "payload": item}
                for item in (
                    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "S"}]},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
                    {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
                    {"type": "local_shell_call_output", "call_id": "c", "output": "x.py"},
                )
            ),
            {"timestamp": "t", "type": "event_msg", "payload": {"type": "turn_aborted", "reason": "interrupted"}},
        ],
        "codex-rollout",
        [
            ("system", "S"),
            ("user", "go"),
            ("assistant", "", [("local_shell", {"type": "exec", "command": ["ls"]})]),
            ("tool", "x.py"),
        ],
    ),
    "atif/1.4.json": (
        {
            "schema_version": "1.4",
            "agent": {"name": "a", "model": "m/x"},
            "steps": [
                {"step_id": 1, "timestamp": "[redacted]", "source": "user", "message": "go"},
                {
                    "step_id": 2,
                    "source": "agent",
                    "message": "",
                    "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
                    "observation": {"content": "x.py"},
                },
                {"step_id": 3, "source": "agent", "message": "m", "observation": {"results": [{"content": {"a": 1}}]}},
                {"step_id": 4, "source": "agent", "message": "n", "observation": {"results": [{"content": None}]}},
            ],
        },
        "atif",
        [
            ("user", "go"),
            ("assistant", "", LS),
            ("tool", "x.py"),
            ("assistant", "m"),
            ("tool", '{"a":1}'),
            ("assistant", "n"),
            ("tool", ""),
        ],
    ),
}
CASES = {"mini/no-instance-id.traj.json": "no-instance-id", "rows/swe-rebench-openhands.json": "a__b-1"}
MODELS = {"swe-agent/0.x.traj": "m/x", "atif/1.4.json": "m/x", "mini/no-instance-id.traj.json": "m/x"}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_shape_seen_in_the_wild_is_read_whole(name: str, write: Write, run_ingest: Ingest) -> None:
    content, form, messages = SHAPES[name]
    if name.endswith(".jsonl"):
        content = "".join(json.dumps(line) + "\n" for line in content)
    (trajectory,) = run_ingest(write(name, content)).trajectories
    assert trajectory.format == form
    assert trajectory.case == CASES.get(name, trajectory.case) and trajectory.model == MODELS.get(
        name, trajectory.model
    )
    assert [short(message) for message in trajectory.messages] == messages
