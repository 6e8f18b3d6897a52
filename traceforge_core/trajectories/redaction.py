"""Secrets out of trajectories: API keys, tokens and private keys, replaced by a word that says what stood there.

    encoded, replaced = redact(messages, encode_messages(messages))

Agents print environments and read configuration files; what they found must not end up in a model. Only well-known
shapes are replaced, so that ordinary code keeps its text.
"""

from __future__ import annotations

import re
from typing import Any

from traceforge_core.trajectories.model import Message
from traceforge_core.trajectories.store import encode_messages

_SHAPES: tuple[tuple[str, str, str], ...] = (
    # (what it is, a literal that every match holds, the shape)
    ("api key", "sk-", r"\bsk-(?:ant-|proj-|or-|svcacct-)?[A-Za-z0-9_-]{20,}"),
    ("GitHub token", "gh", r"\bgh[pousr]_[A-Za-z0-9]{36,}"),
    ("GitHub token", "github_pat_", r"\bgithub_pat_[A-Za-z0-9_]{50,}"),
    ("GitLab token", "glpat-", r"\bglpat-[A-Za-z0-9_-]{20,}"),
    ("AWS key", "AKIA", r"\bAKIA[A-Z0-9]{16}\b"),
    ("AWS key", "ASIA", r"\bASIA[A-Z0-9]{16}\b"),
    ("Hugging Face token", "hf_", r"\bhf_[A-Za-z0-9]{30,}"),
    ("Slack token", "xox", r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    ("Google key", "AIza", r"\bAIza[A-Za-z0-9_-]{35}"),
    ("npm token", "npm_", r"\bnpm_[A-Za-z0-9]{36}"),
    ("PyPI token", "pypi-AgE", r"\bpypi-AgE[A-Za-z0-9_-]{50,}"),
    ("JSON web token", "eyJ", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    ("bearer token", "Bearer ", r"(?<=\bBearer )[A-Za-z0-9._~+/-]{24,}=*"),
    (
        "private key",
        "PRIVATE KEY-----",
        r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----[A-Za-z0-9+/=\s\\]{64,}-----END (?:[A-Z]+ )?PRIVATE KEY-----",
    ),
    ("secret", "API_KEY", r"(?<=API_KEY=)(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}"),
    ("secret", "SECRET", r"(?<=SECRET=)(?=[A-Za-z_/+-]*\d)[A-Za-z0-9_/+-]{20,}"),
    ("secret", "_TOKEN=", r"(?<=_TOKEN=)(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}"),
)
_KINDS = tuple((kind, literal, re.compile(shape)) for kind, literal, shape in _SHAPES)
# Looked for first, in the encoded text: a plain search for each costs far less than any regular expression.
_LITERALS = [literal.encode() for _, literal, _ in _SHAPES if literal != "gh"]
_LITERALS += [b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"]


def redact(messages: list[Message], encoded: bytes) -> tuple[bytes, int]:
    """Replace secrets in place. Returns the messages encoded anew and how many were replaced."""
    if not any(literal in encoded for literal in _LITERALS):
        return encoded, 0
    replaced = 0
    for message in messages:
        message.content, count = redact_text(message.content)
        replaced += count
        if message.reasoning:
            message.reasoning, count = redact_text(message.reasoning)
            replaced += count
        for action in message.actions:
            action.arguments, count = _redact_value(action.arguments)
            replaced += count
    return (encode_messages(messages), replaced) if replaced else (encoded, 0)


def redact_text(text: str) -> tuple[str, int]:
    """The text without its secrets, and how many there were."""
    replaced = 0
    for kind, literal, shape in _KINDS:
        if literal in text:
            text, count = shape.subn(f"[{kind} removed]", text)
            replaced += count
    return text, replaced


def _redact_value(value: Any) -> tuple[Any, int]:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        pairs = {key: _redact_value(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(count for _, count in pairs.values())
    if isinstance(value, list):
        items = [_redact_value(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0
