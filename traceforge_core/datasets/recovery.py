"""Recoveries: a turn whose action failed, and the turn soon after it that tried the same and worked.

    recoveries(trajectory.messages, within=3)      # [(failed, worked), ...], positions of assistant turns

The rule. A turn failed if an observation behind it, up to the next turn, states a return code other than 0. A turn
worked if return codes are stated and all are 0. A failed turn is paired with the first of the next `within` turns that
worked and is the same kind of attempt: it calls the same tool with a command in common (the programs of a shell
command, without `cd`, `echo` and the like; the sub-command of an editor), and is not the very same call (running
the same test again after a repair says nothing about the call). The pair puts the later turn in the place of the failed
one, after the same history; close turns keep that history true for both.

What the later turn knows of the failure must not be in it, since its prompt ends before the failure
(`refers_to_unseen`): a model that learns from it would learn to make up a past.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from traceforge_core.datasets.sample import is_learnable
from traceforge_core.trajectories.model import Action, Message

STATED_CODES = (
    re.compile(r"\A\s*<returncode>(-?\d+)</returncode>"),  # mini-swe-agent
    re.compile(r"\[The command completed with exit code (-?\d+)\.?\]"),  # OpenHands V1
    re.compile(r"\[Command finished with exit code (-?\d+)\]"),  # OpenHands V0
    re.compile(r"\AExit code:? (-?\d+)"),  # Claude Code, Codex
    re.compile(r"\(exit code:? (-?\d+)\)\s*\Z"),
)
ASIDES = frozenset({"cd", "echo", "export", "source", ".", "sleep", "set", "pwd", "true", "fi", "done", "[", "test"})
"""Commands that say nothing about what is attempted."""
PREFIXES = frozenset({"sudo", "time", "env", "then", "do", "else", "if", "!"})
"""Words in front of the command that is meant."""

SPEAKS_OF_BEFORE = re.compile(
    r"""\b(?:
        (?:last|prior|preceding|failed)\s+(?:\w+\s+){0,2}
            (?:command|call|attempt|try|tries|approach|edit|change|patch|run|script|replacement|sed|step|output|result
              |error|failure|check|search|one)s?
      | first\s+(?:attempt|try|approach|command|edit|one)
      | earlier | previous(?:ly)? | this\s+time | again | still | once\s+more | re-?run\w* | retry\w* | instead
      | revert\w* | simplify | more\s+(?:broadly|carefully|closely)
      | fix(?:ed|ing)?\s+(?:the|my)\s+(?:script|command|quoting|escaping|syntax|indentation|path)
      | correct\s+(?:API|path|syntax|command|way) | (?:syntax|indentation|import|quoting|runtime|attribute)\s?errors?
      | (?:it|that|this|which|command|call|edit|attempt|script|sed|patch|check)\s+(?:has\s+|just\s+)?
            (?:failed|errored|broke|timed\s+out)
      | (?:didn['’]t|did\s+not)\s+(?:work|run|apply|match|take|succeed|exist|find) | doesn['’]t\s+exist
      | (?:another|different|alternative|simpler)\s+(?:way|approach|method|route|angle|command)
      | sorry | apologi[sz]e | oops | my\s+mistake
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words of a turn that looks back at an attempt of its own."""
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"""\b([A-Za-z_]\w*(?:[_.\d]|(?<=[a-z])[A-Z])\w+)\b|['"`‘“]([\w./-]{3,})['"`’”]""")


def recoveries(messages: Sequence[Message], within: int) -> list[tuple[int, int]]:
    """Pairs of positions (failed turn, turn that worked), in order of the failed turn."""
    turns, verdicts = turn_verdicts(messages)
    found = []
    for k, failed in enumerate(turns):
        if verdicts[k] is not False or not is_learnable(messages[failed]):
            continue
        for later, worked in zip(turns[k + 1 : k + 1 + within], verdicts[k + 1 : k + 1 + within], strict=True):
            if worked and is_learnable(messages[later]) and _same_attempt(messages[failed], messages[later]):
                found.append((failed, later))
                break
    return found


def refers_to_unseen(messages: Sequence[Message], failed: int, worked: int) -> bool:
    """Whether the turn that worked refers to what lies between the failed turn and itself, which its prompt lacks.

    Either its own words (reasoning and text) speak of an attempt before it (`SPEAKS_OF_BEFORE`, English), or it has a
    name, in its words or its calls, that the messages between have and neither the prompt nor the failed turn has. A
    name is a word with a digit, an underscore, a dot or a capital inside, or one that stands in quotes there.
    """
    own = messages[worked]
    if SPEAKS_OF_BEFORE.search(FENCED.sub("", f"{own.reasoning or ''}\n{own.content}")):
        return True
    between = "\n".join(_everything_in(message) for message in messages[failed + 1 : worked])
    said = _everything_in(own)
    names = {name for groups in NAME.findall(between) for name in groups if name and name in said}
    if not names:
        return False
    shown = "\n".join(_everything_in(message) for message in messages[: failed + 1])
    return any(name not in shown for name in names)


def turn_verdicts(messages: Sequence[Message]) -> tuple[list[int], list[bool | None]]:
    """Positions of the assistant turns, and of each whether it worked, failed (False), or nothing says so (None)."""
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    ends = [*turns[1:], None]
    return turns, [_verdict(messages, turn, end) for turn, end in zip(turns, ends, strict=False)]


def stated_returncode(message: Message) -> int | None:
    """The return code of an observation: its own, or the one that its text states in a known form."""
    if message.returncode is not None:
        return message.returncode
    for pattern in STATED_CODES:
        match = pattern.search(message.content)
        if match:
            return int(match.group(1))
    return None


def _verdict(messages: Sequence[Message], turn: int, following: int | None) -> bool | None:
    """True: worked, False: failed, None: nothing says so."""
    codes = [stated_returncode(message) for message in messages[turn + 1 : following]]
    stated = [code for code in codes if code is not None]
    return all(code == 0 for code in stated) if stated else None


def _everything_in(message: Message) -> str:
    values = (str(value) for action in message.actions for value in action.arguments.values())
    return "\n".join((message.reasoning or "", message.content, *values))


def _same_attempt(failed: Message, later: Message) -> bool:
    calls, later_calls = ([(action.name, action.arguments) for action in m.actions] for m in (failed, later))
    if calls == later_calls:
        return False
    kinds = {kind for action in failed.actions for kind in _kinds(action)}
    return any(kind in kinds for action in later.actions for kind in _kinds(action))


def _kinds(action: Action) -> Iterator[tuple[str, str]]:
    command = action.arguments.get("command")
    if not isinstance(command, str):
        yield action.name, ""
        return
    for program in _programs(command):
        yield action.name, program


def _programs(command: str) -> list[str]:
    """The programs that a shell command runs; what stands in here-documents and in quotes is not looked into."""
    shown = command.partition("<<")[0]
    shown = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "''", shown, flags=re.DOTALL)
    programs = []
    for segment in re.split(r"&&|\|\||[;|\n&]", shown):
        words = [word for word in segment.split() if not re.match(r"\A\w+=", word)]
        while words and words[0] in PREFIXES:
            words = words[1:]
        if words and words[0] not in ASIDES:
            programs.append(words[0].rpartition("/")[2])
    return programs
