"""The loop of the scripted debug agent: one behaviour on one case gives one mini-swe-agent v2 trajectory.

The loop is real: commands run in a Workbench, their output becomes the observations, a turn without a command becomes a
format error, steps are limited, and the run ends when a command prints the submission marker. Ids, times and costs are
worked out from case and run, so that the same input gives the same file. `extra.response`, a second copy of every
answer in the original's files, is left out: it would double their size.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

from traceforge_core.samples.behaviours import Behaviour, ModelUnavailable, Turn, Voice
from traceforge_core.samples.cases import Case
from traceforge_core.samples.workbench import HOME, TIMEOUT, Observation, Workbench

MODEL = "scripted/debug-agent"
STEP_LIMIT = 10
FORMAT_ERROR_LIMIT = 3
MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIRST_TIMESTAMP = 1736154000.0

SYSTEM_TEMPLATE = "You are a careful programmer who mends bugs with the help of a shell."
INSTANCE_TEMPLATE = """Please mend the bug that this issue describes:

<issue>
{{task}}
</issue>

The program lies in the current folder, /testbed. Change its source files, not its tests. Every answer must call the
bash tool at least once; each command runs in a new shell in /testbed.

When you are done, write your change to patch.txt with `git diff -- FILES > patch.txt`, look at it, and then submit it
with a command of its own: `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt`. That ends your work."""
FORMAT_ERROR_TEMPLATE = """Your answer could not be used: {{error}}

