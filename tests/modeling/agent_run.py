"""An agent's run with all that a chat template may lose, what is learnt of it, and templates like public models'."""

from __future__ import annotations

from pathlib import Path

from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.trajectories.model import Action, Message

TEMPLATES = Path(__file__).with_name("templates")
CHATML_TOKENS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
LLAMA_TOKENS = ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>")
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Runs it.", "parameters": {}}}]
RUN = [
    Message("system", "Be careful."),
    Message("user", "Mend it."),
    Message(
        "assistant", "I look.", reasoning="Where is it?", actions=[Action("bash", {"command": 'grep "x"\nls'}, "c1")]
    ),
    Message("tool", "found", call_id="c1", returncode=0),
    Message("assistant", "No call here.", trainable=False),
    Message("user", "Please call a tool."),
    Message("assistant", "", reasoning="Right.", actions=[Action("bash", {"command": "submit"}, "c2")]),
]
LOOK = (
    '<think>\nWhere is it?\n</think>\n\nI look.\n<tool_call>\n{"name": "bash", "arguments": {"command": '
    '"grep \\"x\\"\\nls"}}\n</tool_call><|im_end|>'
)
SUBMIT = (
    '<think>\nRight.\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"command": "submit"}}\n</tool_call>'
    "<|im_end|>"
)


def like(name: str) -> str:
    """A template that behaves like a public one."""
    text = (TEMPLATES / f"{name.partition('-')[0]}.jinja").read_text(encoding="utf-8").strip()
    if name == "qwen3-2507-instruct":
        return text.replace("loop.index0 > ns.last and (loop.last or reasoning)", "false")
    if name == "qwen3-2507-thinking":
        opened = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
        return text[: text.rindex("{%- if add_generation_prompt %}")] + opened
    return text


def learned(renderer: ChatRenderer, ids: list[int], mask: list[int]) -> str:
    return renderer.tokenizer.decode([token for token, mark in zip(ids, mask, strict=True) if mark])
