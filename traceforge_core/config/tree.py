"""The whole tree."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from traceforge_core.config.checks import ComparisonConfig, EvaluationConfig, MonitoringConfig
from traceforge_core.config.data import DatasetsConfig, IngestConfig
from traceforge_core.config.fields import Section
from traceforge_core.config.model import ModelConfig
from traceforge_core.config.training import HostsConfig, LongContextConfig, PreferenceConfig, SftConfig


class RunConfig(Section):
    """The whole configuration of a run."""

    model_config = ConfigDict(title="Configuration")

    ingest: IngestConfig = Field(default_factory=IngestConfig, description="Where trajectories come from.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model that is trained.")
    datasets: DatasetsConfig = Field(default_factory=DatasetsConfig, description="SFT samples and preference pairs.")
    sft: SftConfig = Field(default_factory=SftConfig, description="Supervised fine-tuning.")
    preference: PreferenceConfig = Field(default_factory=PreferenceConfig, description="SimPO, all strategies.")
    long_context: LongContextConfig = Field(
        default_factory=LongContextConfig, description="Memory use of tiled decoder layers."
    )
    comparison: ComparisonConfig = Field(default_factory=ComparisonConfig, description="Agreement with the oracle.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Figures on held-out data.")
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig, description="GPU and host monitor.")
    hosts: HostsConfig = Field(default_factory=HostsConfig, description="Training across several machines.")
