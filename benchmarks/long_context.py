"""Long context on one GPU: what tiled layers and the shared prefix take, beside what else there is.

    python benchmarks/long_context.py --sections kernels,layers            # development: seconds, no whole model
    python benchmarks/long_context.py --sections branch,sft                # the README's table, 5 minutes
    python benchmarks/long_context.py --sections unsloth                   # 4 minutes
    python benchmarks/long_context.py --sections long                      # 5 minutes

Qwen3-8B from its config with random weights (no download), NF4 with double quantisation, LoRA r=16 on all seven
projections, bf16, batch 1. Seconds are one forward and backward after a warm-up; GiB are torch.cuda's peak of allocated
memory. A cap is `set_per_process_memory_fraction`, which stands in for a smaller card. Every figure goes to
OUT/long_context.jsonl as soon as it is there. Unsloth patches other libraries, so it runs in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
PROMPT, COMPLETION = 77_824, 4_096
LONG_PROMPT = 253_952
SFT_TOKENS = 32_768
WEIGHTS = Path("/dev/shm/qwen3-8b-random")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OUT = Path(os.environ.get("OUT", "."))
LAYERS = int(os.environ.get("LAYERS", "36"))  # fewer only to try the benchmark itself


# ---- measuring ----


def record(section: str, name: str, **figures: Any) -> None:
    line = {"section": section, "name": name, **figures}
    with (OUT / "long_context.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    shown = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )
    print(f"[{time.strftime('%H:%M:%S')}] {section}: {name}: {shown}", flush=True)


def measure(section: str, name: str, work: Callable[[], Any], repeats: int = 1, **figures: Any) -> float:
    """Runs and records work; returns the last run's seconds, infinity where memory ran out."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    try:
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            value = work()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError as error:
        del error
        record(section, name, out_of_memory=True, peak_gib=torch.cuda.max_memory_allocated() / GIB, **figures)
        return float("inf")
    peaks = {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    if isinstance(value, float):
        peaks["value"] = value
    if repeats > 1:
        peaks["first_seconds"] = seconds[0]
    record(section, name, seconds=seconds[-1], **peaks, **figures)
    return seconds[-1]


def kernel_seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Median device time of one call."""
    work()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2] / 1e3


@contextlib.contextmanager
def cap(gib: float | None) -> Iterator[None]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total) if gib else 1.0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


# ---- the model ----


def qwen3_8b(layers: int = 36) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
        rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=151_643, eos_token_id=151_645,
    )  # fmt: skip


def make_weights(layers: int) -> Path:
    """Random bf16 weights on disk, once for each number of layers."""
    from transformers import AutoModelForCausalLM

    folder = WEIGHTS.with_name(f"{WEIGHTS.name}-{layers}")
    if not folder.exists():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(qwen3_8b(layers), dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="4GB")
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return folder


def load(layers: int | None = None, adapter: bool = True) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    start = time.perf_counter()
    layers = layers or LAYERS
    folder = make_weights(layers)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": 0}, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if adapter:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, lora_dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.01)
    record("model", f"{layers} layers", seconds=time.perf_counter() - start, gib=torch.cuda.memory_allocated() / GIB)
    return model.train()


@functools.cache
def shared_model() -> Any:
    """The whole model, loaded once for all sections of a process."""
    return load()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 150_000, (count,), generator=generator).cuda()


def branch_batch(prompt: int, completion: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokens(prompt + completion)[None]
    labels = ids.clone()
    labels[:, :prompt] = -100
    return ids, labels


def make_pair(prompt: int, completion: int) -> Any:
    from traceforge_core.longcontext.shared_prefix_attention import Pair

    every = torch.ones(completion, dtype=torch.bool, device="cuda")
    ids = tokens(prompt + completion)
    return Pair(ids[:prompt], ids[prompt:], tokens(completion, seed=1), every, every)


def simpo(score_chosen: torch.Tensor, score_rejected: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.logsigmoid(2.0 * (score_chosen - score_rejected) - 0.5)


def tiled_branch(model: Any, prompt: int, completion: int) -> float:
    from traceforge_core.longcontext.enable import token_log_probs

    ids, labels = branch_batch(prompt, completion)
    log_probs, _ = token_log_probs(model, ids, None, labels)
    loss = simpo(log_probs.mean(), torch.tensor(-12.0, device="cuda"))
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


def tiled_pair(model: Any, prompt: int, completion: int) -> float:
    from traceforge_core.longcontext.shared_prefix_attention import pair_log_probs

    log_probs, branch = pair_log_probs(model, [make_pair(prompt, completion)])
    loss = simpo(log_probs[branch == 0].mean(), log_probs[branch == 1].mean())
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


def plain_branch(model: Any, prompt: int, completion: int, cudnn: bool = True) -> float:
    """One branch in transformers and peft: gradient checkpointing, logits of the completion only, no tiles."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ids, labels = branch_batch(prompt, completion)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if cudnn else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=completion + 1).logits[0, :-1].float()
        log_probs = logits.log_softmax(-1).gather(-1, labels[0, prompt:, None])[:, 0]
        loss = simpo(log_probs.mean(), torch.tensor(-12.0, device="cuda"))
        loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


def enable(model: Any, **settings: Any) -> None:
    from traceforge_core.config import LongContextConfig
    from traceforge_core.longcontext.enable import enable_long_context

    enable_long_context(model, "on", LongContextConfig(**settings))


def disable(model: Any) -> None:
    from traceforge_core.config import LongContextConfig
    from traceforge_core.longcontext.enable import enable_long_context

    enable_long_context(model, "off", LongContextConfig())


def checkpointing(model: Any, on: bool) -> None:
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    else:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def host_gib() -> float:
    from traceforge_core.longcontext.host_store import pinned_bytes

    return pinned_bytes() / GIB


# ---- sections ----


def section_checks() -> None:
    """Attention backends, Triton kernels and whole tiny models on this device against plain torch."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "longcontext"))
    from traceforge_core.longcontext import attention, pointwise
    from traceforge_core.longcontext.attention import Block, attend, attend_backward

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.double() - other.double()).norm() / other.double().norm())

    torch.manual_seed(0)
    layouts = {
        "causal": [Block(0, 1000, 0, 1000, True)],
        "two samples": [Block(0, 300, 0, 300, True), Block(300, 1000, 300, 1000, True)],
        "shared prefix": [
            Block(0, 800, 0, 800, True),
            Block(800, 1000, 0, 700, False),
            Block(800, 1000, 800, 1000, True),
        ],
    }
    q, grad = (torch.randn(1000, 8, 128, device="cuda") for _ in range(2))
    raw = torch.randn(1000, 4 * 128 + 8, device="cuda")[:, :512].unflatten(1, (4, 128))
    for name, blocks in layouts.items():
        k, v = raw[:, :2], raw[:, 2:]
        out, lse = attend(q, k, v, blocks, 0.088, "math")
        exact = (out, lse, *attend_backward(grad, q, k, v, out, lse, blocks, 0.088, "math"))
        for backend in ("flash", "cudnn"):
            try:
                h = [x.bfloat16() for x in (q, k, v, grad)]
                # v stays a view into a wider row, as in a layer
                h[2] = raw.bfloat16()[:, 2:]
                out, lse = attend(h[0], h[1], h[2], blocks, 0.088, backend)
                got = (out, lse, *attend_backward(h[3], h[0], h[1], h[2], out, lse, blocks, 0.088, backend))
                errors = [round(distance(a, b), 5) for a, b in zip(got, exact, strict=True)]
                record("checks", f"attention {backend} {name}", out_lse_dq_dk_dv=errors)
            except Exception as error:  # the table says so and goes on
                record("checks", f"attention {backend} {name}", failed=repr(error)[:300])
    record("checks", "backend", chosen=attention.choose_backend(torch.device("cuda", 0), torch.bfloat16, 128))

    x, d = (torch.randn(777, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.rand(4096, device="cuda", dtype=torch.bfloat16) + 0.5
    heads = torch.randn(777, 40 * 128 + 8, device="cuda", dtype=torch.bfloat16)[:, :5120].unflatten(1, (40, 128))
    cos, sin = (torch.randn(777, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    both = torch.randn(777, 8200, device="cuda", dtype=torch.bfloat16)
    norm = (w[:128].contiguous(), 1e-6)

    def kernels(cast: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        cx, cd, cw, ch, cc, cs, cb = (cast(t) for t in (x, d, w, heads, cos, sin, both))
        add, turned, pair, act = cd.clone(), ch.clone(), cb.clone(), torch.empty_like(cx)
        pointwise.add_rms_norm_backward(cd, cx, cw, 1e-6, add)
        first = pointwise.rotate(ch, cc, cs, (cast(norm[0]), 1e-6))
        pointwise.rotate_backward(ch, turned, cc, cs, (cast(norm[0]), 1e-6))
        pointwise.swiglu_backward(cd, pair[:, :4096], pair[:, 4096:8192], act)
        return [pointwise.rms_norm(cx, cw, 1e-6, torch.empty_like(cx)), add, first, turned, act, pair[:, :8192]]

    # float64 takes the plain torch path
    exact64 = kernels(lambda t: t.double())
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        got = kernels(lambda t, dtype=dtype: t.to(dtype))
        record(
            "checks",
            f"kernels {name}",
            norm_dnorm_rotate_drotate_act_dglu=[round(distance(a, b), 8) for a, b in zip(got, exact64, strict=True)],
        )

    import conftest

    for family in conftest.CONFIGS:
        model = conftest.tiny(family, torch.float32).cuda()
        ids = torch.randint(0, 97, (2, 200), device="cuda")
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, 9] = -100
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        plain, value = conftest.gradients(model), loss.item()
        for recompute in ("attention", "none"):
            enable(model, tile=64, head_groups=2, recompute=recompute)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            tiled = conftest.gradients(model)
            worst = max(distance(tiled[name], plain[name]) for name in plain)
            record("checks", f"{family} float32 {recompute}", loss=abs(loss.item() - value) / value, gradients=worst)


def section_kernels() -> None:
    """Row-wise kernels and matrix products at the sizes of one tile."""
    from traceforge_core.longcontext import kernels, pointwise

    rows, width, mlp = 4096, 4096, 12_288
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, d, w = make(rows, width), make(rows, width), make(width)
    both, act, d_act = make(rows, 2 * mlp + 32), make(rows, mlp), make(rows, mlp)
    gate, up = both[:, :mlp], both[:, mlp : 2 * mlp]
    raw, cos, sin = make(81_920, 6192), make(81_920, 128), make(81_920, 128)
    q, q_out = raw[:, :1024].unflatten(1, (8, 128)), make(81_920, 8, 128)
    work = {
        "rms_norm": (lambda: kernels.rms_norm(x, w, 1e-6, d), 2 * x.nbytes),
        "rms_norm backward": (lambda: kernels.add_rms_norm_backward(d, x, w, 1e-6, d_act[:, :width]), 4 * x.nbytes),
        "swiglu": (lambda: kernels.swiglu(gate, up, act), 3 * act.nbytes),
        "swiglu backward": (lambda: kernels.swiglu_backward(d_act, gate, up, act), 6 * act.nbytes),
        "rotate 8 heads of 82K": (lambda: kernels.rotate(q, cos, sin, (w[:128], 1e-6), q_out), 2 * q_out.nbytes),
        "rotate backward": (lambda: kernels.rotate_backward(q_out, q, cos, sin, (w[:128], 1e-6)), 3 * q_out.nbytes),
    }
    for name, (call, moved) in work.items():
        seconds = kernel_seconds(call)
        record("kernels", f"ours {name}", microseconds=seconds * 1e6, tb_per_s=moved / seconds / 1e12)
    plain, pointwise._fused = pointwise._fused, lambda _: False
    for name, call in {
        "rms_norm": lambda: pointwise.rms_norm(x, w, 1e-6, d),
        "swiglu": lambda: pointwise.swiglu(gate, up, act),
        "swiglu backward": lambda: pointwise.swiglu_backward(d_act, gate, up, act),
        "rotate 8 heads of 82K": lambda: pointwise.rotate(q, cos, sin, (w[:128], 1e-6), q_out),
    }.items():
        record("kernels", f"torch {name}", microseconds=kernel_seconds(call) * 1e6)
    pointwise._fused = plain
    try:
        from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
        from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward

        record(
            "kernels",
            "liger rms_norm",
            microseconds=1e6 * kernel_seconds(lambda: rms_norm_forward(x, w, 1e-6, 0.0, "llama", False)),
        )
        _, saved, rstd, block, warps, mode = rms_norm_forward(x, w, 1e-6, 0.0, "llama", False)
        record(
            "kernels",
            "liger rms_norm backward",
            microseconds=1e6
            * kernel_seconds(lambda: rms_norm_backward(d, saved, w, rstd, 0.0, mode, block, warps, False, False)),
        )
        g, u = gate.contiguous(), up.contiguous()
        record("kernels", "liger swiglu", microseconds=1e6 * kernel_seconds(lambda: swiglu_forward(g, u)))
        record(
            "kernels", "liger swiglu backward", microseconds=1e6 * kernel_seconds(lambda: swiglu_backward(g, u, d_act))
        )
    except Exception as error:
        record("kernels", "liger", failed=repr(error)[:300])

    matrix = make(24_576 + 32, width)
    for tile in (2048, 4096, 8192):
        a, y = make(tile, width), make(tile, 24_576 + 32)
        for name, left, right, out in (
            ("gate_up + A", a, matrix.t(), y),
            ("gate_up", a, matrix[:24_576].t(), make(tile, 24_576)),
            ("gate_up input gradient", y, matrix, make(tile, width)),
        ):
            seconds = kernel_seconds(lambda left=left, right=right, out=out: torch.mm(left, right, out=out))
            flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
            record("kernels", f"product {name}, tile {tile}", microseconds=seconds * 1e6, tflops=flops / seconds / 1e12)
    y, inner, up_matrix = make(rows, 24_576 + 32), make(rows, 32), make(24_576, 32)
    for name, call in {
        "add B": lambda: y[:, :24_576].addmm_(inner, up_matrix.t()),
        "grad B": lambda: torch.mm(y[:, :24_576].t(), inner, out_dtype=torch.float32),
        "grad A": lambda: torch.mm(inner.t(), x, out_dtype=torch.float32),
        "grad inner": lambda: y[:, :24_576] @ up_matrix,
        "grad B in float32": lambda: y[:, :24_576].float().t() @ inner.float(),
    }.items():
        record("kernels", f"lora gate_up {name}", microseconds=kernel_seconds(call) * 1e6)
    from traceforge_core.longcontext import host_store

    start = time.perf_counter()
    host_store._blocks.free += host_store._pinned_slab() + host_store._pinned_slab()
    record("kernels", "pin 2 GiB by registration", seconds=time.perf_counter() - start)
    start = time.perf_counter()
    torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    record("kernels", "pin 1 GiB by cudaHostAlloc", seconds=time.perf_counter() - start)


def section_layers() -> None:
    """Four layers: where the time of a layer goes, and what tile and groups do to it."""
    model = load(layers=4)
    branch = lambda: tiled_branch(model, PROMPT, COMPLETION)  # noqa: E731
    enable(model)
    tiled_branch(model, 4096, 64)
    for settings in (
        {}, {"tile": 2048}, {"tile": 8192}, {"head_groups": 1}, {"head_groups": 2}, {"head_groups": 8},
        {"recompute": "none"},
    ):  # fmt: skip
        enable(model, **settings)
        measure("layers", f"tiled branch {settings}", branch, repeats=2)
    enable(model)
    measure("layers", "tiled pair", lambda: tiled_pair(model, PROMPT, COMPLETION), repeats=2)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        branch()
        torch.cuda.synchronize()
    (OUT / "profile.txt").write_text(
        profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
    )
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=60))
    disable(model)
    checkpointing(model, True)
    measure("layers", "plain branch, cuDNN", lambda: plain_branch(model, PROMPT, COMPLETION), repeats=2)


def _time_block(name: str, one: Any, backend: Any, q: Any, k: Any, v: Any, grad: Any) -> None:
    from traceforge_core.longcontext.attention import attend, attend_backward

    out, lse = attend(q, k, v, [one], 0.088, backend)
    forward = kernel_seconds(lambda: attend(q, k, v, [one], 0.088, backend), 3)
    backward = kernel_seconds(lambda: attend_backward(grad, q, k, v, out, lse, [one], 0.088, backend), 3)
    record("blocks", f"{name} {backend}", forward_ms=forward * 1e3, backward_ms=backward * 1e3)


def section_blocks() -> None:
    """The three attention calls of a shared prefix, a quarter of the heads, by backend; then the pair's profile."""
    from traceforge_core.longcontext.attention import Block

    total = PROMPT + 2 * COMPLETION
    middle = PROMPT + COMPLETION
    q, grad = (torch.randn(total, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(total, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for name, one in {
        "chosen": Block(0, middle, 0, middle, True),
        "rejected to prompt": Block(0, COMPLETION, 0, PROMPT, False),
        "rejected to itself": Block(0, COMPLETION, 0, COMPLETION, True),
    }.items():
        for backend in ("cudnn", "flash"):
            _time_block(name, one, backend, q[: one.q_end], k[: one.k_end], v[: one.k_end], grad[: one.q_end])
    del q, k, v, grad
    model = load(layers=4)
    enable(model)
    tiled_pair(model, 4096, 64)
    measure("blocks", "pair, 4 layers", lambda: tiled_pair(model, PROMPT, COMPLETION), repeats=2)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        tiled_pair(model, PROMPT, COMPLETION)
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=70))
    enable(model, recompute="none")
    measure("blocks", "branch, 4 layers, none", lambda: tiled_branch(model, PROMPT, COMPLETION), repeats=2)


def warm(model: Any) -> None:
    """Kernels compiled, attention plans built, and pinned memory there, before anything is timed."""
    from traceforge_core.longcontext import host_store

    tiled_pair(model, 4096, 64)
    blocks = host_store._blocks
    missing = 24 * GIB - blocks.total
    while missing > 0:
        blocks.free += host_store._pinned_slab()
        blocks.total += GIB
        missing -= GIB


def section_branch() -> None:
    """One branch and one pair at 77,824 + 4,096, tiled and untiled."""
    model = shared_model()
    with cap(24):
        enable(model)
        warm(model)
        measure("branch", "tiled", lambda: tiled_branch(model, PROMPT, COMPLETION), cap_gib=24)
        measure("branch", "pair, shared prefix", lambda: tiled_pair(model, PROMPT, COMPLETION), cap_gib=24)
        record("branch", "pair, shared prefix", host_gib=host_gib())
        for prompt in (12_288, 28_672):
            call = functools.partial(tiled_branch, model, prompt, COMPLETION)
            measure("branch", f"tiled {prompt} + {COMPLETION}", call, repeats=2)
            call = functools.partial(tiled_pair, model, prompt, COMPLETION)
            measure("branch", f"pair {prompt} + {COMPLETION}", call, repeats=2)
        enable(model, recompute="none")
        tiled_branch(model, 4096, 64)
        measure("branch", "tiled, attention kept", lambda: tiled_branch(model, PROMPT, COMPLETION), cap_gib=24)
        record("branch", "attention kept", host_gib=host_gib())
    disable(model)
    checkpointing(model, True)
    plain_branch(model, 4096, 64)
    measure("branch", "untiled, cuDNN attention", lambda: plain_branch(model, PROMPT, COMPLETION))
    checkpointing(model, False)


def section_long() -> None:
    """Long pairs, all weights loaded, the first layers run: a layer's peak is every layer's, and time adds up."""
    from traceforge_core.longcontext.enable import decoder_of

    model = shared_model()
    decoder = decoder_of(model)
    every, count = decoder.layers, len(decoder.layers)
    for prompt, layers, gib, settings in (
        (LONG_PROMPT, 4, 24, {}),
        (310_784, 1, 24, {"head_groups": 8, "tile": 1024}),
        (542_720, 1, 80 - 10 * (542_720 + 2 * COMPLETION) * 8192 / GIB, {"head_groups": 8, "tile": 1024}),
    ):
        decoder.layers = every[:layers]
        try:
            with cap(gib):
                enable(model, **settings)
                call = functools.partial(tiled_pair, model, prompt, COMPLETION)
                seconds = measure("long", f"pair {prompt} + 2 × {COMPLETION}", call, cap_gib=gib, layers=layers)
        finally:
            decoder.layers = every
        record("long", f"pair {prompt}", layers_of=f"{layers} of {count}", seconds_all_layers=seconds * count / layers)


def section_long_whole() -> None:
    """The pair at 253,952 + 2 × 4,096 through all 36 layers, under a 24 GiB cap."""
    model = shared_model()
    with cap(24):
        enable(model)
        warm(model)
        measure(
            "long", "whole pair 253,952 + 2 × 4,096", lambda: tiled_pair(model, LONG_PROMPT, COMPLETION), cap_gib=24
        )
        record("long", "whole pair 253,952 + 2 × 4,096", host_gib=host_gib())


class Clock:
    """Times each optimizer step of a trainer, from its start to the end of the device's work."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Timer(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize()
                clock.start = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize()
                clock.seconds.append(time.perf_counter() - clock.start)

        return Timer()


def sft_steps(model: Any, name: str, steps: int = 2, section: str = "sft", **options: Any) -> None:
    """Steps of TRL's SFTTrainer on 32,768 tokens, all in the loss."""
    from datasets import Dataset
    from transformers import Qwen2Tokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    rows = [tokens(SFT_TOKENS, seed).tolist() for seed in range(steps)]
    clock = Clock()
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        args=SFTConfig(
            output_dir="/tmp/sft", per_device_train_batch_size=1, gradient_accumulation_steps=1,
            max_steps=steps, bf16=True, max_length=None,
            packing=False, dataset_kwargs={"skip_prepare_dataset": True}, report_to=[], save_strategy="no",
            optim="adamw_8bit", logging_steps=1, disable_tqdm=True, **options,
        ),
        callbacks=[clock.callback()],
    )  # fmt: skip
    measure(section, name, trainer.train)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    record(section, name, step_seconds=clock.seconds, losses=[entry["loss"] for entry in log])


def section_sft() -> None:
    """SFT steps in one process: ours, and transformers + peft with what TRL offers against memory."""
    model = shared_model()
    enable(model)
    with cap(24):
        sft_steps(model, "TRL SFTTrainer, tiled layers", gradient_checkpointing=False)
    disable(model)
    ordinary = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    for name, options in {
        "TRL SFTTrainer, gradient checkpointing": {},
        "TRL SFTTrainer, activation_offloading": {"activation_offloading": True},
        "TRL SFTTrainer, Liger": {"use_liger_kernel": True},
    }.items():
        try:
            sft_steps(model, name, **ordinary, **options)
        except Exception as error:
            record("sft", name, failed=repr(error)[:300])


def load_unsloth() -> Any:
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(make_weights(LAYERS)), max_seq_length=40_960, dtype=torch.bfloat16, load_in_4bit=True,
        device_map={"": 0},
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, target_modules=TARGETS, lora_dropout=0.0, bias="none",
        use_gradient_checkpointing="unsloth", max_seq_length=98_304,
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "max_seq_length"):
            module.max_seq_length = 98_304
    return model


