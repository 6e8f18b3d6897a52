"""The history of comparisons: written once a run, read in order, and what it blames when runs go bad."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from traceforge_core.comparison.drift import drifts
from traceforge_core.comparison.history import Entry, blame, entry_of, failed_entry, read, record
from traceforge_core.comparison.trend import write_trend
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run

GOOD = Entry(
    "night-1",
    "2026-01-01T04:30:00+00:00",
    "pass",
    "branch_parallel: all equal",
    "/runs/night-1",
    {"torch": "2.13.0", "trl": "1.14.2", "device": "cpu"},
    {"branch_parallel/max loss difference": 1e-7, "oracle/held-out pairs margin": 0.5},
)


def night(number: int, verdict: str = "pass", **versions: str) -> Entry:
    when = f"2026-01-{number:02d}T04:30:00+00:00"
    return replace(
        GOOD, run_id=f"night-{number}", finished=when, verdict=verdict, surroundings=GOOD.surroundings | versions
    )


def test_entries_come_back_in_the_order_of_time_and_a_run_recorded_twice_is_there_once(tmp_path: Path) -> None:
    history = tmp_path / "deep" / "history.sqlite"
    for entry in (night(2), night(1), night(3), night(2, "fail")):
        record(history, entry)
    assert [(entry.run_id, entry.verdict) for entry in read(history)] == [
        ("night-1", "pass"),
        ("night-2", "fail"),
        ("night-3", "pass"),
    ]
    assert read(history)[0] == night(1)
    assert [entry.run_id for entry in read(history, last=1)] == ["night-3"]
    assert read(tmp_path / "none.sqlite") == []


def _record_many(history: Path, start: int) -> None:
    for number in range(start, start + 10):
        record(history, night(1 + number % 28, "pass", torch=str(number)))


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    history = tmp_path / "history.sqlite"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_record_many, args=(history, start)) for start in (0, 10)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(read(history)) == 20


def test_a_change_of_versions_between_last_good_and_first_bad_is_named() -> None:
    entries = [night(1), night(2, trl="1.15.0"), night(3, "fail", trl="1.15.0", torch="2.14.0"), night(4, "fail")]
    change = blame(entries)
    assert change is not None and change.last_good == entries[1] and change.first_bad == entries[2]
    assert change.changed == [("torch", "2.13.0", "2.14.0")]
    assert "torch 2.13.0 → 2.14.0" in change.sentence


def test_nothing_is_blamed_while_the_last_run_is_good() -> None:
    assert blame([]) is None
    assert blame([night(1, "fail"), night(2)]) is None


def test_bad_from_the_beginning_and_bad_without_a_change_are_said() -> None:
    first = blame([night(1, "undecided")])
    assert first is not None and "no run before it was good" in first.sentence
    unchanged = blame([night(1), night(2, "fail")])
    assert unchanged is not None and "Nothing that is recorded changed" in unchanged.sentence


def test_a_run_that_ended_early_is_recorded_with_its_reason_and_what_it_did_not_reach_is_not_blamed(
    tmp_path: Path,
) -> None:
    run = Run.create(tmp_path, "night-9")
    entry = failed_entry(run, "oracle: worker 0 ended with exit status 1\nlog ...")
    assert (entry.verdict, entry.reason) == ("error", "oracle: worker 0 ended with exit status 1")
    before = replace(GOOD, surroundings=entry.surroundings | {"data order": "abc", "torch": "0.1"})
    change = blame([before, entry])
    assert change is not None and [name for name, *_ in change.changed] == ["torch"]


def test_a_run_without_a_comparison_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match="no finished comparison"):
        entry_of(Run.create(tmp_path, "x"))


def test_a_history_that_is_no_database_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").write_text("not a database, but long enough to be taken for one " * 20)
    with pytest.raises(TraceForgeError, match="Move that file away"):
        record(tmp_path / "history.sqlite", GOOD)


def test_a_history_with_a_torn_row_or_of_another_shape_says_what_to_do(tmp_path: Path) -> None:
    history = tmp_path / "history.sqlite"
    record(history, GOOD)
    with contextlib.closing(sqlite3.connect(history)) as connection, connection:
        connection.execute("UPDATE runs SET figures = '{'")
    with pytest.raises(TraceForgeError, match="Move that file away"):
        read(history)
    with contextlib.closing(sqlite3.connect(history)) as connection, connection:
        connection.execute("ALTER TABLE runs DROP COLUMN figures")
    with pytest.raises(TraceForgeError, match="Move that file away"):
        record(history, GOOD)


def test_a_history_that_is_held_cannot_be_written_to_or_has_no_room_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held.sqlite"
    record(held, GOOD)
    monkeypatch.setattr("traceforge_core.comparison.history.BUSY_SECONDS", 0.1)
    with contextlib.closing(sqlite3.connect(held)) as other, other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TraceForgeError, match="Another process has held it"):
            record(held, night(2))
    (tmp_path / "folder.sqlite").mkdir()
    with pytest.raises(TraceForgeError, match="Let this user write"):
        record(tmp_path / "folder.sqlite", GOOD)
    (tmp_path / "file").touch()
    with pytest.raises(TraceForgeError, match="Let this user write"):
        record(tmp_path / "file" / "history.sqlite", GOOD)

    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from tests.comparison.test_history import GOOD, record\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "record(Path(sys.argv[1]), GOOD)"
    )
    full = subprocess.run([sys.executable, "-c", code, tmp_path / "full.sqlite"], capture_output=True, text=True)
    assert full.returncode == 1 and "Look at the disk: is it full, or away?" in full.stderr, full.stderr


def test_a_setting_that_changed_is_blamed_and_a_new_one_is_not(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "night-2")
    run.save_config({"preference": {"beta": 2.5}, "comparison": {"exact": "auto"}})
    entry = failed_entry(run, "the worker was killed")
    good = replace(GOOD, surroundings=entry.surroundings | {"setting preference.beta": "2.0"})
    del good.surroundings["setting comparison.exact"]
    change = blame([good, replace(entry, verdict="fail")])
    assert change is not None and change.changed == [("setting preference.beta", "2.0", "2.5")]
    write_trend([entry], tmp_path / "trend")
    assert "setting" not in (tmp_path / "trend" / "trend.md").read_text(), "a hundred of them"


def test_what_only_the_float32_comparison_found_is_the_reason_recorded(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "night-3")
    folder = run.stage_dir("compare")
    folder.mkdir()
    parity = {"max_loss": 1e-3, "adapter": 1e-2, "max_gradient": None}
    verdict = {"outcome": "pass", "reasons": ["within the oracle's own noise"], "places": []}
    exact = {"outcome": "fail", "reasons": ["adapter, first at step 3: it is off"]}
    report = {"parity": parity, "steps": [], "verdict": verdict, "exact": exact}
    told = {"verdict": "fail", "strategies": {"branch_parallel": report}, "evaluation": None, "planted_faults": None}
    (folder / "report.json").write_text(json.dumps(told))
    manifest = {"key": "k", "started": "2026-01-03T04:30:00+00:00", "seconds": 1.0, "figures": {}, "outputs": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert entry_of(run).reason == "branch_parallel in float32: adapter, first at step 3: it is off"


def test_a_run_that_reused_an_older_comparison_is_newer_than_the_bad_one_before_it(tmp_path: Path) -> None:
    history, run = tmp_path / "history.sqlite", Run.create(tmp_path, "night-2")
    record(history, failed_entry(Run.create(tmp_path, "night-1"), "no room on the disk"))
    run.stage_dir("compare").mkdir()
    told = {"verdict": "pass", "strategies": {}, "evaluation": None, "planted_faults": None}
    (run.stage_dir("compare") / "report.json").write_text(json.dumps(told))
    manifest = {"key": "k", "started": "2020-01-01T04:30:00+00:00", "seconds": 1.0, "figures": {}, "outputs": {}}
    (run.stage_dir("compare") / "manifest.json").write_text(json.dumps(manifest))
    record(history, entry_of(run))
    assert [entry.verdict for entry in read(history)] == ["error", "pass"]
    assert blame(read(history)) is None


def test_the_trend_report_names_the_culprit_and_needs_nothing_else(tmp_path: Path) -> None:
    entries = [night(day) for day in range(1, 9)] + [night(9, "fail", torch="2.14.0")]
    write_trend(entries, tmp_path)
    assert "torch 2.13.0 → 2.14.0" in (tmp_path / "trend.md").read_text()
    page = (tmp_path / "trend.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "")
    assert (tmp_path / "trend.png").read_bytes().startswith(b"\x89PNG")
    assert json.dumps(entries[0].figures)


def nights_with(figure: str, values: list[float]) -> list[Entry]:
    return [replace(night(1 + at), figures={figure: value}) for at, value in enumerate(values)]


STEADY = [1.0e-7, 1.1e-7, 0.9e-7, 1.0e-7, 1.2e-7, 1.0e-7, 1.1e-7, 1.0e-7]


def test_what_gets_worse_for_three_runs_while_all_pass_is_told_with_both_figures(tmp_path: Path) -> None:
    entries = nights_with("branch_parallel/max loss difference", [*STEADY, 3e-7, 4e-7, 5e-7])
    [found] = drifts(entries)
    assert found.sentence == (
        "branch_parallel/max loss difference is larger than in all 8 good runs before: 1e-07 then, 4e-07 in the last 3."
    )
    write_trend(entries, tmp_path)
    assert found.sentence in (tmp_path / "trend.md").read_text()
    [margin] = drifts(nights_with("oracle/held-out pairs margin", [0.5] * 9 + [0.4, 0.3, 0.2]))
    assert (margin.worse, margin.before, margin.now) == ("smaller", 0.5, 0.3)
    [was_nothing] = drifts(nights_with("branch_parallel/adapter difference", [0.0] * 8 + [1e-9] * 3))
    assert was_nothing.before == 0.0


@pytest.mark.parametrize(
    "values",
    [
        [*STEADY, 3e-7, 4e-7, 1e-7],  # one of the last three is as good as ever
        [*STEADY, 1.21e-7, 1.22e-7, 1.23e-7],  # larger than all before, and by too little for a word
        [*STEADY, 0.1e-7, 0.1e-7, 0.1e-7],  # better
        [*STEADY[1:], 3e-7, 4e-7, 5e-7],  # too few runs before
    ],
)
def test_what_is_not_worse_for_long_or_by_much_is_no_drift(values: list[float]) -> None:
    assert drifts(nights_with("branch_parallel/max loss difference", values)) == []


def test_a_bad_run_is_blamed_and_no_drift_is_told_of_it() -> None:
    entries = nights_with("branch_parallel/max loss difference", [*STEADY, 3e-7, 4e-7, 5e-7])
    assert drifts([*entries[:-1], replace(entries[-1], verdict="fail")]) == []
    assert drifts([]) == []