Call the bash tool in every answer, with the argument {"command": "..."}. The first message says how to submit."""


def run_agent(case: Case, behaviour: Behaviour, run: str) -> dict[str, Any]:
    """The whole trajectory file of one run on one case, as plain data."""
    with Workbench(case.program) as bench:
        return _Session(case, run, bench).play(behaviour)


class _Session:
    def __init__(self, case: Case, run: str, bench: Workbench) -> None:
        self._case, self._run, self._bench = case, run, bench
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_TEMPLATE},
            {"role": "user", "content": INSTANCE_TEMPLATE.replace("{{task}}", case.issue)},
        ]
        self._calls = 0
        self._cost = 0.0
        self._clock = FIRST_TIMESTAMP + int(self._identifier("clock")[:5], 16)

    def play(self, behaviour: Behaviour) -> dict[str, Any]:
        turns = behaviour(self._case, Voice(self._case.name, self._run))
        observations: list[Observation] | None = None
        format_errors = 0
        try:
            while True:
                if self._calls >= STEP_LIMIT:
                    return self._exit("LimitsExceeded", "LimitsExceeded")
                turn = next(turns) if observations is None else turns.send(observations)
                cost = self._count(turn)
                if not turn.commands:
                    format_errors += 1
                    if format_errors >= FORMAT_ERROR_LIMIT:
                        return self._exit("RepeatedFormatError", "RepeatedFormatError")
                    self._add_format_error()
                    observations = []
                    continue
                format_errors = 0
                self._messages.append(self._assistant(turn, cost))
                observations = []
                for command, call in zip(turn.commands, self._messages[-1]["tool_calls"], strict=True):
                    observation = self._bench.run(command)
                    first, _, rest = observation.output.partition("\n")
                    if first.strip() == MARKER and observation.returncode == 0:
                        return self._exit("Submitted", rest, submission=rest)
                    observations.append(observation)
                    self._messages.append(self._answer(observation, call["id"]))
        except ModelUnavailable as error:
            trace = f"Traceback (most recent call last):\nModelUnavailable: {error}\n"
            return self._exit("InternalServerError", str(error), traceback=trace, exception_str=str(error))

    def _count(self, turn: Turn) -> float:
        """Book one model call, at four characters a token and made-up prices, and return its cost in dollars."""
        self._calls += 1
        prompt = sum(len(message["content"]) for message in self._messages) // 4
        completion = (len(turn.say) + len(turn.think or "") + sum(map(len, turn.commands))) // 4
        cost = round(prompt * 2e-7 + completion * 8e-7, 8)
        self._cost = round(self._cost + cost, 8)
        return cost

    def _assistant(self, turn: Turn, cost: float) -> dict[str, Any]:
        calls = [
            {
                "index": position,
                "function": {"arguments": json.dumps({"command": command}), "name": "bash"},
                "id": f"call_{self._identifier(self._calls, position)}",
                "type": "function",
            }
            for position, command in enumerate(turn.commands)
        ]
        message: dict[str, Any] = {
            "content": turn.say,
            "role": "assistant",
            "tool_calls": calls,
            "function_call": None,
            "provider_specific_fields": None,
        }
        if turn.think:
            message["reasoning_content"] = turn.think
            message["provider_specific_fields"] = {"reasoning_content": turn.think}
        message["extra"] = {
            "actions": [
                {"command": command, "tool_call_id": call["id"]}
                for command, call in zip(turn.commands, calls, strict=True)
            ],
            "cost": cost,
            "timestamp": self._tick(3.5),
        }
        return message

    def _answer(self, observation: Observation, call_id: str) -> dict[str, Any]:
        return {
            "content": f"<returncode>{observation.returncode}</returncode>\n<output>\n{observation.output}</output>",
            "extra": {
                "raw_output": observation.output,
                "returncode": observation.returncode,
                "timestamp": self._tick(0.25),
                "exception_info": "",
            },
            "tool_call_id": call_id,
            "role": "tool",
        }

    def _add_format_error(self) -> None:
        error = "there was no call of a tool in it."
        content = FORMAT_ERROR_TEMPLATE.replace("{{error}}", error)
        extra = {"interrupt_type": "FormatError", "timestamp": self._tick(3.5)}
        self._messages.append({"role": "user", "content": content, "extra": extra})

    def _exit(self, status: str, content: str, submission: str = "", **problem: str) -> dict[str, Any]:
        extra = {"exit_status": status, "submission": submission, **problem}
        self._messages.append({"role": "exit", "content": content, "extra": extra})
        return {
            "info": {
                "model_stats": {"instance_cost": self._cost, "api_calls": self._calls},
                "config": _config(),
                "mini_version": "2.2.7",
                "exit_status": status,
                "submission": submission,
                **problem,
            },
            "messages": self._messages,
            "trajectory_format": "mini-swe-agent-1.1",
            "instance_id": self._case.name,
        }

    def _tick(self, seconds: float) -> float:
        self._clock += seconds
        return self._clock

    def _identifier(self, *parts: object) -> str:
        text = "\0".join(map(str, (self._case.name, self._run, *parts)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _config() -> dict[str, Any]:
    return {
        "agent": {
            "system_template": SYSTEM_TEMPLATE,
            "instance_template": INSTANCE_TEMPLATE,
            "step_limit": STEP_LIMIT,
            "cost_limit": 1.0,
        },
        "agent_type": "traceforge_core.samples.agent",
        "model": {
            "model_name": MODEL,
            "model_kwargs": {},
        },
        "model_type": "traceforge_core.samples.behaviours",
        "environment": {
            "cwd": HOME,
            "env": {"PAGER": "cat", "NO_COLOR": "1"},
            "timeout": int(TIMEOUT),
            "python": ".".join(map(str, sys.version_info[:2])),
        },
        "environment_type": "traceforge_core.samples.workbench.Workbench",
    }


def patch_of(trajectory: dict[str, Any]) -> str:
    """The patch that a trajectory submitted, or nothing."""
    patch: str = trajectory["info"]["submission"]
    return patch


def commands_of(trajectory: dict[str, Any]) -> Iterable[str]:
    """Every command that was run, in order."""
    for message in trajectory["messages"]:
        for action in message.get("extra", {}).get("actions", ()):
            yield action["command"]
