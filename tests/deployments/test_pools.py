"""Templates of the Docker and Kubernetes work pools, checked by Prefect's own validation and, where they are installed,
by the workers' own classes."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from jsonschema import Draft202012Validator
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.workers.base import BaseJobConfiguration

POOLS = Path(__file__).parents[2] / "deployments" / "pools"
WORKERS = {
    "docker": ("prefect_docker.worker", "DockerWorkerJobConfiguration"),
    "kubernetes": ("prefect_kubernetes.worker", "KubernetesWorkerJobConfiguration"),
}


def template(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((POOLS / f"{kind}.json").read_text(encoding="utf-8"))
    return content


def bundled(kind: str) -> dict[str, Any]:
    """What Prefect itself ships for this kind of pool."""
    import prefect.server.api.collections_data.views as views

    told = json.loads((Path(views.__path__[0]) / "aggregate-worker-metadata.json").read_text(encoding="utf-8"))
    content: dict[str, Any] = told[f"prefect-{kind}"][kind]["default_base_job_configuration"]
    return content


def render(of_worker: Any, kind: str, values: dict[str, Any]) -> Any:
    """What a worker makes of the template. A server would be asked only for blocks and variables: there are none."""
    nobody = PrefectClient("http://127.0.0.1:9/api")
    content = template(kind)
    return asyncio.run(of_worker.from_template_and_values(base_job_template=content, values=values, client=nobody))


@pytest.mark.parametrize("kind", WORKERS)
def test_prefect_accepts_the_template_for_a_pool(kind: str) -> None:
    pool = WorkPoolCreate(name="traceforge", type=kind, base_job_template=template(kind))
    assert pool.base_job_template["variables"]["properties"]["image"]["default"] == "traceforge:latest"
    broken = template(kind)
    del broken["variables"]["properties"]["image"]
    with pytest.raises(ValueError, match="image"):
        WorkPoolCreate(name="traceforge", type=kind, base_job_template=broken)


@pytest.mark.parametrize("kind", WORKERS)
def test_every_variable_is_used_described_and_has_a_valid_default(kind: str) -> None:
    content = template(kind)
    used = json.dumps(content["job_configuration"])
    Draft202012Validator.check_schema(content["variables"])
    for name, field in content["variables"]["properties"].items():
        assert f'"{{{{ {name} }}}}"' in used or f"{{{{ {name} }}}}-" in used, name
        assert field["description"].endswith("."), name
        if "default" in field:
            Draft202012Validator(field).validate(field["default"])
    assert set(content["job_configuration"]) - set(bundled(kind)["job_configuration"]) <= {"container_create_kwargs"}


@pytest.mark.parametrize("kind", WORKERS)
def test_the_values_of_a_run_reach_the_job(kind: str) -> None:
    values = {"image": "traceforge:1", "env": {"HF_HOME": "/models"}, "gpus": [] if kind == "docker" else 1}
    rendered = render(BaseJobConfiguration, kind, values)
    assert rendered.env == {"HF_HOME": "/models"}


@pytest.mark.parametrize("kind", WORKERS)
def test_the_workers_own_class_takes_it_with_gpus_runs_and_no_second_try(kind: str) -> None:
    module, name = WORKERS[kind]
    worker = pytest.importorskip(module, reason=f"prefect-{kind} is not installed; it is on machines with such a pool")
    configuration = render(getattr(worker, name), kind, {})
    configuration.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="a run"))
    if kind == "docker":
        assert configuration.container_create_kwargs["device_requests"][0]["capabilities"] == [["gpu"]]
        assert "traceforge-runs:/opt/traceforge/runs" in configuration.volumes and not configuration.privileged
        docker = importlib.import_module("docker.types")
        docker.HostConfig(version="1.44", device_requests=configuration.container_create_kwargs["device_requests"])
        return
    job = configuration.job_manifest["spec"]
    pod = job["template"]["spec"]
    assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never", "a failed training is not begun again"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {volume["name"] for volume in pod["volumes"]} == {"runs", "models", "shm"}
