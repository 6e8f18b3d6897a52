"""Switches tiled layers on in a loaded model, for whatever trainer calls it.

    enable_long_context(model, "auto", settings)
    model(input_ids, attention_mask=mask)                        # as before, in tiles from settings.from_tokens on
    token_log_probs(model, input_ids, attention_mask, labels)    # completions: head and final norm on kept rows only

The base model's `forward` is replaced on this one instance. Calls that need a cache, attentions or all hidden states
(generation, inspection) go the model's own way. Weights, adapters, checkpoints and hooks are untouched.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from traceforge_core.config import LongContextConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.attention import Block
from traceforge_core.longcontext.completion_logprobs import selected_log_probs
from traceforge_core.longcontext.families import why_not_tiled
from traceforge_core.longcontext.projection import check_module
from traceforge_core.longcontext.stack import run_stack
from traceforge_core.longcontext.tiled_layer import window_of

log = logging.getLogger(__name__)
IGNORED = -100


@dataclass(frozen=True, slots=True)
class LongContext:
    """What `enable_long_context` leaves on the base model: its settings, and from which length it works in tiles."""

    settings: LongContextConfig
    from_tokens: int

    def covers(self, length: int) -> bool:
        return length >= self.from_tokens


def enable_long_context(model: nn.Module, mode: str, settings: LongContextConfig) -> bool:
    """Let the model work in tiles; returns whether it will (for sequences long enough).

    model: a transformers causal LM or a PeftModel around one. mode: "auto" (on CUDA, from settings.from_tokens), "on"
    (always), "off" (as it was before). Raises TraceForgeError where mode is "on" and the model is of another family, or
    has a base layer or adapter that tiled layers do not know; with "auto" such a model is left as it is, and the log
    says why.
    """
    if "long_context" in getattr(decoder_of(model), "__dict__", {}):
        del decoder_of(model).forward, decoder_of(model).long_context
    if mode == "off" or (mode == "auto" and not _on_cuda(model)):
        return False
    try:
        check_model(model)
    except TraceForgeError as error:
        if mode == "on":
            raise
        log.info("long context stays off: %s", error)
        return False
    decoder = decoder_of(model)
    state = LongContext(settings, settings.from_tokens if mode == "auto" else 0)
    decoder.forward = functools.partial(_forward, decoder, decoder.forward)
    decoder.long_context = state
    if mode == "on":
        log.info("long context: on, every sequence is computed in tiles")
    else:
        log.info("long context: on for sequences of at least %d tokens", state.from_tokens)
    return True


def _on_cuda(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "cuda"


def check_model(model: nn.Module) -> None:
    """Raise TraceForgeError, saying why, where tiled layers cannot compute this model."""
    decoder = decoder_of(model)
    if reason := why_not_tiled(decoder.config):
        raise TraceForgeError(reason)
    if type(decoder).__module__.startswith("transformers_modules."):
        raise TraceForgeError(
            f"Tiled layers know transformers' own models; this one is computed by code of its own "
            f"({type(decoder).__name__}). Set long_context to off."
        )
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in getattr(model, "peft_config", {}).values()):
        raise TraceForgeError("Tiled layers know LoRA adapters, not learned prompts. Set long_context to off.")
    for number, layer in enumerate(decoder.layers):
        parts = {
            "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "mlp": ("gate_proj", "up_proj", "down_proj"),
        }
        for part, names in parts.items():
            for name in names:
                check_module(getattr(getattr(layer, part), name, None), f"layers.{number}.{part}.{name}")
    norm = decoder.norm.weight
    for name, parameter in [*decoder.layers.named_parameters(prefix="layers"), ("norm.weight", norm)]:
        if parameter.requires_grad and "lora_" not in name:
            raise TraceForgeError(
                f"Tiled layers train LoRA adapters only, but {name} is to be trained too. Freeze it, or set "
                "long_context to off."
            )


def causal_lm_of(model: Any) -> Any:
    """The transformers causal LM inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> Any:
    """The base model (embeddings, layers, final norm) of a causal LM or of a PeftModel around one."""
    lm = causal_lm_of(model)
    return getattr(lm, "model", lm)


def long_context_of(model: nn.Module) -> LongContext | None:
    """What `enable_long_context` left on this model, if it did."""
    return getattr(decoder_of(model), "long_context", None)


