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
the pre-tokenisers of Qwen and Llama 3 split anyway; GPT-2's splits one line end earlier. So the pieces give the tokens
of the whole; `sft` checks that they do, and tries the earlier place where they do not.
"""

from __future__ import annotations

import json
import re

from traceforge_core.modeling.messages import called_actions
from traceforge_core.trajectories.model import Message

REQUEST = "Predict next action."


SAFE_CUT = re.compile(r"(?<=\S\n)(?=[A-Za-z<\[`])")
"""Behind a line end that ends a line with something in it, in front of a letter or bracket: pre-tokenisers split there
whatever else stands on both sides."""
LOOK_BACK = 4000


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


def shared_start(text: str, completion: str) -> int:
    """How many characters a turn's `body` and its completion begin with in common, up to the last place where both may
    be cut for tokenising; 0 where there is no such place."""
    if not text or text[0].isspace():
        return 0
    for cut in reversed([match.start() for match in SAFE_CUT.finditer(text, max(0, len(text) - LOOK_BACK))]):
        if completion.startswith(text[:cut]):
            return cut
    return 0
