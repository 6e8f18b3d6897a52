"""Things really tried, each in a process of its own: `python -m traceforge_core.doctor.trials NAME`.

A trial prints one JSON object as its last line: {"ok", "what", "figures"}. One that crashes, hangs or prints nothing is
a finding too; `run_trial` (trying.py), which starts it, makes one of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from traceforge_core.processes.scratch import scratch_folder

Answer = tuple[str, dict[str, Any]]
SDPA_TOLERANCE = {"bfloat16": 3e-2, "float32": 1e-4}  # relative L2 against the plain formula in float32


def torch_and_cuda() -> Answer:
    import torch

    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count(),
    }
    if torch.version.cuda is None:
        return f"torch {torch.__version__}, built without CUDA", figures
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} with CUDA {torch.version.cuda}, which finds no GPU", figures
    figures["cudnn"] = torch.backends.cudnn.version()
    figures["bf16"] = torch.cuda.is_bf16_supported()
    for index in range(torch.cuda.device_count()):
        total = torch.arange(1000, device=f"cuda:{index}").sum().item()  # a build without this card's code fails here
        if total != 499500:
            raise RuntimeError(f"GPU {index} adds wrongly: the sum of 0..999 came out as {total}")
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {figures['cudnn']}", figures


def bf16_gemm() -> Answer:
    """The products of an 8B model's layers. On some cards and builds cublasGemmEx refuses them (pytorch#170676)."""
    import torch

    shapes = ((14, 4096, 4096), (2048, 4096, 12288), (2048, 12288, 4096), (2048, 4096, 16), (2048, 16, 4096))

    def multiply() -> str | None:
        for rows, inner, columns in shapes:
            try:
                left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
                weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
                product = torch.nn.functional.linear(left, weight)
                torch.cuda.synchronize()
            except RuntimeError as error:
                return f"({rows}, {inner}) × ({inner}, {columns}): {str(error).splitlines()[0]}"
            if not bool(torch.isfinite(product).all()):
                return f"({rows}, {inner}) × ({inner}, {columns}) is not finite"
        return None

    default = multiply()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    with_lt = multiply()
    figures = {"default": default, "cublaslt": with_lt}
    if default is None:
        return "bf16 products of an 8B model's shapes work", figures
    return f"bf16 products fail ({default}); with cuBLASLt they {'work' if with_lt is None else 'fail too'}", figures


def _sdpa(kernel: str) -> Answer:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backend = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }[kernel]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    grouped = kernel != "efficient"  # that kernel knows no grouped heads; transformers repeats them for it
    heads, kv_heads, length, width = 8, 2 if grouped else 8, 512, 128
    query = torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in "kv")
    with sdpa_kernel([backend]):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        out.float().square().sum().backward()
    got = [out.detach(), query.grad, key.grad, value.grad]

    plain = [tensor.detach().float().requires_grad_() for tensor in (query, key, value)]
    repeats = heads // kv_heads
    scores = plain[0] @ plain[1].repeat_interleave(repeats, 1).mT / math.sqrt(width)
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ plain[2].repeat_interleave(repeats, 1)
    wanted.square().sum().backward()
    references = [wanted.detach(), *(tensor.grad for tensor in plain)]
    worst = 0.0
    for mine, right in zip(got, references, strict=True):
        assert mine is not None and right is not None
        worst = max(worst, float((mine.float() - right).norm() / right.norm()))
    name = str(dtype).removeprefix("torch.")
    if not worst <= SDPA_TOLERANCE[name]:
        raise RuntimeError(f"its output or gradients are off by {worst:.1e} (relative L2)")
    return f"forward and backward in {name} on {device}, off by {worst:.0e}", {"error": worst, "dtype": name}


def nf4() -> Answer:
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 512, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    layer = layer.to("cuda")
    inputs = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = layer(inputs)
    out.float().sum().backward()
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    wanted = inputs.detach().float() @ weight.T
    off = float((out.detach().float() - wanted).norm() / wanted.norm())
    assert inputs.grad is not None
    if not off < 2e-2 or not bool(torch.isfinite(inputs.grad).all()):
        raise RuntimeError(f"a 4-bit product is off by {off:.1e} (relative L2)")
    return f"bitsandbytes {bnb.__version__}: 4-bit product and its gradient work", {"error": off}


