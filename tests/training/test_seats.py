"""Which GPU each worker gets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training import seats, stages

Configure = Callable[..., RunConfig]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, int], None]:
    """Pretend that so many GPUs are there, and that CUDA_VISIBLE_DEVICES says so."""

    def pretend(visible: str | None, count: int) -> None:
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(seats, "_gpu_count", lambda: count)
        monkeypatch.setattr(seats, "_torch_lacks_cuda", lambda: False)

    return pretend


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 2, ["0", "1"]),
        (None, 0, []),
        ("", 2, []),
        ("3,1", 4, ["3", "1"]),
        ("GPU-aa, GPU-bb", 4, ["GPU-aa", "GPU-bb"]),
        ("0,-1,1", 4, ["0"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(
    visible: str | None, count: int, expected: list[str], gpus: Callable[[str | None, int], None]
) -> None:
    gpus(visible, count)
    assert seats.visible_gpus() == expected


def test_a_torch_without_cuda_sees_no_gpu_and_says_why(
    gpus: Callable[[str | None, int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpus(None, 1)
    monkeypatch.setattr(seats, "_torch_lacks_cuda", lambda: True)
    with caplog.at_level(logging.WARNING, logger="traceforge_core"):
        assert seats.visible_gpus() == []
    assert "built without CUDA" in caplog.text


def test_each_worker_gets_a_gpu_of_its_own_or_shares_one_when_told_to(
    gpus: Callable[[str | None, int], None], inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    gpus("4,7", 8)
    job = stages.preference_job("branch_parallel", configure(model__device="cuda"), inputs, tmp_path)
    assert (seats.seats(job), job.transport) == (["4", "7"], "nccl")
    gpus("4", 8)
    shared = stages.preference_job("branch_parallel", configure(model__device="cuda"), inputs, tmp_path)
    assert shared.transport == "gloo"  # NCCL refuses two processes on one GPU
    assert seats.seats(shared, share_gpu=True) == ["4", "4"]
    with pytest.raises(TraceForgeError, match=r"needs 2 GPUs, one a worker, and 1 can be used here"):
        seats.seats(shared)
    with pytest.raises(TraceForgeError, match=r"needs a GPU of its own for every worker"):
        stages.preference_job(
            "branch_parallel", configure(model__device="cuda", preference__transport="nccl"), inputs, tmp_path
        )
