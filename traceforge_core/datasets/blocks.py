"""A history as text: one block a message, `[ROLE #position]` above it, for the one user message of an SFT sample.

Case: django__django-11815

[SYSTEM #0]
...

[ASSISTANT #2]
<think>
...
</think>

...
<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>

Predict next action.

The text is cut in front of every block for tokenising. Each cut stands between line ends and a bracket or letter, where
byte-level pre-tokenisers split anyway, so the pieces give the tokens of the whole; `sft` checks that they do.
"""

from __future__ import annotations

import json

from traceforge_core.modeling.messages import called_actions
from traceforge_core.trajectories.model import Message

REQUEST = "Predict next action."


def opening(case: str) -> str:
    """What stands above the history."""
    return f"Case: {case}\n\n"


def block(position: int, message: Message) -> str:
    """One message as a block, with the empty line that ends it."""
    return f"[{message.role.upper()} #{position}]\n{body(message)}\n\n"


def body(message: Message) -> str:
    """Reasoning, text and calls of a message, the way ChatML models write them."""
    parts = []
    if message.reasoning:
        parts.append(f"<think>\n{message.reasoning}\n</think>\n")
    if message.content:
        parts.append(message.content)
    for action in called_actions(message):
        call = f'{{"name": {json.dumps(action.name, ensure_ascii=False)}, "arguments": '
        parts.append(f"<tool_call>\n{call}{json.dumps(action.arguments, ensure_ascii=False)}}}\n</tool_call>")
    return "\n".join(parts)
