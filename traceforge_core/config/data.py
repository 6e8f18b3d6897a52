"""Sections of what is read and what is made of it: `ingest` and `datasets`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from traceforge_core.config.fields import Positive, Section, Seed

Miner = Literal["outcome", "recovery", "given", "sampled"]


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
        None,
        description="Keep at most this many samples; empty: all. blocks: of turns spread evenly over the corpus. "
        "native: of trajectories spread evenly, one of each (of its last turns) before a second of any.",
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
        description="Processes that tokenise the SFT samples of a large corpus; empty: one a core, at most 16. A small "
        "corpus is done in one.",
    )
