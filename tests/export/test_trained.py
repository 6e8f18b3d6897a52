"""What a run has trained is found, and what of it is damaged is told, not passed over."""

from __future__ import annotations

import pytest

from traceforge_core.errors import TraceForgeError
from traceforge_core.export.trained import open_trained
from traceforge_core.runs import Run


def test_a_stage_whose_adapter_was_emptied_is_told_and_fails_where_it_is_asked_for(
    trained_run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    whole = open_trained(trained_run)
    assert (list(whole.adapters), whole.left_out, caplog.messages) == (["sft", "branch_parallel"], {}, [])
    for file in whole.adapters["branch_parallel"].iterdir():
        file.unlink()

    trained = open_trained(trained_run)
    assert (list(trained.adapters), list(trained.left_out)) == (["sft"], ["branch_parallel"])
    damage = trained.left_out["branch_parallel"]
    assert "branch_parallel/adapter/adapter_" in damage and "cannot be read (No such file" in damage
    [said] = caplog.messages
    assert said == (
        f"Stage branch_parallel of run run is left out, it is damaged: {damage}. Train it again with: "
        f"traceforge run --run run --runs-dir {trained_run.path.parent} --stages branch_parallel"
    )
    assert trained.adapter()[0] == "sft"
    with pytest.raises(TraceForgeError, match=r"those there: sft; that of branch_parallel is damaged: .*cannot be"):
        trained.adapter("branch_parallel")
