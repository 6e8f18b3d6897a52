"""The whole configuration of a run, as one tree of pydantic models.

    config = load_config(preset="tiny-cpu", file=Path("my.yaml"), assignments=["ingest.path=~/logs"])

A preset is a YAML file in `traceforge_core/presets`; a config file holds only what differs from its preset, which it
may name (`preset: NAME`); `--set` assignments come last. Everything is checked here, before anything heavy starts: a
wrong value fails within a second, with the field's name and the allowed values. Descriptions are shown in the UI and in
`traceforge config`.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from traceforge_core.errors import TraceForgeError
from traceforge_core.settings_yaml import NOT_YAML, read_yaml

Miner = Literal["outcome", "recovery", "given", "sampled"]
Strategy = Literal["oracle", "branch_parallel", "shared_prefix"]
Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes
# YAML 1.1 reads a bare on or off as true or false.
Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]


class Section(BaseModel):
    """One section of the tree: unknown names are errors, values are checked on assignment too."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        # What a form calls it: "Long Context".
        model_title_generator=lambda section: re.sub(
            r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config")
        ),
    )


class IngestConfig(Section):
    """Where trajectories come from."""

    path: str = Field(
        "samples",
        min_length=1,
        description="Folder or file with trajectories (searched recursively), or `samples`: those shipped here.",
    )
    outcomes: list[str] = Field(
        default_factory=list,
        description="More outcome files (SWE-bench run reports, per-instance reports, a CSV or JSONL table of case, "
        "run, resolved) or folders of them. Those inside `path` are found by themselves.",
    )
    workers: Positive | None = Field(None, description="Processes that read trajectories; empty: one a core.")
    cluster: Literal["none", "dask", "ray"] = Field(
        "none",
        description="Read on a Dask or Ray cluster whose machines see the same files at the same paths (needs "
        "the extra of that name). none: processes on this machine.",
    )
    cluster_address: str | None = Field(
        None, description="Where the cluster answers (tcp://host:8786, ray://host:10001); empty: one started here."
    )


class SplitConfig(Section):
    """Which cases are held out. A case is never on both sides."""

    held_out: float = Field(0.1, ge=0, lt=1, description="Share of the cases kept out of training, for evaluation.")
    by: Literal["case", "repository"] = Field(
        "case", description="repository: all cases of a repository (owner__name-123) stay on one side."
    )
    seed: Seed = Field(0, description="Changes which cases are held out.")


class SftDataConfig(Section):
    """How trajectories become SFT samples."""

    style: Literal["blocks", "native"] = Field(
        "blocks",
        description="blocks: one sample an assistant turn, the history as [ROLE #idx] blocks in one user message. "
        "native: one sample a trajectory (more where it is longer than max_length), chat messages with tool calls, "
        "loss on every assistant turn.",
    )
    max_length: Positive = Field(
        32768,
        description="Longest sample in tokens. Longer: history is trimmed in the middle, whole messages at a time.",
    )
    loss_on: Literal["completion", "everything"] = Field(
        "completion", description="completion: only what the model must produce. everything: the plain baseline."
    )
    outcomes: Literal["resolved", "all"] = Field(
        "all", description="resolved: learn only from runs known to have solved their case. all: from every run."
    )
    repeated_turns: Literal["once", "every"] = Field(
        "once",
        description="Equal turns after equal histories in several trajectories (resumed and forked sessions, runs that "
        "begin alike). once: learnt in one of them, context in the others. every: learnt each time.",
    )
    max_samples: Positive | None = Field(
        None, description="Keep at most this many samples (native: trajectories), spread evenly; empty: all."
    )


