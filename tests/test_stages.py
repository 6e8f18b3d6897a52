"""The table of stages: order, needs, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from traceforge_core.config import load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Inputs, Run, run_stage
from traceforge_core.stages import STAGES, Stage, _dump, perform, pipeline
from traceforge_core.start_check import check_start


def test_every_stage_comes_after_what_it_works_from() -> None:
    order = list(STAGES)
    for stage in STAGES.values():
        for earlier in stage.needs + stage.uses:
            assert order.index(earlier) < order.index(stage.name)


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_function_is_there(name: str) -> None:
    assert callable(STAGES[name].load())


def test_the_pipeline_runs_one_strategy_beside_the_oracle() -> None:
    assert "shared_prefix" not in pipeline(load_config())
    other = pipeline(load_config(assignments=["preference.strategy=shared_prefix"]))
    assert "shared_prefix" in other
    assert "branch_parallel" not in other


def test_what_rounding_does_is_measured_but_for_the_tiny_model_in_float32() -> None:
    tiny, other = load_config(), load_config(assignments=["model.name=some/model"])
    bfloat16 = load_config(assignments=["model.dtype=bfloat16"])
    assert ["noise_floor" in pipeline(config) for config in (tiny, other, bfloat16)] == [False, True, True]
    assert all("planted_faults" not in pipeline(config) for config in (tiny, other, bfloat16))


def test_a_stage_whose_inputs_are_missing_says_which_stage_to_run(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    with pytest.raises(TraceForgeError, match="needs the outputs of stage ingest"):
        perform("datasets", load_config(), run)


def finish(run: Run, *names: str) -> None:
    """Finish these stages with one file each."""
    for name in names:
        run_stage(run, name, {}, Inputs(), lambda out: {"bytes": (out / "file").write_bytes(b"made")})


def test_a_damaged_stage_is_told_where_it_is_needed_and_where_it_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path)
    finish(run, "model", "datasets", "sft", "oracle", "branch_parallel")
    given: list[str] = []
    monkeypatch.setattr(Stage, "load", lambda self: lambda config, inputs, out_dir: given.extend(inputs) or {})
    (run.stage_dir("oracle") / "file").unlink()
    perform("evaluate", load_config(), run)
    assert given == ["model", "datasets", "sft", "branch_parallel"]
    damage = f"{run.stage_dir('oracle') / 'file'} cannot be read (No such file or directory)"
    assert f"Stage evaluate leaves stage oracle out, which is damaged: {damage}. Run it again." in caplog.messages
    assert not any("shared_prefix" in message for message in caplog.messages), "it was never there"

    (run.stage_dir("sft") / "file").write_bytes(b"cut")
    from_base = load_config(assignments=["preference.start_from=base"])
    caplog.clear()
    perform("branch_parallel", from_base, run)
    assert caplog.messages == [], "started from the base, it would not have used the adapter of sft"
    with pytest.raises(TraceForgeError, match=r"stage sft, which are damaged in run .*file is not as long as it was"):
        check_start(["branch_parallel"], load_config(assignments=["preference.start_from=sft"]), run)


@pytest.mark.parametrize("stage", ["ingest", "datasets"])
def test_a_run_that_is_gone_before_a_stage_is_told_as_that_and_not_made_again(stage: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs")
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(TraceForgeError, match=f"is gone: it was removed or moved before stage {stage} began"):
        perform(stage, load_config(), run)
    assert not run.path.exists()


def test_the_table_imports_neither_torch_nor_transformers_nor_prefect() -> None:
    heavy = "('torch', 'transformers', 'prefect')"
    code = f"import sys, traceforge_core.stages; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("stage", ["ingest", "datasets"])
def test_how_many_processes_do_the_work_changes_nothing_that_a_stage_depends_on(stage: str) -> None:
    def seen(*assignments: str) -> list[object]:
        config = load_config(assignments=list(assignments))
        return [_dump(config, section) for section in STAGES[stage].sections]

    assert seen(f"{stage}.workers=3") == seen()
    names = {name.partition(".")[2] for name in STAGES[stage].sections}
    own = set(type(getattr(load_config(), stage)).model_fields)
    assert own - names <= {"workers", "cluster", "cluster_address"}  # a new field must be looked at here
