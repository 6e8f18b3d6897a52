"""Small trajectories in the formats that tests need again and again, and the reports that lie beside them."""

from __future__ import annotations

import json
from typing import Any

FLAT = {"resolved": True, "patch_successfully_applied": True, "tests_status": {}}
"""A per-instance report of SWE-bench, without the instance's name."""


def report(resolved: list[str] = (), unresolved: list[str] = (), **more: list[str]) -> dict[str, Any]:  # type: ignore[assignment]
    """A run report of SWE-bench."""
    return {"total_instances": 2, "resolved_ids": list(resolved), "unresolved_ids": list(unresolved), **more}


def mini_v2(case: str = "a__b-1", *, turns: int = 2, exit_status: str = "Submitted", note: str = "") -> dict[str, Any]:
    """A mini-swe-agent v2 file with tool calls."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": f"Fix {case}."},
    ]
    for turn in range(turns):
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": f"ls {turn} {note}"})},
        }
        messages.append(
            {
                "role": "assistant",
                "content": f"Step {turn}.",
                "tool_calls": [call],
                "function_call": None,
                "extra": {"actions": [{"command": f"ls {turn} {note}", "tool_call_id": f"call_{turn}"}]},
            }
        )
        messages.append(
            {
                "role": "tool",
                "content": f"<returncode>{turn}</returncode>\n<output>\nfile</output>",
                "tool_call_id": f"call_{turn}",
                "extra": {"raw_output": "file", "returncode": turn},
            }
        )
    messages.append({"role": "exit", "content": "diff", "extra": {"exit_status": exit_status, "submission": "diff"}})
    return {
        "info": {"exit_status": exit_status, "submission": "diff", "config": {"model": {"model_name": "m/x"}}},
        "messages": messages,
        "trajectory_format": "mini-swe-agent-1.1",
        "instance_id": case,
    }


def mini_v1(case: str = "a__b-1", *, patch: str = "diff --git a b", note: str = "") -> dict[str, Any]:
    """A mini-swe-agent v1 file: commands in fenced blocks, the patch as the last user message."""
    return {
        "info": {
            "exit_status": "Submitted",
            "submission": patch,
            "config": {"agent": {"action_regex": r"```bash\s*\n(.*?)\n```"}, "model": {"model_name": "m/x"}},
        },
        "messages": [
            {"role": "system", "content": "You fix bugs."},
            {"role": "user", "content": f"Fix {case}."},
            {"role": "assistant", "content": f"THOUGHT: look {note}\n\n```bash\nls\n```"},
            {"role": "user", "content": "<returncode>1</returncode>\n<output>\nno</output>"},
            {"role": "assistant", "content": "No command here."},
            {
                "role": "user",
                "content": "Please always provide EXACTLY ONE action in triple backticks, found 0 actions.",
            },
            {"role": "assistant", "content": "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"},
            {"role": "user", "content": patch},
        ],
        "trajectory_format": "mini-swe-agent-1",
        "instance_id": case,
    }


def chat_row(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """One row with chat messages."""
    return {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"re: {text}"}],
        **fields,
    }
