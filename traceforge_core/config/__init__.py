"""The whole configuration of a run, as one tree of pydantic models.

    config = load_config(preset="tiny-cpu", file=Path("my.yaml"), assignments=["ingest.path=~/logs"])

A preset is a YAML file in `traceforge_core/presets`; a config file holds only what differs from its preset, which it
may name (`preset: NAME`); `--set` assignments come last. Everything is checked here, before anything heavy starts: a
wrong value fails within a second, with the field's name and the allowed values. Descriptions are shown in the UI and in
`traceforge config`.

    data.py       ingest, datasets          checks.py    comparison, evaluation, monitoring
    model.py      model                     tree.py      RunConfig, which holds all of them
    training.py   sft, preference, long_context, hosts
    loading.py    from presets, files and assignments to a RunConfig; settings_yaml.py reads their YAML
"""

from traceforge_core.config.checks import ComparisonConfig, EvaluationConfig, MonitoringConfig
from traceforge_core.config.data import (
    DatasetsConfig,
    IngestConfig,
    Miner,
    PreferenceDataConfig,
    SampledConfig,
    SftDataConfig,
    SplitConfig,
)
from traceforge_core.config.loading import (
    DEFAULT_PRESET,
    lay_over,
    load_config,
    preset_in,
    preset_names,
    validate_config,
)
from traceforge_core.config.model import LoraConfig, ModelConfig
from traceforge_core.config.training import (
    HostsConfig,
    LongContextConfig,
    PreferenceConfig,
    SftConfig,
    TrainingConfig,
)
from traceforge_core.config.tree import RunConfig

__all__ = [
    "DEFAULT_PRESET",
    "ComparisonConfig",
    "DatasetsConfig",
    "EvaluationConfig",
    "HostsConfig",
    "IngestConfig",
    "LongContextConfig",
    "LoraConfig",
    "Miner",
    "ModelConfig",
    "MonitoringConfig",
    "PreferenceConfig",
    "PreferenceDataConfig",
    "RunConfig",
    "SampledConfig",
    "SftConfig",
    "SftDataConfig",
    "SplitConfig",
    "TrainingConfig",
    "lay_over",
    "load_config",
    "preset_in",
    "preset_names",
    "validate_config",
]
