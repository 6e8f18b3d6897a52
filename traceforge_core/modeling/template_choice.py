"""Which chat template a model gets: its own where that loses nothing, else one of TraceForge's.

name = choose_chat_template(tokenizer, config.model.chat_template)      # "model", "chatml" or "llama3"
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from traceforge_core.errors import TraceForgeError, page
from traceforge_core.modeling.template_check import template_losses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_TEMPLATES = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""TraceForge's own templates, and the tokens that a tokenizer must have for each."""


def choose_chat_template(tokenizer: PreTrainedTokenizerBase, wanted: str) -> str:
    """Give `tokenizer` the template that `wanted` (model.chat_template) asks for, and return its name.

    The name is "model", "chatml" or "llama3". "model" is the tokenizer's own, taken only where it loses nothing. "auto"
    takes it there, else the one of ours whose tokens the tokenizer knows. Raises TraceForgeError with what would be
    lost, and the setting that mends it.
    """
    fitting = [name for name, tokens in OWN_TEMPLATES.items() if _knows(tokenizer, tokens)]
    if wanted in OWN_TEMPLATES:
        if wanted not in fitting:
            raise TraceForgeError(
                f"model.chat_template={wanted} needs {' and '.join(OWN_TEMPLATES[wanted])} as single tokens, and this "
                f"tokenizer does not have them. Use {' or '.join(fitting) or 'model'} instead."
            )
        tokenizer.chat_template = own_template(wanted)
        return wanted
    losses = template_losses(tokenizer)
    if not losses:
        return "model"
    if wanted == "auto" and fitting:
        tokenizer.chat_template = own_template(fitting[0])
        return fitting[0]
    mend = (
        f"Set model.chat_template={fitting[0]}, which keeps all of it."
        if fitting
        else "None of TraceForge's own templates fits this tokenizer: give the model another chat template, or name "
        "another model."
    )
    raise TraceForgeError(
        "The model's own chat template loses part of an agent's run:\n"
        + "\n".join(f"  - {loss}" for loss in losses)
        + f"\n{mend} {page('chat-template')}"
    )


def own_template(name: str) -> str:
    """The text of one of OWN_TEMPLATES."""
    return (resources.files("traceforge_core.modeling") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _knows(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> bool:
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return known.issuperset(tokens)
