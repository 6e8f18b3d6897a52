"""ATIF, the Agent Trajectory Interchange Format (Harbor): `{schema_version, agent, steps}`.

Read leniently: real files leave the schema in several ways. Observations lie inside the agent's step. Steps that copy
earlier context, or that no model wrote, stay in the history but are never learnt from. Sub-agents become trajectories
of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import dump, text_of, tool_calls
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.model import Message, Trajectory

_TOOL_RESULT = re.compile(r"Tool result for (\S+)\s*\Z")


class Atif:
    """One ATIF document."""

    name = "atif"
    is_log = False

    def matches(self, value: Any) -> bool:
        if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
            return False
        first = value["steps"][0] if value["steps"] else None
        return "schema_version" in value or (isinstance(first, dict) and {"step_id", "source"} <= first.keys())

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        messages: list[Message] = []
        for step in value["steps"]:
            if not isinstance(step, dict):
                raise Unreadable("not_a_message", f"steps holds a {type(step).__name__}")
            messages += _messages(step, bool(messages), left_out)
        agent = value["agent"] if isinstance(value.get("agent"), dict) else {}
        model = agent.get("model_name") or agent.get("model")
        yield Trajectory(
            "",
            "",
            "",
            self.name,
            "",
            messages,
            tools=[tool for tool in agent.get("tool_definitions") or [] if isinstance(tool, dict)],
            model=model if isinstance(model, str) else None,
            left_out={key: count for key, count in left_out.items() if count},
        )
        for number, inner in enumerate(value.get("subagent_trajectories") or [], 1):
            if self.matches(inner):
                for trajectory in self.read(inner):
                    trajectory.run = f"subagent-{number}" + (f"-{trajectory.run}" if trajectory.run else "")
                    yield trajectory


def _messages(step: dict[str, Any], begun: bool, left_out: Counter[str]) -> list[Message]:
    source = step.get("source")
    text = text_of(step.get("message"), left_out)
    if source == "agent":
        message = Message("assistant", text)
        reasoning = step.get("reasoning_content")
        message.reasoning = reasoning if isinstance(reasoning, str) and reasoning.strip() else None
        message.actions = tool_calls(step.get("tool_calls"))
        message.trainable = not step.get("is_copied_context") and step.get("llm_call_count") != 0
        return [message, *_observations(step.get("observation"), None, left_out)]
    if source not in ("system", "user"):
        raise Unreadable("unknown_role", f"a step's source is {source!r}")
    if "observation" in step:  # not as the schema has it, but real: the answer as a step of the system
        found = _TOOL_RESULT.match(text)
        answers = _observations(step["observation"], found.group(1) if found else None, left_out)
        left_out["observation_title"] += found is not None
        return answers if found or not text else [Message("user", text), *answers]
    # Templates take a system prompt only at the start; what the environment says later is told by the user's voice.
    return [Message("system" if source == "system" and not begun else "user", text)]


def _observations(raw: Any, call_id: str | None, left_out: Counter[str]) -> list[Message]:
    if raw is None:
        return []
    results = raw.get("results") if isinstance(raw, dict) else raw
    if not isinstance(results, list):
        results = [raw]
    answers = []
    for result in results:
        body = result.get("content") if isinstance(result, dict) else result
        if isinstance(body, dict) and "text" not in body:
            body = dump(body)
        message = Message("tool", text_of(body, left_out), call_id=call_id)
        if isinstance(result, dict) and isinstance(result.get("source_call_id"), str):
            message.call_id = result["source_call_id"]
        answers.append(message)
    return answers