def token_log_probs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probs, row of the batch) of every labelled token, each (tokens,), the log-probs at least float32.

    input_ids, attention_mask, labels: (rows, length), padded on either side, labels -100 where a token does not count.
    The model must be enabled; length does not matter.
    """
    decoder, settings = decoder_of(model), settings_of(model)
    rows, columns = torch.nonzero(labels[:, 1:] != IGNORED, as_tuple=True)
    real = attention_mask.bool() if attention_mask is not None else torch.ones_like(input_ids, dtype=torch.bool)
    index = real.flatten().cumsum(0).sub(1).view_as(input_ids)
    hidden = run_stack(
        decoder, *_flatten(decoder, input_ids, None, attention_mask, None), settings, keep=index[rows, columns]
    )
    head = causal_lm_of(model).lm_head
    return selected_log_probs(head, hidden, labels[rows, columns + 1], settings.logprob_chunk), rows


def kept_log_probs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_log_probs`, by position: log-probs (rows, kept), which count (rows, kept), positions (kept,).

    Kept are the positions whose next token counts in any row; log-probs that do not count are 0.
    """
    counted = labels[:, 1:] != IGNORED
    positions = counted.any(0).nonzero().flatten()
    counted = counted[:, positions]
    log_probs, _ = token_log_probs(model, input_ids, attention_mask, labels)
    return log_probs.new_zeros(counted.shape).masked_scatter(counted, log_probs), counted, positions


def computes_in_tiles(model: nn.Module, length: int) -> bool:
    """Whether a sequence of this length would be computed in tiles: `enable_long_context` was called, and covers it."""
    state = long_context_of(model)
    return state is not None and state.covers(length)


def settings_of(model: nn.Module) -> LongContextConfig:
    state = long_context_of(model)
    if state is None:
        raise TraceForgeError("The model does not work in tiles: call enable_long_context first.")
    return state.settings


def _forward(
    decoder: Any,
    plain: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **options: Any,
) -> Any:
    """The base model's forward: in tiles where that gives all that is asked for, else the model's own."""
    given = input_ids if input_ids is not None else inputs_embeds
    more = ("output_attentions", "output_hidden_states")
    wants_more = any(options.get(name, getattr(decoder.config, name, False)) for name in more)
    caching = decoder.config.use_cache if use_cache is None else use_cache
    if given is None:
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    tiled = (
        decoder.long_context.covers(given.shape[1])
        and past_key_values is None
        and not (caching and not decoder.training)
        and not wants_more
        and (attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2))
    )
    if not tiled:
        return plain(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )
    flat = _flatten(decoder, input_ids, inputs_embeds, attention_mask, position_ids)
    hidden = run_stack(decoder, *flat, decoder.long_context.settings)
    shape = given.shape[:2]
    if hidden.shape[0] != shape[0] * shape[1]:
        full = hidden.new_zeros(shape[0] * shape[1], hidden.shape[1])
        hidden = full.index_copy(0, attention_mask.bool().flatten().nonzero()[:, 0], hidden)
    hidden = hidden.view(*shape, -1)
    output: Any = BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[arg-type]
    return output if options.get("return_dict", True) is not False else (hidden,)


def _flatten(
    decoder: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
) -> tuple[Tensor, Tensor, list[Block]]:
    """A padded batch as one flat sequence of real tokens: embeddings (tokens, hidden), position ids, attention blocks.

    Samples packed into one row, told apart by position ids that restart, attend to themselves alone, as in
    transformers.
    """
    given = input_ids if input_ids is not None else inputs_embeds
    assert given is not None
    batch, length = given.shape[:2]
    padded = attention_mask is not None and not bool(attention_mask.all())
    if padded and attention_mask is not None and any(window_of(layer.self_attn) for layer in decoder.layers):
        edges = (torch.nn.functional.pad(attention_mask.bool(), (1, 1)).diff(dim=1)).sum(1)
        if bool((edges > 2).any()):
            raise TraceForgeError(
                "Tiled layers with a sliding window take padding at either end of a sample, and there is some inside "
                "one. Set long_context to off."
            )
    real = attention_mask.bool().flatten().nonzero()[:, 0] if padded and attention_mask is not None else None
    if input_ids is not None:
        flat_ids = input_ids.flatten() if real is None else input_ids.flatten()[real]
        x = decoder.embed_tokens(flat_ids)
    else:
        assert inputs_embeds is not None
        flat = inputs_embeds.reshape(batch * length, -1)
        x = flat.clone() if real is None else flat[real]
    if position_ids is None:
        positions = torch.arange(length, device=given.device).expand(batch, length)
    else:
        positions = position_ids.expand(batch, length)
    lengths = [length] * batch if not padded or attention_mask is None else attention_mask.sum(1).tolist()
    starts: list[int] = []
    total = 0
    for row, count in enumerate(lengths):
        starts.append(total)
        if position_ids is not None and attention_mask is None:
            jumps = (positions[row].diff() != 1).nonzero()[:, 0] + 1
            starts += [total + jump for jump in jumps.tolist()]
        total += count
    ends = [*starts[1:], total]
    blocks = [Block(a, b, a, b, causal=True) for a, b in zip(starts, ends, strict=True) if b > a]
    positions = positions.reshape(-1)
    return x, positions if real is None else positions[real], blocks
