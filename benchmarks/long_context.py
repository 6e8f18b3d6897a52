"""Long context on one GPU: what tiled layers and the shared prefix take, beside what else there is.

    python benchmarks/long_context.py --sections kernels,layers            # development: seconds, no whole model
    python benchmarks/long_context.py --sections branch,sft                # the README's table, 5 minutes
    python benchmarks/long_context.py --sections unsloth                   # 4 minutes
    python benchmarks/long_context.py --sections long-24,long-80           # the longest pairs, 9 minutes

Qwen3-8B from its config with random weights (no download), NF4 with double quantisation, LoRA r=16 on all seven
projections, bf16, batch 1. Seconds are one forward and backward after a warm-up; GiB are torch.cuda's peak of allocated
memory. A cap is `set_per_process_memory_fraction`, which stands in for a smaller card. Every figure goes to
OUT/long_context.jsonl as soon as it is there. Unsloth patches other libraries, so it runs in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
from one_gpu.beside_unsloth import section_unsloth
from one_gpu.checks import section_checks
from one_gpu.kernels import section_kernels
from one_gpu.layers import section_blocks, section_layers
from one_gpu.measuring import record, time_limit
from one_gpu.pairs import section_branch, section_long_24, section_long_80, section_long_whole
from one_gpu.sft import section_sft

SECTIONS: dict[str, tuple[Callable[[], None], int]] = {
    "checks": (section_checks, 120),
    "kernels": (section_kernels, 120),
    "layers": (section_layers, 240),
    "blocks": (section_blocks, 120),
    "branch": (section_branch, 420),
    "sft": (section_sft, 200),
    "unsloth": (section_unsloth, 280),
    "long-24": (section_long_24, 590),
    "long-80": (section_long_80, 300),
    "long-whole": (section_long_whole, 560),
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
