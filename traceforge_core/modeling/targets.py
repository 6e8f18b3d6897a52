"""Whether a model has the layers that `model.lora.targets` names, found out from its configuration alone.

check_targets("Qwen/Qwen3-8B", ["q_proj", "v_proj"], revision=None, offline=False, trust_remote_code=False)

PEFT says that no name fits only when the weights are in memory, and nothing at all where some fit and others do not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from traceforge_core.errors import TraceForgeError

log = logging.getLogger(__name__)


def check_targets(
    model: str, targets: Sequence[str], *, revision: str | None, offline: bool, trust_remote_code: bool
) -> None:
    """model: a folder or hub id. Builds the model without memory (on the meta device) and looks for the names as PEFT
    does: the end of a module's dotted name. A model that cannot be built so is left to the training stages.

    Raises TraceForgeError naming the targets that fit nothing and the linear layers there are, or where transformers
    does not know the kind of model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(model, revision=revision, local_files_only=offline, **options)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TraceForgeError(
            f"transformers cannot use the config.json of {model}: {reason}. Name another model, or set "
            "model.trust_remote_code=true where it brings its own code and you trust it."
        ) from error
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # code of anybody's; what is wrong with it shows when weights are loaded
        log.info("The layers of %s are not known before it is loaded (%s).", model, type(error).__name__)
        return
    names = [name for name, _ in built.named_modules()]
    lost = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if lost:
        layers = {name.rpartition(".")[2] for name, part in built.named_modules() if isinstance(part, torch.nn.Linear)}
        raise TraceForgeError(
            f"The model {model} has no layer named {', '.join(lost)} (model.lora.targets). Its linear layers: "
            f"{', '.join(sorted(layers)) or 'none'}."
        )