def pinned_memory() -> Answer:
    import torch

    size = 2**30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    on_gpu.copy_(host)
    torch.cuda.synchronize()
    clock = time.perf_counter()
    on_gpu.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    speed = 1 / (time.perf_counter() - clock)
    return f"1 GiB of pinned memory copies at {speed:.1f} GiB/s", {"gib_per_second": round(speed, 1)}


def unsloth() -> Answer:
    os.environ["UNSLOTH_DISABLE_CPU_FALLBACK"] = "1"
    import unsloth as installed  # isort: skip  (it must come before transformers, which it patches)
    import torch

    from traceforge_core.modeling.tiny import build_tiny

    with scratch_folder("doctor") as folder:
        os.environ["UNSLOTH_COMPILE_LOCATION"] = f"{folder}/compiled"  # else it writes into the working directory
        build_tiny(folder)
        model, _ = installed.FastLanguageModel.from_pretrained(
            str(folder), max_seq_length=512, dtype=torch.bfloat16, load_in_4bit=False, local_files_only=True
        )
        targets = ["q_proj", "v_proj"]
        model = installed.FastLanguageModel.get_peft_model(model, r=8, lora_dropout=0.0, target_modules=targets)
        ids = torch.arange(64, device="cuda")[None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"the loss of the tiny model came out as {loss.item()}")
    return f"unsloth {installed.__version__}: a training step of the tiny model works", {"loss": loss.item()}


def gloo() -> Answer:
    return _two_ranks("gloo", ["", ""])


def nccl() -> Answer:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[:2] if visible else ["0", "1"]
    return _two_ranks("nccl", gpus)  # each rank sees only its own GPU, as the launcher has it


def _two_ranks(backend: str, gpus: list[str]) -> Answer:
    with scratch_folder("doctor") as folder, contextlib.ExitStack() as files:
        ranks, outputs = [], []
        for rank, gpu in enumerate(gpus):
            env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
            trial = f"rank-{rank}-{backend}"
            command = [sys.executable, "-P", "-m", "traceforge_core.doctor.trials", trial, str(folder)]
            outputs.append(files.enter_context((folder / f"rank{rank}").open("w+")))
            ranks.append(subprocess.Popen(command, env=env, stdout=outputs[-1], stderr=subprocess.STDOUT))
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.02)
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        for process in ranks:
            process.kill()  # one that lost its peer would wait for it
            process.wait()
        for output in outputs:
            output.seek(0)
        said = [output.read().strip().splitlines() for output in outputs]
    if failed:
        last = (said[failed[0]] or ["it ended without a word"])[-1]
        raise RuntimeError(f"rank {failed[0]} failed: {last}")
    seconds = float(said[0][-1])
    return f"two processes add up 64 MiB over {backend} in {seconds * 1000:.0f} ms", {"seconds": seconds}


def _rank(rank: int, backend: str, folder: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/rendezvous", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    values = torch.full((2**24,), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(values.clone())
    clock = time.perf_counter()
    dist.all_reduce(values)
    if not bool((values == 3).all()):
        raise RuntimeError("the sum came out wrong")
    sys.stdout.write(f"{time.perf_counter() - clock}\n")
    sys.stdout.flush()
    os._exit(0)  # a peer that has left already would make the group's destructor wait


TRIALS: dict[str, Callable[[], Answer]] = {
    "torch works": torch_and_cuda,
    "bf16 products": bf16_gemm,
    "attention: flash": lambda: _sdpa("flash"),
    "attention: cudnn": lambda: _sdpa("cudnn"),
    "attention: efficient": lambda: _sdpa("efficient"),
    "attention: math": lambda: _sdpa("math"),
    "NF4": nf4,
    "pinned memory": pinned_memory,
    "gloo": gloo,
    "NCCL": nccl,
    "unsloth": unsloth,
}


def main(arguments: list[str]) -> None:
    # Whatever a trial hangs in, the kernel ends it with its parent (PR_SET_PDEATHSIG, Linux).
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if arguments[0].startswith("rank-"):
        _, rank, backend = arguments[0].split("-")
        _rank(int(rank), backend, arguments[1])
    try:
        what, figures = TRIALS[arguments[0]]()
        answer = {"ok": True, "what": what, "figures": figures}
    except Exception as error:  # whatever it is, it is the finding
        reason = (str(error).strip().splitlines() or [""])[0]
        answer = {"ok": False, "what": f"{type(error).__name__}: {reason}", "figures": {}}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some libraries hang or crash in their exit handlers; the answer is out already


if __name__ == "__main__":
    main(sys.argv[1:])
