"""Hostile names, planted secrets, planted pickles: nothing escapes, nothing leaks, nothing of a run folder is run."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.python_path import python_path
from traceforge_core.config import RunConfig, settings_yaml
from traceforge_core.runs import Run
from traceforge_core.stages import STAGES

REPOSITORY = Path(__file__).parents[1]
SAMPLES = REPOSITORY / "traceforge_core" / "samples" / "data"
IN_ENVIRONMENT = {
    "HF_TOKEN": "hf_" + "PlantedTokenOfEnvironment" * 2,
    "PREFECT_API_KEY": "pnu_planted0key0of0prefect0cloud",
    "TRACEFORGE_WEBHOOK_URL": "https://hooks.example/services/planted-webhook-secret",
    "WANDB_API_KEY": "0123456789abcdefplantedwandbkey01234567",
}
IN_TRAJECTORIES = ("ghp_" + "Planted1Token2" * 3, "sk-proj-" + "Planted3Key4" * 3, "AKIAPLANTED5KEY67890")
STAGES_DONE = ["ingest", "model", "datasets", "sft"]


@dataclass
class Done:
    """A real run over a corpus of a hostile mind, and what stood around it."""

    answer: dict[str, Any]
    told: str
    runs_dir: Path
    prefect_home: Path
    around: Path
    before: set[Path]


def hostile(folder: Path) -> None:
    """Trajectories whose names lead elsewhere, and that hold secrets; some of them cannot be read."""
    folder.mkdir(parents=True)
    escapes = [
        "../../../../escaped",
        "/tmp/traceforge-escaped-absolute",
        "..",
        "a/../../b",
        "nul\x00byte",
        "~/escaped",
        "-rf",
    ]
    for index, name in enumerate(escapes):
        secret = IN_TRAJECTORIES[index % len(IN_TRAJECTORIES)]
        chat = {
            "instance_id": name,
            "model": name,
            "messages": [
                {"role": "user", "content": f"Fix it. My key is {secret} and TOKEN={secret}"},
                {"role": "assistant", "content": f"I use {secret} for {name}."},
            ],
        }
        (folder / f"{index}.json").write_text(json.dumps(chat), encoding="utf-8")
    (folder / "torn.json").write_text(
        '{"messages": [{"role": "user", "content": "' + IN_TRAJECTORIES[0], encoding="utf-8"
    )
    (folder / "outside.json").symlink_to("/etc/hostname")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    around = tmp_path_factory.mktemp("around")
    corpus, home = around / "deep" / "corpus", around / "prefect"
    shutil.copytree(SAMPLES, corpus / "ordinary")
    hostile(corpus / "hostile")
    table = corpus.parent / "outcomes.csv"
    table.write_text("case,run,resolved\n../../../../escaped,/tmp/traceforge-escaped-absolute,true\n", encoding="utf-8")
    cwd = around / "deep" / "cwd"
    cwd.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(home), "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"} | IN_ENVIRONMENT
    before = set(around.rglob("*"))
    command = [sys.executable, "-m", "flows.cli", "run", "--json", "--stages", ",".join(STAGES_DONE)]
    settings = [
        f"ingest.path={corpus}",
        f'ingest.outcomes=["{table}"]',
        "sft.max_steps=1",
        "datasets.sft.max_samples=16",
    ]
    for setting in settings:
        command += ["--set", setting]
    ran = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    yield Done(json.loads(ran.stdout), ran.stdout + ran.stderr, cwd / "runs", home, around, before)


@pytest.mark.slow
def test_names_out_of_data_lead_nowhere(done: Done) -> None:
    ingest = next(stage for stage in done.answer["stages"] if stage["stage"] == "ingest")["figures"]
    assert ingest["read"] >= 50 + 5, "the hostile ones are read like any other"
    made = set(done.around.rglob("*")) - done.before
    outside = {
        path for path in made if not path.is_relative_to(done.runs_dir) and not path.is_relative_to(done.prefect_home)
    }
    assert outside == set()
    assert not Path("/tmp/traceforge-escaped-absolute").exists()
    [run] = [path for path in done.runs_dir.iterdir() if path.is_dir()]
    for path in run.rglob("*"):
        assert path.resolve().is_relative_to(run.resolve()), f"{path} leads out of the run"
        assert "escaped" not in path.name


@pytest.mark.slow
def test_secrets_of_environment_and_trajectories_are_nowhere_in_what_a_run_leaves(done: Done) -> None:
    places = {"what was printed": done.told, **dict(texts_below(done.runs_dir)), **dict(texts_below(done.prefect_home))}
    assert len(places) > 40 and any(name.endswith("prefect.db/log") for name in places)
    assert "REMOVED" in str(places).upper(), "where a secret stood there is a word that says so"
    for name, text in places.items():
        for secret in (*IN_ENVIRONMENT.values(), *IN_TRAJECTORIES):
            assert secret not in text, f"{secret} stands in {name}"


def texts_below(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file as text: Parquet and SQLite decoded, row by row."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder.parent).as_posix()
        if not path.is_file():
            continue
        if path.suffix == ".parquet":
            yield name, str(pq.read_table(path).to_pylist())
        elif path.suffix == ".db":
            with sqlite3.connect(path) as database:
                database.text_factory = lambda data: data.decode(errors="replace")
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    yield f"{name}/{table}", str(database.execute(f'SELECT * FROM "{table}"').fetchall())
        else:
            yield name, path.read_bytes().decode("utf-8", "replace")


@pytest.mark.slow
def test_a_run_that_is_moved_to_another_place_is_read_and_gone_on_with_there(done: Done, tmp_path: Path) -> None:
    moved = tmp_path / "another disk" / "runs"
    shutil.copytree(done.runs_dir, moved, symlinks=True)
    hidden = done.runs_dir.rename(done.runs_dir.with_name("hidden"))
    try:
        run = Run.open(moved)
        assert [name for name in STAGES if run.result(name)] == STAGES_DONE
        env = os.environ | {
            "PREFECT_HOME": str(done.prefect_home),
            "PYTHONPATH": python_path(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
        again = [sys.executable, "-m", "flows.cli", "run", "--json", "--run", run.run_id, "--runs-dir", str(moved)]
        ran = subprocess.run(
            [*again, "--stages", ",".join(STAGES_DONE)],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ran.returncode == 0, ran.stderr
        stages = {stage["stage"]: stage for stage in json.loads(ran.stdout)["stages"]}
        assert all(stages[name]["reused"] for name in STAGES_DONE), "nothing is done again because it was moved"
        from traceforge_core.export.trained import open_trained

        trained = open_trained(run)
        assert trained.model_dir.is_relative_to(moved.resolve())
        assert all(path.is_relative_to(moved.resolve()) for path in trained.adapters.values())
    finally:
        hidden.rename(done.runs_dir)


# What is read must not be run -----------------------------------------------------------------------------------------

DANGEROUS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_no_module_reads_a_pickle_or_runs_text() -> None:
    found = []
    for folder in ("traceforge_core", "tasks", "flows", "deployments", "benchmarks"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if "cases" in path.parts or "data" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found += [f"{path.relative_to(REPOSITORY)}:{node.lineno} {what}" for what in dangers(node)]  # type: ignore[attr-defined]
    assert found == []


def dangers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in DANGEROUS)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in DANGEROUS:
        yield str(node.module)
    elif isinstance(node, ast.Call):
        name, keywords = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.load" and keywords.get("weights_only") != "True":
            yield "torch.load without weights_only"
        if name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
            yield "numpy.load with pickles"
        if name in ("eval", "exec", "yaml.unsafe_load", "yaml.full_load", "os.system"):
            yield name
        if name == "yaml.load" and [ast.unparse(argument) for argument in node.args[1:]] != ["_UniqueKeys"]:
            yield "yaml.load with a loader that may make objects"
        if keywords.get("shell") == "True" or keywords.get("trust_remote_code") == "True":
            yield f"{name}: shell or trust_remote_code"


def test_the_one_loader_of_yaml_makes_plain_data_only() -> None:
    assert issubclass(settings_yaml._UniqueKeys, yaml.SafeLoader)
    with pytest.raises(yaml.YAMLError):
        settings_yaml.read_yaml("!!python/object/apply:os.system ['true']")


def test_that_search_finds_what_it_looks_for() -> None:
    bad = "import pickle\nfrom joblib import load\ntorch.load(f)\nnp.load(f, allow_pickle=True)\n"
    bad += "yaml.load(f)\nrun(x, shell=True)\n"
    assert len([what for node in ast.walk(ast.parse(bad)) for what in dangers(node)]) == 6
    good = "torch.load(f, weights_only=True)\nnp.load(f)\nyaml.load(f, _UniqueKeys)\nyaml.safe_load(f)\njson.load(f)"
    assert not [what for node in ast.walk(ast.parse(good)) for what in dangers(node)]


def test_no_field_of_the_configuration_asks_for_a_secret() -> None:
    """A configuration is stored, shown and logged: secrets come from the environment or from Prefect blocks."""
    schema = json.dumps(RunConfig.model_json_schema()["$defs"])
    names = {name for section in json.loads(schema).values() for name in section.get("properties", {})}
    asked = {name for name in names if {"password", "secret", "api", "key", "credentials"} & set(name.split("_"))}
    assert asked == set() and "learning_rate" in names
