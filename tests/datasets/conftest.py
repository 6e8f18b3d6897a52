"""Small trajectories and an ingest folder of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.trajectories.model import Action, Message, OutcomeLabel, Trajectory
from traceforge_core.trajectories.store import TrajectoryWriter

BASH = {"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": {}}}
Steps = list[tuple[str, int]]


@pytest.fixture(scope="session")
def renderer(chat_tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(chat_tokenizer)


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Trajectory]:
    """A run of shell commands: `steps` are (command, return code)."""

    def make(
        case: str,
        run: str,
        steps: Steps,
        outcome: OutcomeLabel | None = None,
        task: str = "Mend it.",
        output: str = "out",
    ) -> Trajectory:
        messages = [Message("system", "You work in a shell."), Message("user", f"{task} ({case})")]
        for number, (command, code) in enumerate(steps):
            action = Action("bash", {"command": command}, f"c{number}")
            messages.append(Message("assistant", f"Step {number}.", reasoning=f"Why {number}", actions=[action]))
            text = f"<returncode>{code}</returncode>\n<output>\n{output}\n</output>"
            messages.append(Message("tool", text, call_id=f"c{number}", returncode=code))
        return Trajectory(f"{case}-{run}", case, run, "made", f"{run}/{case}", messages, [BASH], outcome)

    return make


@pytest.fixture
def ingested(tmp_path: Path) -> Callable[[list[Trajectory]], Path]:
    """Writes trajectories as the ingest stage does, and gives back its folder."""

    def write(trajectories: list[Trajectory]) -> Path:
        with TrajectoryWriter(tmp_path / "ingest" / "trajectories") as writer:
            for trajectory in trajectories:
                writer.write(trajectory)
        return tmp_path / "ingest"

    return write


@pytest.fixture
def corpus(make_run: Callable[..., Trajectory], ingested: Callable[[list[Trajectory]], Path]) -> Path:
    """Ingested runs of eight cases, one resolved and one unresolved of each."""
    runs = []
    for n in range(8):
        steps = [(f"cat {n}", 0), (f"sed {n}", 1), (f"sed -i {n}", 0)]
        other = [(f"head {n}", 0), (f"sed {n}", 1)]
        runs += [make_run(f"case{n}", "a", steps, "resolved"), make_run(f"case{n}", "b", other, "unresolved")]
    return ingested(runs)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "model.json").write_text('{"longest": 131072}')
    return folder
