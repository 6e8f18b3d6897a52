"""Says before anything is loaded which strategy suits, what fits, and the longest pair that does.

    strategy, why = choose_strategy(dims, Setup(gpu_gib=24), prompt=77_824, completion=4_096, gpus=2)
    longest_prompt(dims, Setup(gpu_gib=24), "shared_prefix", completion=4_096)

What a length costs is in `estimate.py`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.estimate import GIB, RATES, Estimate, Kind, Rates, Setup, Work, estimate_work
from traceforge_core.longcontext.families import why_no_branches, why_no_shared_prefix, why_not_tiled
from traceforge_core.longcontext.memory import NF4_BYTES, Dimensions
from traceforge_core.paths import written


def longest_prompt(dims: Dimensions, setup: Setup, kind: Kind, completion: int) -> Estimate | None:
    """The longest prompt, in steps of 512 tokens, whose work with this completion fits; None where none does."""
    return _longest(dims, setup, lambda tokens: Work(kind, tokens, completion))


def _longest(dims: Dimensions, setup: Setup, work: Callable[[int], Work]) -> Estimate | None:
    """What fits of `work` of so many tokens, in steps of 512."""
    low, high = 0, 1 << 14  # in steps of 512 tokens
    if not estimate_work(dims, work(512), setup).fits(setup):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if estimate_work(dims, work(512 * middle), setup).fits(setup):
            low = middle
        else:
            high = middle
    return estimate_work(dims, work(512 * max(low, 1)), setup)


def read_dimensions(model: str, revision: str | None = None) -> Dimensions:
    """Dimensions of a model, which `read_config` reads. Raises TraceForgeError where it cannot be read."""
    config = read_config(model, revision)
    try:
        return Dimensions.of(config)
    except (ValueError, TypeError) as error:
        raise _unreadable(model, error) from None


def read_config(model: str, revision: str | None = None) -> Any:
    """The configuration of a model: a folder with config.json, the file itself, a hub id whose config can be had, or
    `tiny`. A dict, or a transformers config. A revision that is a commit and in the cache asks no hub.

    Raises TraceForgeError where it cannot be read.
    """
    if model == "tiny":
        from traceforge_core.modeling.tiny import SHAPE, VOCABULARY

        return {**SHAPE, "vocab_size": VOCABULARY, "model_type": "qwen3"}
    path = written(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it holds no JSON object")
            return found
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(model, error) from None


def _unreadable(model: str, error: Exception) -> TraceForgeError:
    return TraceForgeError(
        f"Cannot plan for {model}: its config.json cannot be read ({str(error).splitlines()[0]}). "
        "Give a folder that holds one, or a hub id that can be reached."
    )


def setup_of(config: RunConfig, kind: str, gpu_gib: float, host_gib: float | None, device_name: str = "H200") -> Setup:
    """The part of a run's configuration that matters for a training stage of this kind.

    `transport: auto` counts as NCCL, which it is where every worker has its own GPU.
    """
    model, section = config.model, config.long_context
    training = config.sft if kind == "sft" else config.preference
    width = 2 if model.dtype == "bfloat16" else 4
    return Setup(
        gpu_gib=gpu_gib,
        host_gib=host_gib,
        weight_bytes=NF4_BYTES if model.quantization == "nf4" else width,
        width=width,
        rank=model.lora.r,
        targets=tuple(model.lora.targets),
        optimizer_bytes=2 if training.optimizer == "adamw_8bit" else 8,
        accumulation=training.gradient_accumulation,
        replicas=config.preference.replicas,
        transport="gloo" if config.preference.transport == "gloo" else "nccl",
        tile=section.tile,
        groups=section.head_groups,
        recompute=section.recompute,
        inputs_on_device=section.inputs_on_device,
        chunk=section.logprob_chunk,
        rates=Rates.of(device_name),
    )


def choose_strategy(
    dims: Dimensions, setup: Setup, prompt: int, completion: int, gpus: int, unshared: str | None = None
) -> tuple[Kind, str]:
    """The faster strategy for pairs of this length on so many GPUs, and why, in one sentence.

    Two GPUs do a pair in the time of a branch, or two pairs in the time of a shared-prefix pass. unshared: why this
    model cannot share a prefix (`why_no_shared_prefix`). Raises TraceForgeError where neither fits, naming what would.
    """
    branch = estimate_work(dims, Work("branch_parallel", prompt, completion), setup)
    pair = estimate_work(dims, Work("shared_prefix", prompt, completion), setup)
    if not branch.fits(setup) and (unshared or not pair.fits(setup)):
        raise TraceForgeError(refusal(dims, setup, branch))
    if unshared:
        return "branch_parallel", unshared.rstrip(".")
    if gpus < 2:
        return "shared_prefix", "one GPU does both branches"
    if not pair.fits(setup):
        return (
            "branch_parallel",
            f"a shared-prefix pass needs {pair.peak / GIB:.1f} GiB, a branch {branch.peak / GIB:.1f}",
        )
    cost_branch, cost_pair = _cost(dims, branch, setup), _cost(dims, pair, setup) / 2
    share = f"a pair costs {cost_pair / cost_branch:.2f} of what it costs as two branches on two GPUs"
    return ("shared_prefix", share) if cost_pair < cost_branch else ("branch_parallel", share)


def _cost(dims: Dimensions, estimate: Estimate, setup: Setup) -> float:
    """Seconds; on a device that was never measured, those of one that was, for only their ratio counts."""
    return estimate.seconds or estimate_work(dims, estimate.work, replace(setup, rates=RATES[0])).seconds or 0.0


def refusal(dims: Dimensions, setup: Setup, estimate: Estimate) -> str:
    """Why an estimate does not fit, and which setting would make it fit."""
    work = estimate.work
    packed = replace(setup, weight_bytes=NF4_BYTES)
    one_by_one = {
        "model.quantization=nf4": packed,
        "long_context.head_groups=null long_context.tile=null (chosen by the free memory)": replace(
            setup, groups=None, tile=None
        ),
        "long_context.recompute=attention": replace(setup, recompute="attention"),
        "long_context.inputs_on_device=0": replace(setup, inputs_on_device=0),
        "long_context.logprob_chunk=256": replace(setup, chunk=min(256, setup.chunk)),
    }
    ways = [name for name, other in one_by_one.items() if estimate_work(dims, work, other).fits(setup)]
    if setup.host_gib is not None and estimate.host > setup.host_gib * GIB:
        for layers in range(setup.inputs_on_device + 1, dims.layers + 1):
            if estimate_work(dims, work, replace(setup, inputs_on_device=layers)).fits(setup):
                ways.append(f"long_context.inputs_on_device={layers}")
                break
    if (length := _longest_length(dims, setup, work)) is not None:
        ways.append(f"{length} (the longest that fits)")
    elif not ways and (length := _longest_length(dims, packed, work)) is not None:
        ways.append(f"model.quantization=nf4 {length} (the longest that fits so)")
    host = "" if setup.host_gib is None else f" and {setup.host_gib:.3g} GiB of host memory"
    return (
        f"{work.prompt:,} + {work.completion:,} tokens as {work.kind} need {estimate.peak / GIB:.1f} GiB of GPU memory "
        f"and {estimate.host / GIB:.1f} GiB of host memory; there are {setup.gpu_gib:.3g} GiB{host}. "
        + (f"Set {' or '.join(ways)}." if ways else "No setting makes this model fit.")
    )


def _longest_length(dims: Dimensions, setup: Setup, work: Work) -> str | None:
    """The setting of the datasets stage for the longest work of this kind that fits; None where none does."""
    if work.kind == "sft":
        longest = _longest(dims, setup, lambda tokens: Work("sft", 0, tokens))
    else:
        longest = longest_prompt(dims, setup, work.kind, work.completion)
    if longest is None:
        return None
    section = "sft" if work.kind == "sft" else "preference"
    return f"datasets.{section}.max_length={longest.work.prompt + longest.work.completion}"


def plan(
    config: RunConfig,
    *,
    model: str,
    prompt: int,
    completion: int,
    gpu_gib: float,
    host_gib: float | None,
    gpus: int,
    device_name: str = "H200",
) -> tuple[dict[str, Any], str]:
    """What `traceforge plan` shows: figures, and the same as text. Raises TraceForgeError for a model that cannot be
    read, or that tiled layers, whose costs these are, do not know."""
    dims, about = read_dimensions(model), read_config(model)
    if reason := why_not_tiled(about):
        raise TraceForgeError(f"Cannot plan for {model}. {reason}")
    unshared = why_no_shared_prefix(about)
    pairs: tuple[Kind, ...] = ("branch_parallel",) if unshared else ("branch_parallel", "shared_prefix")
    if apart := why_no_branches(about):
        pairs = ()
    kinds: tuple[Kind, ...] = (*pairs, "sft")
    setups = {kind: setup_of(config, kind, gpu_gib, host_gib, device_name) for kind in kinds}
    estimates = [estimate_work(dims, Work(kind, prompt, completion), setups[kind]) for kind in kinds]
    setup = setups[kinds[0]]  # that of every strategy
    longest = {kind: longest_prompt(dims, setup, kind, completion) for kind in pairs}
    strategy: Kind | None
    try:
        if apart:
            raise TraceForgeError(f"No strategy: {apart}")
        strategy, why = choose_strategy(dims, setup, prompt, completion, gpus, unshared)
        advice = f"Strategy on {gpus} GPU{'s' if gpus > 1 else ''}: {strategy} ({why})."
    except TraceForgeError as error:
        strategy, advice = None, str(error)
    weights = "NF4" if config.model.quantization == "nf4" or dims.packed else config.model.dtype
    times = f"; seconds as on one {device_name}" if setup.rates is not None else ""
    head = f"{model}: weights in {weights}, computed in {config.model.dtype}, LoRA r={config.model.lora.r}{times}."
    lines = [head, "", table(estimates, setup), "", advice]
    for kind, one in longest.items():
        lines.append(
            f"Longest prompt as {kind}: {one.work.prompt:,} + {completion:,} tokens "
            f"({one.peak / GIB:.1f} GiB, host {one.host / GIB:.1f} GiB)."
            if one
            else f"No pair fits as {kind}."
        )
    if setup.rates is None:
        lines.append(f"No time is given: {device_name} was never measured.")
    figures = {
        "work": [
            {"kind": one.work.kind, "peak_gib": one.peak / GIB, "host_gib": one.host / GIB, "seconds": one.seconds}
            | {"parts_gib": {name: size / GIB for name, size in one.parts.items()}, "fits": one.fits(setup)}
            for one in estimates
        ],
        "strategy": strategy,
        "advice": advice,
        "longest_prompt": {kind: one.work.prompt if one else None for kind, one in longest.items()},
    }
    return figures, "\n".join(lines)


def table(estimates: Sequence[Estimate], setup: Setup) -> str:
    """Estimates side by side, as lines of text."""
    names = list(dict.fromkeys(name for one in estimates for name, size in one.parts.items() if size))
    rows = [["", *(f"{one.work.kind} {one.work.prompt:,}+{one.work.completion:,}" for one in estimates)]]
    rows += [[f"{name} GiB", *(f"{one.parts.get(name, 0.0) / GIB:.2f}" for one in estimates)] for name in names]
    rows.append(["peak GiB", *(f"{one.peak / GIB:.2f}" for one in estimates)])
    rows.append(["host GiB", *(f"{one.host / GIB:.2f}" for one in estimates)])
    rows.append(["seconds", *("not measured" if one.seconds is None else f"{one.seconds:.1f}" for one in estimates)])
    rows.append([f"fits {setup.gpu_gib:.3g} GiB", *("yes" if one.fits(setup) else "no" for one in estimates)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(widths[0]) if not column else cell.rjust(widths[column]) for column, cell in enumerate(row)
        )
        for row in rows
    )


def plot(dims: Dimensions, setup: Setup, completion: int, path: Path, measured: Sequence[dict[str, Any]] = ()) -> None:
    """Length against peak GPU memory by strategy, the caps of common cards, and measured points where given.

    measured: {"kind", "prompt", "gib"} each. Writes a PNG. Raises TraceForgeError where it cannot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    lengths = [1024 * 2**step for step in range(3, 12)]
    for kind, colour, name in (
        ("branch_parallel", "tab:blue", "one branch"),
        ("shared_prefix", "tab:orange", "pair, shared prefix"),
    ):
        peaks = [estimate_work(dims, Work(kind, length, completion), setup).peak / GIB for length in lengths]  # type: ignore[arg-type]
        axes.plot([length / 1024 for length in lengths], peaks, color=colour, label=f"{name}, planned")
        points = [(one["prompt"] / 1024, one["gib"]) for one in measured if one["kind"] == kind]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, label=f"{name}, measured", zorder=3)
    for cap in (16, 24, 48, 80):
        axes.axhline(cap, color="grey", linewidth=0.7, linestyle="--")
        axes.text(lengths[0] / 1024, cap, f" {cap} GiB card", va="bottom", fontsize=8, color="grey")
    axes.set(xscale="log", yscale="log", xlabel="prompt, thousands of tokens (1,024)", ylabel="peak GPU memory, GiB")
    axes.set_xticks([length / 1024 for length in lengths], [str(length // 1024) for length in lengths])
    axes.set_yticks([8, 16, 24, 48, 80], ["8", "16", "24", "48", "80"])
    axes.minorticks_off()
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(written(path), dpi=150)
    except (OSError, ValueError) as error:  # ValueError: no format has that ending
        raise TraceForgeError(
            f"Cannot write the plot to {path}: {error}. Name a .png file in a folder that is there."
        ) from None
    finally:
        pyplot.close(figure)
