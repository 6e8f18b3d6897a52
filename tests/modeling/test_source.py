"""A model is found in a folder or on the hub, and what cannot be used is refused with the reason."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.modeling.conftest import change
from tests.python_path import python_path
from traceforge_core.config import ModelConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.source import find_model

REPOSITORY = Path(__file__).parents[2]


def adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}', encoding="utf-8")


def adapter_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}', encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(b"")


def half_downloaded(folder: Path) -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json, so it is not a model"),
        (adapter, r"is an adapter \(LoRA\).* its base model is: Qwen/Qwen3-8B\. Name the base"),
        (adapter_beside, r"holds a whole model and an adapter \(LoRA\) beside it .*name a copy without adapter_config"),
        (half_downloaded, r"lacks 1 \(model-00002-of-00002\.safetensors\) of its weight files.*fetch it again"),
        (
            lambda folder: os.truncate(folder / "model.safetensors", 1000),
            r"model\.safetensors\) of the weight files cannot",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), r"lacks 1 \(model\.safetensors\) of its weight files"),
        (lambda folder: (folder / "config.json").write_text('{"vocab_size": '), r"Cannot read .*config\.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"holds no JSON object"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), r"Cannot read .*config\.json"),
        (lambda folder: change(folder / "config.json", text_config=["q"]), r"text_config is \['q'\], where an object"),
        (lambda folder: change(folder / "config.json", vocab_size="2k"), r"vocab_size is '2k', where a whole number"),
        (lambda folder: change(folder / "config.json", architectures=5), r"architectures is 5, where a list belongs"),
    ],
    ids=[
        "no config",
        "adapter",
        "adapter beside",
        "half",
        "cut weights",
        "no weights",
        "torn config",
        "odd config",
        "deep config",
        "odd section",
        "odd size",
        "odd list",
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(
    model: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(model)
    with pytest.raises(TraceForgeError, match=message):
        find_model(ModelConfig(name=str(model)))


@pytest.mark.parametrize("name", ["/no/such/model", "./models/qwen", "~/no-such-model-here", "a/b/c"])
def test_a_path_that_is_not_there_is_named_without_asking_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceForgeError, match=r"There is no model at .*model\.name"):
        find_model(ModelConfig(name=name))


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(TraceForgeError, match="which is a file"):
        find_model(ModelConfig(name=str(tmp_path / "model.gguf")))


# The hub: a small server of its own, since tests must not depend on the network.

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks about a model and its files; errors by the name of the repository."""

    root: Path

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0].lstrip("/")
        if path.startswith("api/models/"):
            owner, name, *rest = path.removeprefix("api/models/").split("/")
            folder = self.root / owner / name
            if owner == "gated":
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
            if not folder.is_dir():
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            if rest[:1] == ["tree"]:
                return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body)  # no folder of templates
            files = [{"rfilename": file.name} for file in folder.iterdir()]
            body = {"id": f"{owner}/{name}", "modelId": f"{owner}/{name}", "sha": COMMIT, "siblings": files}
            return self._send(200, json.dumps(body).encode(), {}, with_body)
        owner, name, _, _, *parts = path.split("/")
        file = self.root / owner / name / "/".join(parts)
        headers = {"X-Repo-Commit": COMMIT}
        if not file.is_file():
            return self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"}, with_body)
        content = file.read_bytes()
        return self._send(200, content, headers | {"ETag": f'"{hash(content):x}"'}, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("hub")
    whole = shutil.copytree(tiny_folder, root / "some" / "tiny")
    (Path(whole) / "model.safetensors").write_bytes(b"never to be fetched")
    adapter(Path(shutil.copytree(tiny_folder, root / "some" / "adapter")))
    adapter_beside(Path(shutil.copytree(tiny_folder, root / "some" / "both")))
    (root / "some" / "gguf").mkdir()
    (root / "some" / "gguf" / "model.gguf").write_bytes(b"GGUF")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("RootedHub", (Hub,), {"root": root}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


SCRIPT = """
import json, sys
from pathlib import Path
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.prepare import prepare_model
out = Path(sys.argv[1]); out.mkdir(parents=True)
try:
    prepare_model(RunConfig.model_validate({"model": json.loads(sys.argv[2])}), {}, out)
    print((out / "model.json").read_text())
except TraceForgeError as error:
    sys.exit(f"refused: {error}")
"""


def prepare_from_hub(
    out_dir: Path, cache: Path, endpoint: str, offline: bool = False, **fields: Any
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its endpoint and cache once, when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out_dir), json.dumps(fields)],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(cache),
            "PYTHONPATH": python_path(),
            "HF_HOME": str(cache),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_hub_id_is_pinned_to_its_commit_and_works_offline_afterwards(hub: str, tmp_path: Path) -> None:
    done = prepare_from_hub(tmp_path / "out", tmp_path / "cache", hub, name="some/tiny")
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout)
    assert (described["weights"], described["revision"]) == ("some/tiny", COMMIT)
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    again = prepare_from_hub(tmp_path / "again", tmp_path / "cache", hub, offline=True, name="some/tiny")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == described


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "some/adapter"},
            "some/adapter is an adapter (LoRA), not a whole model; its base model is: Qwen/Qwen3-8B",
        ),
        ({"name": "some/both"}, "some/both holds a whole model and an adapter (LoRA) beside it"),
        ({"name": "some/gguf"}, "has no config.json"),
        ({"name": "some/nothing"}, "no such model on the hub"),
        ({"name": "gated/model"}, "asks for its licence to be accepted"),
        ({"name": "some/tiny", "revision": "v9"}, "has no revision 'v9' (model.revision)"),
        ({"name": "no such name"}, "neither a folder that is there nor a hub id"),
    ],
    ids=["adapter", "both", "gguf", "missing", "gated", "revision", "not an id"],
)
def test_what_the_hub_refuses_is_said_in_one_message(
    hub: str, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    done = prepare_from_hub(tmp_path / "out", tmp_path / "cache", hub, **fields)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (adapter_beside, "some/tiny holds a whole model and an adapter (LoRA) beside it"),
        (adapter, "is an adapter (LoRA)"),
    ],
    ids=["both", "adapter"],
)
def test_an_adapter_in_the_cache_is_refused_offline_as_one_on_the_hub_is(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    # As huggingface_hub lays its cache out, of which transformers loads the adapter too.
    repository = tmp_path / "cache" / "hub" / "models--some--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    spoil(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    done = prepare_from_hub(tmp_path / "out", tmp_path / "cache", "http://127.0.0.1:9", offline=True, name="some/tiny")
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False], ids=["told to be offline", "nobody answers"])
def test_a_hub_that_cannot_be_reached_is_said_soon(tmp_path: Path, offline: bool) -> None:
    done = prepare_from_hub(tmp_path / "out", tmp_path / "cache", "http://127.0.0.1:9", offline, name="Qwen/Qwen3-8B")
    assert done.returncode == 1
    assert "the hub cannot be reached" in done.stderr and "model.name=tiny" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out" / "model.json").exists()
