"""Claude Code sessions: JSON Lines that form a tree by `parentUuid`, or a web export `{loglines: [...]}`.

One API turn is written as several lines with the same `message.id`, one block each; they are one assistant turn. Each
sidechain (sub-agent) is a trajectory of its own, so is each branch that a user's second try opens, and what follows a
compaction. What a branch shares with the one before it is history there, not to be learnt twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import arguments_of, dump, text_of
from traceforge_core.trajectories.model import Action, Message, Trajectory


class ClaudeCode:
    """The lines of one session file."""

    name = "claude-code"
    is_log = True

    def matches(self, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        if len(value) == 1 and isinstance(value[0], dict) and isinstance(value[0].get("loglines"), list):
            value = value[0]["loglines"]
        return any(_is_turn(line) for line in value[:50])

    def read(self, value: Any) -> Iterator[Trajectory]:
        if len(value) == 1 and "loglines" in value[0]:
            value = value[0]["loglines"]
        skipped: Counter[str] = Counter()
        lines = []
        for line in value:
            if _is_turn(line):
                lines.append(line)
            elif not isinstance(line, dict):
                skipped["line_that_is_no_event"] += 1
            elif line.get("type") in ("user", "assistant"):
                skipped["turn_without_message"] += 1
            else:
                skipped["bookkeeping_event"] += 1
        _skip_over_the_rest(lines, value)
        for number, (name, copied, own) in enumerate(_conversations(lines)):
            left_out = skipped if number == 0 else Counter()
            trajectory = Trajectory("", "", name, self.name, "", _messages(copied, left_out))
            for message in trajectory.messages:
                message.trainable = message.role != "assistant"
            trajectory.messages += _messages(own, left_out)
            trajectory.model = next((m for line in own if (m := line["message"].get("model")) and _is_real(line)), None)
            trajectory.left_out = dict(left_out)
            yield trajectory


_Lines = list[dict[str, Any]]


def _skip_over_the_rest(lines: _Lines, everything: list[Any]) -> None:
    """Give a line whose parent is no turn (a system note, an attachment) the nearest turn above it for a parent."""
    kept = {line.get("uuid") for line in lines}
    above = {line["uuid"]: line.get("parentUuid") for line in everything if isinstance(line, dict) and "uuid" in line}
    for position, line in enumerate(lines):
        parent, steps = line.get("parentUuid"), 0
        while isinstance(parent, str) and parent not in kept and parent in above and steps < len(everything):
            parent, steps = above[parent], steps + 1
        if parent != line.get("parentUuid"):
            lines[position] = {**line, "parentUuid": parent}


def _conversations(lines: _Lines) -> Iterator[tuple[str, _Lines, _Lines]]:
    """(name, lines shared with an earlier branch, own lines) of each conversation; the main one first, without a
    name."""
    parents = {line["uuid"]: line.get("parentUuid") for line in lines if isinstance(line.get("uuid"), str)}
    chains: dict[str, _Lines] = {}
    roots: dict[str, str] = {}
    part = ""
    for line in lines:
        if line.get("isSidechain"):
            chains.setdefault(_sidechain(line, parents, roots), []).append(line)
            continue
        if line.get("isCompactSummary") and chains.get(part):
            part = f"part-{len([name for name in chains if name.startswith('part-')]) + 1}"
        chains.setdefault(part, []).append(line)
    for name in sorted(chains, key=lambda key: key != ""):
        for number, (copied, own) in enumerate(_branches(chains[name])):
            branch = f"branch-{number}" if number else ""
            yield "-".join(filter(None, (name, branch))), copied, own


def _sidechain(line: dict[str, Any], parents: dict[str, Any], roots: dict[str, str]) -> str:
    """The name of the sidechain that a line belongs to: its agent's id, else the number of its root."""
    if isinstance(line.get("agentId"), str):
        return f"agent-{line['agentId']}"
    uuid, seen = str(line.get("uuid")), set()
    while parents.get(uuid) in parents and uuid not in seen:
        seen.add(uuid)
        uuid = str(parents[uuid])
    return roots.setdefault(uuid, f"sidechain-{len(roots) + 1}")