class SampledConfig(Section):
    """How the miner `sampled` draws turns from the current policy."""

    adapter: str | None = Field(None, description="Folder of the adapter that is the policy; empty: the base model.")
    sides: list[Literal["rejected", "chosen"]] = Field(
        ["rejected", "chosen"],
        min_length=1,
        description="What a drawn turn may be. rejected: drawn where the recorded turn worked, and a rule faults it. "
        "chosen: drawn where the recorded turn failed, and it makes the call that the run later made with success.",
    )
    histories: Positive = Field(64, description="At how many recorded turns to draw, spread over the corpus.")
    draws: Positive = Field(2, description="Turns drawn at each.")
    new_tokens: Positive = Field(512, description="Longest drawn turn in tokens; one that does not end is not used.")
    batch_size: Positive = Field(8, description="Turns drawn at a time.")
    temperature: float = Field(1.0, gt=0, description="Softmax temperature.")
    seed: Seed = Field(0, description="Seed of the draws.")


class PreferenceDataConfig(Section):
    """How trajectories become preference pairs."""

    miners: list[Miner] = Field(
        ["outcome", "recovery"],
        min_length=1,
        description="outcome: resolved against unresolved runs with an equal prompt. recovery: inside one run, a "
        "failed action against the later one that worked, after the same history. given: pairs from the file `given`. "
        "sampled: a recorded turn against one that the current policy draws there and a rule judges (sampled.sides).",
    )
    given: str | None = Field(None, description="JSONL of ready pairs: prompt, chosen, rejected (message lists).")
    sampled: SampledConfig = Field(default_factory=SampledConfig, description="Turns drawn from the current policy.")
    max_length: Positive = Field(
        81920, description="Longest branch (prompt + completion) in tokens. Longer pairs are dropped and counted."
    )
    max_pairs_per_case: Positive = Field(
        4, description="At most this many pairs of one case, shortest first, taken from each miner in turn."
    )
    recovery_within: Positive = Field(3, description="How many turns after a failed action one that worked may come.")
    max_extra_rounds: Annotated[int, Field(ge=0)] | None = Field(
        None, description="outcome: cut the rejected run to the chosen's number of turns plus this; empty: never."
    )
    max_token_ratio: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Drop pairs where one side has over this many times the other's scored tokens; empty: keep."
    )
    near_duplicate: float = Field(
        0.9, gt=0, le=1, description="Of pairs of one case whose both sides share this part of their 5-grams, keep one."
    )

    @model_validator(mode="after")
    def _given_needs_a_file(self) -> PreferenceDataConfig:
        if "given" in self.miners and not self.given:
            raise ValueError("miners names 'given', so `given` must name a JSONL file of ready pairs")
        return self


class DatasetsConfig(Section):
    """The two datasets and their split."""

    split: SplitConfig = Field(default_factory=SplitConfig, description="Which cases are held out.")
    sft: SftDataConfig = Field(default_factory=SftDataConfig, description="SFT samples.")
    preference: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig, description="Preference pairs.")
    workers: Positive | None = Field(
        None,
        description="Processes that tokenise the SFT samples of a large corpus; empty: one a core, at most 8. A small "
        "corpus is done in one.",
    )


class LoraConfig(Section):
    """The adapter that is trained."""

    r: Positive = Field(16, description="Rank.")
    alpha: Positive = Field(16, description="Scaling: the update is multiplied by alpha / r.")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="Names of the linear layers that get an adapter.",
    )