def section_unsloth() -> None:
    """Unsloth's SFT step, and CPOTrainer as Unsloth leaves it; in a process where nothing else has been measured."""
    import unsloth  # noqa: F401

    start = time.perf_counter()
    model = load_unsloth()
    record("unsloth", "loaded", seconds=time.perf_counter() - start, gib=torch.cuda.memory_allocated() / GIB)
    try:
        sft_steps(model, "Unsloth SFTTrainer", steps=3, section="unsloth", gradient_checkpointing=True)
    except Exception as error:
        record("unsloth", "Unsloth SFTTrainer", failed=repr(error)[:400])
    for prompt, steps in ((12_288, 2),):  # at 77,824 it did not end within two minutes
        name = f"TRL CPOTrainer on Unsloth's model, pair {prompt} + 2 × {COMPLETION}"
        try:
            unsloth_pair(model, name, prompt, steps)
        except Exception as error:
            record("unsloth", name, failed=repr(error)[:400], peak_gib=torch.cuda.max_memory_allocated() / GIB)


def unsloth_pair(model: Any, name: str, prompt: int, steps: int) -> None:
    from transformers import Qwen2Tokenizer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    class Pairs(torch.utils.data.Dataset):
        column_names = ("prompt", "chosen", "rejected")

        def __len__(self) -> int:
            return steps

        def map(self, *_: Any, **__: Any) -> Any:
            return self

        def __getitem__(self, index: int) -> dict[str, Any]:
            first = tokens(prompt).tolist()
            item: dict[str, Any] = {"prompt_input_ids": first, "prompt_attention_mask": [1] * prompt}
            for seed, branch in ((1, "chosen"), (2, "rejected")):
                more = tokens(COMPLETION, seed).tolist()
                item[f"{branch}_input_ids"] = first + more
                item[f"{branch}_attention_mask"] = [1] * (prompt + COMPLETION)
                item[f"{branch}_labels"] = [-100] * prompt + more
            return item

    clock = Clock()
    trainer = CPOTrainer(
        model=model,
        processing_class=Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        train_dataset=Pairs(),
        args=CPOConfig(
            output_dir="/tmp/cpo", per_device_train_batch_size=1, gradient_accumulation_steps=1,
            max_steps=steps, bf16=True,
            max_length=prompt + COMPLETION, loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.5,
            report_to=[], save_strategy="no", optim="adamw_8bit", logging_steps=1, disable_tqdm=True,
            remove_unused_columns=False, gradient_checkpointing=False, disable_dropout=True,
        ),
        callbacks=[clock.callback()],
    )  # fmt: skip
    measure("unsloth", name, trainer.train)
    record("unsloth", name, step_seconds=clock.seconds)


SECTIONS: dict[str, tuple[Callable[[], None], int]] = {
    "checks": (section_checks, 120),
    "kernels": (section_kernels, 120),
    "layers": (section_layers, 240),
    "blocks": (section_blocks, 120),
    "branch": (section_branch, 420),
    "sft": (section_sft, 200),
    "unsloth": (section_unsloth, 280),
    "long": (section_long, 150),
    "long-whole": (section_long_whole, 420),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of: {', '.join(SECTIONS)}")
    arguments = parser.parse_args()
    record("machine", torch.cuda.get_device_name(), torch=torch.__version__)
    for name in arguments.sections.split(","):
        work, limit = SECTIONS[name]
        start = time.perf_counter()
        try:
            with time_limit(limit):
                work()
        except TimeoutError:
            record(name, "stopped", after_seconds=float(limit))
        except Exception as error:
            import traceback

            traceback.print_exc()
            record(name, "failed", error=repr(error)[:500])
        gc.collect()
        torch.cuda.empty_cache()
        record(name, "section", seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