def _branches(lines: _Lines) -> Iterator[tuple[_Lines, _Lines]]:
    """Split a conversation where the user went back and tried again: (lines before the fork, own lines) of each
    branch."""
    branch_of: dict[Any, int] = {}
    position: dict[Any, int] = {}
    forks: list[tuple[int, int]] = [(-1, 0)]  # the branch that each one leaves, and the position where it does
    answered: dict[Any, int] = {}  # where a line is first followed by another
    members: list[_Lines] = [[]]
    for index, line in enumerate(lines):
        parent = line.get("parentUuid")
        branch = branch_of.get(parent, len(members) - 1 if parent is None else 0)
        if _is_prompt(line) and parent in answered:
            forks.append((branch, answered[parent]))
            members.append([])
            branch = len(members) - 1
        if parent is not None:
            answered.setdefault(parent, index)
        uuid = line.get("uuid")
        branch_of[uuid], position[id(line)] = branch, index
        members[branch].append(line)
    for (left, cut), own in zip(forks, members, strict=True):
        copied: _Lines = []
        while left >= 0:
            copied = [line for line in members[left] if position[id(line)] < cut] + copied
            left, cut = forks[left][0], min(cut, forks[left][1])
        yield copied, own


def _messages(lines: _Lines, left_out: Counter[str]) -> list[Message]:
    messages: list[Message] = []
    turns: dict[str, Message] = {}
    for line in lines:
        raw = line["message"]
        content = raw.get("content")
        if raw.get("role") == "assistant" or line["type"] == "assistant":
            if not _is_real(line):
                left_out["synthetic_turn"] += 1
                continue
            key = raw.get("id")
            turn = turns.get(key) if isinstance(key, str) else None
            if turn is None:
                turn = Message("assistant", "")
                messages.append(turn)
                if isinstance(key, str):
                    turns[key] = turn
            for block in content if isinstance(content, list) else [content]:
                _add_block(turn, block, left_out)
        else:
            messages += _user_messages(content, left_out)
    return messages


def _add_block(turn: Message, block: Any, left_out: Counter[str]) -> None:
    """Add one block to its turn. A block that was written before, in part or whole, replaces its earlier copy."""
    kind = block.get("type") if isinstance(block, dict) else "text"
    if kind == "tool_use":
        action = Action(str(block.get("name") or ""), arguments_of(block.get("input")), block.get("id"))
        if action.call_id is not None:
            turn.actions = [other for other in turn.actions if other.call_id != action.call_id]
        turn.actions.append(action)
    elif kind == "thinking":
        turn.reasoning = _joined(turn.reasoning or "", text_of(block.get("thinking"), left_out)) or None
    elif kind == "redacted_thinking":
        left_out["encrypted_reasoning"] += 1
    else:
        turn.content = _joined(turn.content, text_of(block if isinstance(block, str) else [block], left_out))


def _joined(before: str, text: str) -> str:
    if not text or before == text or before.endswith("\n\n" + text):
        return before
    if before and text.startswith(before):
        return text
    return f"{before}\n\n{text}" if before else text


def _user_messages(content: Any, left_out: Counter[str]) -> list[Message]:
    """A user line holds tool results, or text, or both: one message a result, one for all the text."""
    if not isinstance(content, list):
        return [Message("user", text_of(content, left_out))]
    messages, texts = [], []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "tool_result":
            body = part.get("content")
            text = dump(body) if isinstance(body, dict) else text_of(body, left_out)
            messages.append(Message("tool", text, call_id=part.get("tool_use_id")))
        else:
            texts.append(part)
    if texts:
        messages.append(Message("user", text_of(texts, left_out)))
    return messages


def _is_turn(line: Any) -> bool:
    return (
        isinstance(line, dict)
        and line.get("type") in ("user", "assistant")
        and isinstance(line.get("message"), dict)
        and "content" in line["message"]
        and ("uuid" in line or "sessionId" in line or "timestamp" in line or "id" in line["message"])
    )


def _is_prompt(line: dict[str, Any]) -> bool:
    """Whether a person typed this line."""
    content = line["message"].get("content")
    if line["type"] != "user" or line.get("isMeta") or line.get("isCompactSummary"):
        return False
    return isinstance(content, str) or (
        isinstance(content, list)
        and not any(isinstance(part, dict) and part.get("type") == "tool_result" for part in content)
    )


def _is_real(line: dict[str, Any]) -> bool:
    """False for turns that the program writes in the model's name when the API fails."""
    return line["message"].get("model") != "<synthetic>" and not line.get("isApiErrorMessage")
