"""Merge an adapter into its base model, and check what came out.

    figures = export_run(Run.open(Path("runs")), Path("my-model"))

The folder is in Hugging Face layout (config, safetensors, tokenizer with its chat template, generation config, model
card): plain transformers loads it, and so does vLLM. It appears when it is whole and its logits have been checked.

The check: logits of the folder, loaded as anyone would, against those of base + adapter kept apart, in the same dtype,
on held-out text. Two right computations differ by rounding, so the difference is judged by what rounding the merged
weights once more does to the logits: moving one weight in twelve by one unit in the last place has the variance of
rounding (a rounding error is uniform over ±½ unit, variance 1/12).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.export.model_card import write_card
from traceforge_core.export.trained import open_trained
from traceforge_core.export.vllm_layout import model_problems
from traceforge_core.runs import Run, disk_is_full, full_disk, share_files, write_json
from traceforge_core.runs.disk import require_room

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
Dtype = Literal["bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
MARK = "traceforge_export.json"
PROMPTS = 4
PROMPT_TOKENS = 256
KEPT_POSITIONS = 64
SHARD_SIZE = "5GB"
ROUNDING_FACTOR = 3.0
"""How many times the effect of rounding is still rounding: merging rounds a weight twice (the update, the sum), and the
two sides round their activations in other places. Right merges of the tiny model lie between 1.0 and 1.5."""


def export_run(run: Run, out: Path, stage: str | None = None, dtype: Dtype | None = None) -> dict[str, Any]:
    """Export a run's adapter: of `stage`, or of the last kind of training there is. Returns the check's figures, path,
    stage and bytes. dtype: bfloat16, but float32 where the run's model is computed in it.

    Raises TraceForgeError where there is no adapter, `out` is something else, or the logits do not agree.
    """
    trained = open_trained(run)
    name, adapter = trained.adapter(stage)
    figures = {done: result.figures for done, result in trained.stages.items()}
    return export(
        trained.config,
        trained.model_dir,
        adapter,
        out,
        dtype=dtype,
        stage=name,
        datasets=trained.datasets,
        stages=figures,
    )


def export(
    config: RunConfig,
    model_dir: Path,
    adapter: Path,
    out: Path,
    *,
    dtype: Dtype | None = None,
    stage: str = "sft",
    datasets: Path | None = None,
    stages: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Export any adapter of the model in `model_dir` (a finished model stage); see `export_run`.

    stage, stages: how it was trained and the figures of finished stages, for the model card. datasets: a finished
    datasets stage whose held-out text the check is made on; without one, a short conversation is.
    """
    if not (adapter / "adapter_config.json").is_file():
        raise TraceForgeError(f"There is no adapter in {adapter} (adapter_config.json is missing).")
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise TraceForgeError(f"{out} is there and is no earlier export, so it is left alone. Name another --out.")
    wanted: Dtype = dtype or config.model.dtype
    scratch = out.absolute().with_name(f".{out.name}.partial")
    with _scratch(scratch):
        check = _merge(config, model_dir, adapter, scratch, wanted, datasets)
        model = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))
        write_card(scratch, "merged", stage, config, model, stages or {}, check)
        write_json(scratch / MARK, check | {"stage": stage})
        size = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        if out.exists():
            shutil.rmtree(out)
        share_files(scratch)
        scratch.rename(out)
    return check | {"stage": stage, "path": str(out.absolute()), "bytes": size}


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """A folder to fill, which is gone afterwards unless it was renamed. A full disk becomes a TraceForgeError."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield
    except Exception as error:
        if disk_is_full(error):
            what = f"the exported model could not be written beside {folder.parent}"
            raise full_disk(what, "or name another --out") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _merge(
    config: RunConfig, model_dir: Path, adapter: Path, folder: Path, dtype: Dtype, datasets: Path | None
) -> dict[str, Any]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from traceforge_core.modeling.chat import ChatRenderer

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir / "tokenizer")
    prompts = _prompts(datasets, ChatRenderer(tokenizer))
    base, unpacked = _load_base(config, model_dir, getattr(torch, dtype))
    try:
        model = PeftModel.from_pretrained(base, str(adapter)).eval()
    except (RuntimeError, ValueError, KeyError) as error:
        raise TraceForgeError(
            f"The adapter in {adapter} cannot be put on the model of {model_dir}: {str(error).splitlines()[0]}"
        ) from error
    with model.disable_adapter():
        of_base = _logits(model, prompts)
    apart = _logits(model, prompts)
    changed = [
        name.removeprefix("base_model.model.") for name, part in model.named_modules() if hasattr(part, "lora_A")
    ]
    merged: Any = model.merge_and_unload(safe_merge=True)
    _settle_generation(merged, tokenizer, ChatRenderer(tokenizer).end_of_turn)
    room = merged.num_parameters() * getattr(torch, dtype).itemsize
    require_room(folder, room, "the exported model", "export again, or name another --out")
    merged.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    if problems := model_problems(folder):
        raise TraceForgeError(f"What was exported cannot be served: {'; '.join(problems)}. Please report this.")
    together = _logits(merged, prompts)
    _round_again([merged.get_submodule(name).weight for name in changed])
    rounding = _rms(_logits(merged, prompts), together)
    del model, base, merged
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", trust_remote_code=config.model.trust_remote_code
    )
    if (found := str(loaded.dtype).removeprefix("torch.")) != dtype:
        raise TraceForgeError(f"The exported model loads in {found} instead of {dtype}. Please report this.")
    exported = _logits(_placed(loaded.eval()), prompts)
    check: dict[str, Any] = {
        "dtype": dtype,
        "base": "unpacked" if unpacked else "original",
        "difference": _rms(exported, apart),
        "largest": max(float((a - b).abs().max()) for a, b in zip(exported, apart, strict=True)),
        "rounding": rounding,
        "adapter_effect": _rms(apart, of_base),
        "same_choice": _same_choice(exported, apart),
        "positions": sum(len(logits) for logits in apart),
        "merged_layers": len(changed),
    }
    if not check["difference"] <= ROUNDING_FACTOR * rounding:
        raise TraceForgeError(
            f"The merged model does not give the adapter's logits: they differ by {check['difference']:.3g} (RMS), and "
            f"rounding in {dtype} explains {rounding:.3g}. Nothing was written. Keep using base and adapter apart, and "
            "please report this."
        )
    if check["adapter_effect"] <= ROUNDING_FACTOR * rounding:
        logger.warning(
            "The adapter changes the logits by %.2g (RMS), rounding in %s by %.2g: most of what it learned is lost in "
            "the merged weights. Use base and adapter apart, or export with dtype float32.",
            check["adapter_effect"], dtype, rounding,
        )  # fmt: skip
    return check | {"verdict": "pass" if check["adapter_effect"] > ROUNDING_FACTOR * rounding else "lost in rounding"}


def _load_base(config: RunConfig, model_dir: Path, dtype: torch.dtype) -> tuple[Any, bool]:
    """The base in full precision, on a GPU where it fits; and whether its checkpoint is 4-bit and was unpacked."""
    import torch

    from traceforge_core.modeling.loading import weights_of
    from traceforge_core.modeling.unpacked import load_unpacked

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    trusted = config.model.trust_remote_code
    model, packed = load_unpacked(*weights_of(model_dir), dtype, device=device, trust_remote_code=trusted)
    return _placed(model), packed


def _placed(model: Any) -> Any:
    import torch

    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 1.3 * model.get_memory_footprint():
        return model.to("cuda")
    return model


def _settle_generation(model: Any, tokenizer: Any, end_of_turn: str) -> None:
    """Whoever serves the model must stop where a turn ends; engines read that from the generation config."""
    own = model.generation_config.eos_token_id
    stops = [own] if isinstance(own, int) else list(own or [])
    turn = tokenizer.convert_tokens_to_ids(end_of_turn)
    if turn not in stops:
        stops.insert(0, turn)
    model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = True


def _prompts(datasets: Path | None, renderer: Any) -> list[list[int]]:
    """Token sequences to compare logits on: the ends of held-out samples, else of training samples, else a greeting."""
    from traceforge_core.evaluation import rows
    from traceforge_core.trajectories.model import Message

    for name in ("held_out", "train") if datasets is not None else ():
        path = datasets / "sft" / f"{name}.parquet"  # type: ignore[operator]
        found = [row["input_ids"][-PROMPT_TOKENS:] for row in rows.read_rows(path, ("input_ids",), PROMPTS)]
        if found:
            return found
    return [
        renderer.encode([Message("user", "Fix the failing test."), Message("assistant", "I read it first.")]).input_ids
    ]


def _logits(model: Any, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Of each prompt the logits of its last positions, (positions, vocabulary) float32 on the CPU."""
    import torch

    answers = []
    with torch.no_grad():
        for ids in prompts:
            inputs = torch.as_tensor(ids, device=next(model.parameters()).device)[None]
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=KEPT_POSITIONS).logits[0]
            answers.append(logits[-KEPT_POSITIONS:].float().cpu())
    return answers


def _round_again(weights: Sequence[torch.Tensor]) -> None:
    """Move one weight in twelve to a neighbouring number, up or down, in place."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        for row in weight.data.split(1024):
            drawn = torch.randint(0, 24, row.shape, generator=generator, dtype=torch.uint8).to(row.device)
            up = torch.nextafter(row, torch.full_like(row, math.inf))
            down = torch.nextafter(row, torch.full_like(row, -math.inf))
            row.copy_(torch.where(drawn == 0, up, torch.where(drawn == 1, down, row)))


def _rms(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    squares = sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True))
    return math.sqrt(squares / sum(tensor.numel() for tensor in ours))


def _same_choice(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Share of positions at which both put the same token first."""
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(ours, theirs, strict=True))
    return same / sum(len(tensor) for tensor in ours)
