"""What a worker is to do, as one JSON file that the launcher (or torchrun, on several hosts) hands to every worker.

job = Job(kind="oracle", trainer=..., config=config, ...)
job.write(out_dir / "job.json")
job = Job.read(out_dir / "job.json")
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from traceforge_core.config import PreferenceConfig, RunConfig, SftConfig, validate_config
from traceforge_core.runs import run_folder_of, write_json
from traceforge_core.runs.stopping import STOP

Kind = Literal["sft", "oracle", "branch_parallel", "shared_prefix", "evaluate", "sample", "series"]
TRAINING = ("sft", "oracle", "branch_parallel", "shared_prefix")
"""The kinds that train and leave an adapter; stages of the same names."""
STRATEGIES: tuple[Kind, ...] = ("branch_parallel", "shared_prefix")
"""Those that compute the oracle's function in another way, and are held against it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training stage, as every one of its workers sees it.

    trainer: `module:Class` of the trainer; for `evaluate`, `sample` and `series` `module:function`, which does the work
    itself.
    data, held_out: Parquet files (contract of the datasets stage); held_out is None where nothing is evaluated.
    adapter: folder of the adapter to go on from, None for a fresh one. branches: 2 where chosen and rejected have a
    worker each, else 1. replicas: of the data; there are branches × replicas workers. planted_fault: a mistake of
    comparison/faults that the workers make on purpose; no configuration can ask for one. device: "cpu" or "cuda".
    cut_to: pairs are cut to branches of at most so many tokens, None for whole ones.
    backend: "transformers" or "unsloth". transport: what carries gradients ("gloo", "nccl").
    """

    kind: Kind
    trainer: str
    config: RunConfig
    model_dir: Path
    data: Path
    out_dir: Path
    held_out: Path | None = None
    adapter: Path | None = None
    branches: int = 1
    replicas: int = 1
    device: str = "cpu"
    backend: str = "transformers"
    transport: str = "gloo"
    planted_fault: str | None = None
    cut_to: int | None = None

    @property
    def workers(self) -> int:
        return self.branches * self.replicas

    @property
    def hosts(self) -> int:
        """Machines that share the workers: more than one only for the strategies that have several workers."""
        return self.config.hosts.count if self.kind in STRATEGIES and self.workers > 1 else 1

    @property
    def section(self) -> SftConfig | PreferenceConfig:
        """The training section of the configuration that this job follows."""
        return self.config.sft if self.kind == "sft" else self.config.preference

    @property
    def run_folder(self) -> Path:
        """The folder of the run that this job works for; its own where it works for none."""
        return run_folder_of(self.out_dir)

    @property
    def stop_file(self) -> Path:
        """Where a file appears when somebody wants this job to stop."""
        return self.run_folder / STOP

    @property
    def label(self) -> str:
        """What this job is within its run: its stage, and its part of that where it is only one."""
        try:
            return self.out_dir.relative_to(self.run_folder / ".partial").as_posix()
        except ValueError:
            return self.kind

    def describe(self, rank: int) -> str:
        """What a worker is, for messages: "worker 1 of 2 (rejected)"."""
        if self.branches == 1:
            part = f"replica {rank}" if self.replicas > 1 else self.kind
        else:
            part = ("chosen", "rejected")[rank % 2] + (f", replica {rank // 2}" if self.replicas > 1 else "")
        return f"worker {rank} of {self.workers} ({part})"

    def write(self, path: Path) -> None:
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        fields["config"] = self.config.model_dump(mode="json")
        write_json(path, fields)

    @classmethod
    def read(cls, path: Path) -> Job:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["config"] = validate_config(fields["config"])
        for name in ("model_dir", "data", "out_dir", "held_out", "adapter"):
            fields[name] = Path(fields[name]) if fields[name] is not None else None
        return cls(**fields)
