"""What a worker died of, for people: faults that are met often, each with the settings that help here and its page.

known = explain(error, job, "at step 3, micro-batch 1")       # None: not one of them
"""

from __future__ import annotations

from collections.abc import Callable

from traceforge_core.errors import TraceForgeError, page
from traceforge_core.training.job import Job

OWN_NCCL_FAULTS = ("invalid device ordinal", "Duplicate GPU detected", "unhandled system error", "unhandled cuda error")
"""Words of NCCL errors that have their cause on this machine, not in a peer that is gone."""


def explain(error: BaseException, job: Job, doing: str) -> TraceForgeError | None:
    """The error for people, or None where the error is not known (or is one for people already).

    doing: what the worker was doing, such as "loading the model".
    """
    if isinstance(error, TraceForgeError):
        return None
    text = str(error)
    for known, tell in KNOWN:
        if known(error, text):
            return TraceForgeError(tell(_first_line(text), job, doing))
    return None


def _out_of_memory(reason: str, job: Job, doing: str) -> str:
    from traceforge_core.training.memory_advice import advice

    told, savers = advice(job)
    return (
        f"GPU memory ran out, {doing} ({reason}). {told}What helps, the most first: {'; '.join(savers)}. "
        f"{page('out-of-memory')}"
    )


def _cublas(reason: str, job: Job, doing: str) -> str:
    mend = (
        "cuBLASLt is preferred already, so install another torch"
        if job.config.model.cublaslt == "on"
        else "Set model.cublaslt=on, which takes such products to cuBLASLt"
    )
    return f"A matrix product was refused by cuBLAS, {doing} ({reason}). {mend}. {page('cublas-invalid-value')}"


def _nccl(reason: str, job: Job, doing: str) -> str:
    return (
        f"NCCL does not work between the GPUs of this machine, {doing} ({reason}). Set preference.transport=gloo, "
        f"which needs no NCCL, and let `traceforge doctor` try it. {page('nccl')}"
    )


def _no_kernel(reason: str, job: Job, doing: str) -> str:
    return (
        f"The installed torch has no code for this GPU, {doing} ({reason}). Install a build that knows its compute "
        f"capability: https://pytorch.org/get-started/locally. {page('no-kernel-image')}"
    )


def _first_line(text: str) -> str:
    line = (text.strip().splitlines() or ["no reason given"])[0].strip()
    return line if len(line) <= 240 else line[:237] + "..."


KNOWN: tuple[tuple[Callable[[BaseException, str], bool], Callable[[str, Job, str], str]], ...] = (
    (lambda error, text: type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in text, _out_of_memory),
    (lambda error, text: "CUBLAS_STATUS_ALLOC_FAILED" in text, _out_of_memory),
    (lambda error, text: "CUBLAS_STATUS_" in text, _cublas),
    (lambda error, text: "no kernel image is available" in text, _no_kernel),
    (
        lambda error, text: ("NCCL" in text or "ordinal" in text) and any(words in text for words in OWN_NCCL_FAULTS),
        _nccl,
    ),
)
