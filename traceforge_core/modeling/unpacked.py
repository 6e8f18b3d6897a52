"""A base model in full precision, whatever its checkpoint is in: whole, or its first layers.

model, packed = load_unpacked("Qwen/Qwen3-8B", None, torch.bfloat16, layers=2)
model.save_pretrained(folder)                     # an ordinary checkpoint, also where it was a 4-bit one
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from traceforge_core.errors import TraceForgeError

if TYPE_CHECKING:
    import torch


def load_unpacked(
    weights: str,
    revision: str | None,
    dtype: torch.dtype,
    *,
    layers: int | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> tuple[Any, bool]:
    """The model, and whether its checkpoint is quantised and was unpacked. `layers`: only the first ones. `device`:
    where a quantised one is unpacked, and stays.

    Raises TraceForgeError where it cannot be loaded, or its kind of quantisation cannot be undone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(weights, **source)
        packed = getattr(config, "quantization_config", None) is not None
        if layers is not None:
            _keep_first(config, layers)
        placed: dict[str, Any] = {"device_map": {"": device}} if packed else {}
        model = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=dtype, **source, **placed)
        if packed:
            model = model.dequantize().to(dtype)
            _forget_unpacking(model)
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        raise TraceForgeError(f"Cannot load the model {weights}: {error}") from error
    return model, packed


def _keep_first(config: Any, layers: int) -> None:
    """Also in what the config says of each layer, such as its kind of attention."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def _forget_unpacking(model: Any) -> None:
    """transformers undoes on saving what it did to weights on loading. Unpacking cannot be undone, nor should it."""
    kept = []
    for conversion in getattr(model, "_weight_conversions", None) or []:
        with contextlib.suppress(NotImplementedError):
            conversion.reverse_transform()
            kept.append(conversion)
    model._weight_conversions = kept
