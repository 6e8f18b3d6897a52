"""The page of the data: in the file, and in a real browser."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceforge_core.config import load_config
from traceforge_core.datasets.build import build_datasets
from traceforge_core.datasets.histogram import histogram
from traceforge_core.datasets.page import write_data_page
from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.model import Trajectory

EVIL = "</script><script>document.title = 'taken over'</script><!--DATA--><b>&amp;"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Trajectory], model_dir: Path) -> Path:
    """The page of a small run whose texts try to break out of it, and whose long samples are trimmed."""
    from traceforge_core.trajectories.store import TrajectoryWriter

    run = tmp_path_factory.mktemp("runs") / "my-run"
    (run / "datasets").mkdir(parents=True)
    shutil.copytree(model_dir, run / "model")
    with TrajectoryWriter(run / "ingest" / "trajectories") as writer:
        for n in range(4):
            steps = [(f"cat {n} 🙂", 0), (f"sed {n}", 1), (f"sed -i {n}", 0)]
            for name, outcome in (("a", "resolved"), ("b", "unresolved")):
                writer.write(make_run(f"case{n}", name, steps[: 3 if name == "a" else 2], outcome, output=EVIL * 6))
    counts = {"found": 10, "read": 8, "quarantined": 1, "duplicates": 1, "by_format": {"made": 8}}
    counts |= {"by_outcome": {"resolved": 4, "unresolved": 4}, "by_exit": {EVIL: 8}, "by_reason": {"invalid_json": 1}}
    (run / "ingest" / "report.json").write_text(json.dumps(counts))
    config = load_config(assignments=["datasets.sft.max_length=700", "datasets.preference.max_length=4096"])
    build_datasets(config, {"ingest": run / "ingest", "model": run / "model"}, run / "datasets")
    return write_data_page(run, run.parent / "out" / "data.html")


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_the_file_needs_nothing_else_and_texts_cannot_break_out(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "http://" not in text and "https://" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert "taken over'</script>" not in text
    assert "<!--" not in text
    assert html.escape(EVIL.replace("_", " ")) in text


def test_it_counts_what_was_read_and_dropped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for part in ("Data of run my-run", "invalid json", "<b>10</b><span>trajectories found", "limit 700", "limit 4,096"):
        assert part in text


def test_samples_are_shown_with_exactly_their_learned_tokens(page: Path) -> None:
    data = embedded(page.read_text(encoding="utf-8"))
    for sample in data["samples"]:
        (learned,) = [stretch["learned"] for stretch in sample["text"] if "learned" in stretch]
        assert "".join(learned).startswith("<think>\nWhy ")
        assert learned[-1] == "<|im_end|>"
        facts = dict(sample["facts"])
        assert facts["side"] in ("training", "held out")
        shown = "".join(stretch.get("read", "") for stretch in sample["text"])
        assert ("left out ...]" in shown) == (facts["messages left out"] != "0")
    assert any(dict(sample["facts"])["messages left out"] != "0" for sample in data["samples"])
    outcome = [pair for pair in data["pairs"] if dict(pair["facts"])["miner"] == "outcome"]
    for pair in outcome:  # observations inside a completion are read, not scored
        assert ["learned" in stretch for stretch in pair["rejected"]] == [True, False, True]
    assert outcome


def test_a_run_without_the_stages_says_which_to_run(page: Path, tmp_path: Path) -> None:
    run = page.parent.parent / "my-run"
    for stage in ("ingest", "datasets", "model"):
        partial = tmp_path / stage
        shutil.copytree(run, partial)
        shutil.rmtree(partial / stage)
        with pytest.raises(TraceForgeError, match=f"no finished stage {stage}"):
            write_data_page(partial, tmp_path / "data.html")


def test_a_page_that_cannot_be_written_leaves_the_one_that_was_there(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run, out = page.parent.parent / "my-run", tmp_path / "data.html"
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceForgeError, match=r"Cannot write .*folder: Is a directory\. Name another file with --out"):
        write_data_page(run, tmp_path / "folder")
    out.write_text("as it was")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceForgeError, match=f"The disk is full: cannot write {out}"):
        write_data_page(run, out)
    assert out.read_text() == "as it was"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.html", "folder"]


def test_a_histogram_counts_every_value_and_draws_the_limit() -> None:
    svg = histogram("Lengths", np.array([1.0, 5.0, 5.0, 100.0]), limit=120)
    counts = [int(count) for count in re.findall(r": (\d+)</title></rect>", svg)]
    assert sum(counts) == 4
    assert "class=limit" in svg and "limit 120" in svg
    far = histogram("Lengths", np.array([1.0]), limit=1000)
    assert "class=limit" not in far and "limit 1,000" in far
    assert "None." in histogram("Lengths", np.array([]))
    assert histogram("Lengths", np.array([0.0]))


def dom(page: Path, tmp_path: Path, address: str = "", script: str = "") -> str:
    """The page's DOM after the browser ran it, and then `script`."""
    assert CHROMIUM
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</html>", f"<script>{script}</script></html>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=3000", "--dump-dom", f"file://{copy}{address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


def part(text: str, element: str) -> str:
    """The text in the element with that id."""
    found = re.search(rf'id="{element}"[^>]*>(.*?)</(?:pre|dl|select)>', text, re.DOTALL)
    assert found
    return html.unescape(re.sub(r"<[^>]+>", "", found.group(1)))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_first_sample_with_coloured_tokens(page: Path, tmp_path: Path) -> None:
    shown = dom(page, tmp_path)
    first = embedded(page.read_text(encoding="utf-8"))["samples"][0]
    text = "".join(s.get("read", "") or "".join(s.get("learned", "")) for s in first["text"])
    assert part(shown, "text").strip() == text.strip()
    learned = next(s["learned"] for s in first["text"] if "learned" in s)
    assert shown.count('<span class="learn">') == len(learned) + 1  # and the key above
    assert "<title>Data of run my-run</title>" in shown


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_follows_addresses_and_buttons(page: Path, tmp_path: Path) -> None:
    data = embedded(page.read_text(encoding="utf-8"))
    shown = dom(page, tmp_path, "#pairs-1")
    assert data["pairs"][1]["facts"][0][1] in part(shown, "facts")
    assert part(shown, "chosen").startswith("<think>")
    assert part(shown, "chosen") != part(shown, "rejected")
    clicks = "for (const id of ['kind-pairs', 'next', 'next', 'previous', 'kind-samples', 'next', 'next', 'jump']) "
    clicks += "document.getElementById(id).click(); document.body.dataset.address = location.hash;"
    shown = dom(page, tmp_path, script=clicks)
    assert 'data-address="#samples-2"' in shown
    trimmed = next(n for n, s in enumerate(data["samples"]) if dict(s["facts"])["messages left out"] != "0")
    assert '<span class="trimmed">[... ' in dom(page, tmp_path, f"#samples-{trimmed}")
    beyond = dom(page, tmp_path, "#samples-9999")
    assert data["samples"][-1]["facts"][0][1] in part(beyond, "facts")
