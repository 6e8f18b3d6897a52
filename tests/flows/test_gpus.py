"""GPU slots on a real Prefect API."""

from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client

from deployments.setup import POOL, set_up
from flows import gpus
from traceforge_core.config import load_config
from traceforge_core.errors import TraceForgeError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def taken() -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(gpus.LIMIT).active_slots


def test_slots_are_held_inside_the_block_and_a_second_holder_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    with get_client(sync_client=True) as client:
        set_up(client, 2)
    monkeypatch.setattr(gpus, "WAIT_SECONDS", 2.0)
    with gpus.gpus_held(2):
        assert taken() == 2
        with pytest.raises(TraceForgeError, match=r"Waited .* for 1 slots of the concurrency limit `gpu`"):
            with gpus.gpus_held(1):
                raise AssertionError("two runs share a card")
    assert taken() == 0


def test_setting_up_twice_changes_only_the_number_of_slots() -> None:
    with get_client(sync_client=True) as client:
        set_up(client, 0)
        assert client.read_global_concurrency_limit_by_name(gpus.LIMIT).limit == 1
        set_up(client, 4)
        assert client.read_global_concurrency_limit_by_name(gpus.LIMIT).limit == 4
        assert client.read_work_pool(POOL).type == "process"


def test_as_many_cards_are_asked_for_as_the_strategy_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["0", "1", "2", "3"])
    config = load_config("qwen3-8b-24gb", assignments=["preference.replicas=2", "model.device=cuda"])
    stages = ("sft", "oracle", "branch_parallel", "shared_prefix")
    assert [gpus.gpus_needed(stage, config) for stage in stages] == [1, 1, 4, 2]
    on_cpu = load_config(assignments=["model.device=cpu"])
    assert [gpus.gpus_needed(stage, on_cpu) for stage in stages] == [0, 0, 0, 0]
