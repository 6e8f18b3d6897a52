"""Secrets go, code stays."""

from __future__ import annotations

import pytest

from traceforge_core.trajectories.redaction import redact_text

KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEpAIBAAKCAQEA" * 8 + "\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-" + "a1B2c3D4" * 4,
        "github_pat_" + "a1B2c3D4e5" * 6,
        "glpat-" + "a1B2c3D4e5" * 2,
        "hf_" + "aBcDeFgHiJ" * 3,
        "xoxb-1234567890-abcdefghij",
        "AIza" + "a1B2c3D" * 5,
        "npm_" + "a1B2c3" * 6,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
        KEY,
    ],
)
def test_a_secret_is_replaced_wherever_it_stands(secret: str):
    for text in (secret, f'key = "{secret}"', f"export X={secret}\n"):
        cleaned, count = redact_text(text)
        assert count == 1 and secret not in cleaned and "removed]" in cleaned
        assert cleaned.startswith(text.split(secret)[0])


@pytest.mark.parametrize(
    "text",
    [
        "task-list-with-many-words-in-it-is-no-key",
        "def hf_hub_download(repo_id): ...",
        "os.environ['API_KEY=']",
        "API_KEY=your-api-key-goes-right-here",
        "-----BEGIN PRIVATE KEY-----",
        "ghp_short",
        "Authorization: Bearer <token>",
        "sk-learn",
    ],
)
def test_ordinary_text_is_left_alone(text: str):
    assert redact_text(text) == (text, 0)