class ModelConfig(Section):
    """The model that is trained."""

    name: str = Field(
        "tiny",
        min_length=1,
        description="tiny: a small Qwen3 built on the spot, no download. Else a local folder or a hub id "
        "(Qwen/Qwen3-8B, a bnb-4bit checkpoint, ...).",
    )
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch); empty: the default branch.")
    backend: Literal["auto", "transformers", "unsloth"] = Field(
        "auto",
        description="auto: unsloth on CUDA where it is installed, else transformers. The oracle never uses unsloth.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models are trained. auto: CUDA where there is a GPU, else the CPU."
    )
    quantization: Literal["none", "nf4"] = Field(
        "none", description="nf4: 4-bit base weights (needs CUDA and bitsandbytes)."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Compute type of the base model.")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="Attention implementation in transformers.")
    chat_template: Literal["auto", "model", "chatml", "llama3"] = Field(
        "auto",
        description="model: the tokenizer's own. chatml, llama3: TraceForge's (keep all reasoning and calls, mark the "
        "model's tokens), for tokenizers with <|im_start|> or <|start_header_id|>. auto: the tokenizer's own where it "
        "loses nothing, else the one of ours that fits.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless you trust it."
    )
    cublaslt: Switch = Field(
        "auto",
        description="Prefer cuBLASLt for matrix products: works around CUBLAS_STATUS_INVALID_VALUE, seen in bf16 GEMMs "
        "on Ampere cards. auto: on for compute capability 8.x.",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The adapter that is trained.")


class TrainingConfig(Section):
    """What SFT and preference training have in common."""

    epochs: float = Field(1.0, gt=0, description="Passes over the data; ignored where max_steps is set.")
    max_steps: Positive | None = Field(None, description="Optimizer steps; empty: as many as `epochs` needs.")
    batch_size: Positive = Field(1, description="Samples (or pairs) a forward pass.")
    gradient_accumulation: Positive = Field(1, description="Forward passes an optimizer step.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    schedule: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "cosine", description="Learning-rate schedule."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="Steps over which the rate rises from zero.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are clipped to this L2 norm; 0: never.")
    optimizer: Literal["adamw_torch", "adamw_8bit"] = Field(
        "adamw_torch", description="adamw_8bit needs CUDA and bitsandbytes."
    )
    gradient_checkpointing: bool = Field(True, description="Recompute activations in the backward to save memory.")
    long_context: Switch = Field(
        "auto",
        description="Tiled decoder layers with their inputs in host memory (section long_context). auto: on CUDA, for "
        "sequences of at least long_context.from_tokens. Exact, so nothing but time and memory changes.",
    )
    checkpoint_steps: Positive = Field(50, description="Save a checkpoint to resume from every so many steps.")
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default_factory=list,
        description="Trackers to log to besides metrics.jsonl; each must be installed (there is an extra of its name). "
        "They write to trackers/ in the run's folder; wandb does so offline where there is no WANDB_API_KEY.",
    )
    seed: Seed = Field(0, description="Seed of data order and adapter initialisation.")
    evaluate: bool = Field(False, description="Evaluate on the held-out data before and after training.")
    hang_seconds: Positive = Field(
        1800, description="A worker that shows no progress for so long is taken to hang, and the stage is ended."
    )


class SftConfig(TrainingConfig):
    """Supervised fine-tuning with TRL's SFTTrainer."""


class PreferenceConfig(TrainingConfig):
    """SimPO, the same function for every strategy: L = -log σ(beta·(ā_chosen - ā_rejected) - simpo_gamma)."""

    learning_rate: float = Field(5e-6, gt=0, description="Peak learning rate.")
    start_from: Literal["sft", "base"] = Field(
        "sft", description="Begin from the SFT adapter, or a fresh one on the base model."
    )
    strategy: Literal["auto", "branch_parallel", "shared_prefix"] = Field(
        "branch_parallel",
        description="How the long-context stage computes a step. branch_parallel: chosen and rejected on two workers. "
        "shared_prefix: both branches in one sequence on one worker. auto: what the planner expects to be faster.",
    )
    beta: float = Field(2.0, gt=0, description="Scale β of the score difference.")
    simpo_gamma: float = Field(
        0.5, ge=0, description="Target margin γ, absolute as in TRL (SimPO's own configs give γ/β)."
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Share of labels assumed wrong.")
    cpo_alpha: float = Field(0.0, ge=0, description="Weight of the NLL term on the chosen branch; 0 is plain SimPO.")
    replicas: Positive = Field(
        1, description="Pairs in flight: branch_parallel uses 2 workers a replica, shared_prefix 1."
    )
    transport: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="auto: NCCL where each worker has its own GPU, else gloo."
    )
    share_gpu: bool = Field(
        False, description="Let workers share a GPU where there are too few: slow, over gloo; for trying things out."
    )


class LongContextConfig(Section):
    """How tiled decoder layers use memory. Nothing here changes what is computed, beyond rounding."""

    from_tokens: Positive = Field(16384, description="Shortest sequence that `long_context: auto` computes in tiles.")
    tile: Positive | None = Field(None, description="Tokens worked on at once; empty: what the free memory allows.")
    head_groups: Positive | None = Field(
        None, description="Parts in which KV heads are attended to, one after another; empty: by the free memory."
    )
    recompute: Literal["attention", "none"] = Field(
        "attention",
        description="attention: the backward computes attention again. none: its output waits in host memory instead, "
        "which is faster and takes twice the host memory.",
    )
    inputs_on_device: Annotated[int, Field(ge=0)] = Field(
        0, description="So many layers' inputs stay in GPU memory, to spare host memory."
    )
    logprob_chunk: Positive = Field(1024, description="Positions whose logits exist at once.")


class ComparisonConfig(Section):
    """How closely a strategy must agree with the oracle."""

    oracle_max_length: Annotated[int, Field(ge=16)] | None = Field(
        None,
        description="Longest branch the oracle can hold, in tokens: its full logits of a long pair fit on no GPU. With "
        "this set, oracle and strategy take `oracle_steps` steps on pairs cut to this length, which are compared; the "
        "strategy then trains on the whole pairs. Empty: both train on whole pairs, and those runs are compared.",
    )
    oracle_steps: Positive = Field(10, description="Optimizer steps on cut pairs; only with oracle_max_length.")
    gradient_steps: Annotated[int, Field(ge=0)] = Field(
        5, description="Optimizer steps whose gradients are saved and compared, from the first; 0: none."
    )
    loss_atol: float = Field(
        1e-6,
        gt=0,
        description="float32: largest loss difference at any step, for scores and losses up to 1; in proportion.",
    )
    gradient_rtol: float = Field(1e-5, gt=0, description="float32: largest relative L2 difference of any gradient.")
    adapter_rtol: float = Field(
        1e-5, gt=0, description="float32: largest relative L2 difference of the final adapters."
    )
    noise_runs: Annotated[int, Field(ge=0, le=12)] = Field(
        8,
        description="bfloat16: how often the oracle is run again, in ways that must not matter, to learn its own "
        "noise; 0: never, and the verdict stays undecided. Fewer than 4 say little.",
    )
    noise_steps: Positive = Field(
        6, description="Optimizer steps of each of these runs (in float32 of two that show what single gradients lose)."
    )
    confidence: float = Field(
        0.999, ge=0.9, lt=1, description="bfloat16: chance that a right strategy raises no alarm, over all tests."
    )
    exact: Switch = Field(
        "auto",
        description="bfloat16: compare in float32 too, on a few steps, where rounding hides nothing: the whole model "
        "where it is small, else its first two layers. auto: where memory allows.",
    )


class EvaluationConfig(Section):
    """What every model of a run is measured on: base, after SFT, after each preference strategy."""

    max_pairs: Annotated[int, Field(ge=0)] = Field(
        64, description="At most this many held-out pairs, spread evenly over them; 0: none."
    )
    max_actions: Annotated[int, Field(ge=0)] = Field(
        64, description="At most this many held-out next actions, spread evenly over them; 0: none."
    )


class MonitoringConfig(Section):
    """The monitor that runs beside training."""

    enabled: bool = Field(True, description="Sample GPUs (and host) while the flow runs.")
    interval_seconds: float = Field(2.0, gt=0, description="Time between samples.")


class HostsConfig(Section):
    """Machines that share the workers of a long-context strategy. They must see the runs folder under the same path."""

    count: Positive = Field(1, description="How many, this one included. Each gets an equal part of the workers.")
    address: str | None = Field(
        None,
        pattern=r"^[^\s:/]+:\d+$",
        description="HOST:PORT of this machine where the others meet it; the log says what to start on them.",
    )

    @model_validator(mode="after")
    def _others_need_an_address(self) -> HostsConfig:
        if self.count > 1 and self.address is None:
            raise ValueError("hosts.count above 1 needs hosts.address, where the other machines meet this one")
        return self


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


DEFAULT_PRESET = "tiny-cpu"


def preset_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    folder = resources.files("traceforge_core") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(preset: str | None = None, file: Path | None = None, assignments: list[str] | None = None) -> RunConfig:
    """The preset, with the file's fields laid over it, then each `section.field=value` assignment (value is YAML).

    preset: None means the one that the file names (`preset: NAME`), else the default. Raises TraceForgeError naming the
    field and what is allowed.
    """
    upper = _read_config_file(file) if file is not None else {}
    chosen = preset or upper.get("preset") or DEFAULT_PRESET
    if chosen not in preset_names():
        where = f" ({file})" if chosen != preset and file is not None else ""
        raise TraceForgeError(f"There is no preset {chosen!r}{where}. Presets: {', '.join(preset_names())}.")
    preset_text = (resources.files("traceforge_core") / "presets" / f"{chosen}.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = read_yaml(preset_text) or {}
    _lay_over(tree, {name: value for name, value in upper.items() if name != "preset"})
    for assignment in assignments or []:
        _lay_over(tree, _parse_assignment(assignment))
    return validate_config(tree)


def preset_in(file: Path | None) -> str | None:
    """The preset that a config file names; None where it names none. Raises TraceForgeError where it cannot be read."""
    return _read_config_file(file).get("preset") if file is not None else None


def lay_over(config: RunConfig, upper: RunConfig | None = None, assignments: list[str] | None = None) -> RunConfig:
    """A configuration with the fields given in `upper` (not its defaults), then assignments, laid over it."""
    tree = config.model_dump(mode="json")
    if upper is not None:
        _lay_over(tree, upper.model_dump(mode="json", exclude_unset=True))
    for assignment in assignments or []:
        _lay_over(tree, _parse_assignment(assignment))
    return validate_config(tree)


def validate_config(tree: dict[str, Any]) -> RunConfig:
    """A RunConfig from plain data. Raises TraceForgeError with one line a wrong field."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "config"
            if problem["type"] == "extra_forbidden":
                lines.append(f"  {where}: no such field. Fields there: {', '.join(_fields_at(problem['loc'][:-1]))}")
            else:
                lines.append(f"  {where}: {problem['msg']} (given: {problem['input']!r})")
        raise TraceForgeError("The configuration is wrong:\n" + "\n".join(lines)) from None


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for name in location:
        annotation = section.model_fields[str(name)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return list(section.model_fields)


def _read_config_file(file: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceForgeError(f"Cannot read the config file {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise TraceForgeError(f"The config file {file} is not UTF-8 text: {error}. Save it as UTF-8.") from None
    except NOT_YAML as error:
        raise TraceForgeError(f"The config file {file} is not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise TraceForgeError(
            f"The config file {file} must hold sections (ingest:, model:, ...), not a {type(tree).__name__}."
        )
    return _without_empty_sections(tree, RunConfig)


def _without_empty_sections(tree: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """YAML reads a section whose lines are all commented out as null; it means that nothing differs there."""
    kept = {}
    for name, value in tree.items():
        field = section.model_fields.get(name)
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if value is None:
                continue
            value = _without_empty_sections(value, inner) if isinstance(value, dict) else value
        kept[name] = value
    return kept


def _parse_assignment(assignment: str) -> dict[str, Any]:
    name, equals, text = assignment.partition("=")
    if not equals or not name.strip():
        raise TraceForgeError(f"--set takes section.field=value, such as ingest.path=~/logs (given: {assignment!r}).")
    try:
        value = read_yaml(text)
        if isinstance(value, str):
            value = float(value) if _is_plain_exponent(value) else value
    except NOT_YAML:
        value = text
    tree: Any = value
    for part in reversed(name.strip().split(".")):
        tree = {part: tree}
    whole: dict[str, Any] = tree
    return whole


def _is_plain_exponent(text: str) -> bool:
    """YAML 1.1 reads 1e-5 as text (it wants 1.0e-5); people write 1e-5."""
    mantissa, e, exponent = text.lower().partition("e")
    return bool(e) and mantissa.lstrip("+-").isdigit() and exponent.lstrip("+-").isdigit()


def _lay_over(tree: dict[str, Any], upper: dict[str, Any]) -> None:
    for name, value in upper.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _lay_over(tree[name], value)
        else:
            tree[name] = value
