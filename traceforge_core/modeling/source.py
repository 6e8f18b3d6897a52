"""Where a run's model is: the folder or hub repository that `model.name` names, as it can be used.

    source = find_model(config.model)      # asks the hub, or its local cache, for no more than config.json

What cannot be trained (not there, an adapter, a GGUF file, half a download) is refused with the reason.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceforge_core.config import ModelConfig
from traceforge_core.errors import TraceForgeError, page
from traceforge_core.modeling.weight_files import INDEX, check_weight_files
from traceforge_core.paths import written

log = logging.getLogger(__name__)

READ_FIELDS: dict[str, type] = {
    "text_config": dict,
    "quantization_config": dict,
    "weight_map": dict,
    "architectures": list,
    "model_type": str,
    "base_model_name_or_path": str,
    "vocab_size": int,
    "num_hidden_layers": int,
    "hidden_size": int,
    "max_position_embeddings": int,
}
"""Fields of a model's JSON files that are read here, and what they hold wherever they are right."""
KIND_NAMES = {dict: "an object", list: "a list", str: "text", int: "a whole number"}
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Source:
    """A model found: `load_from` is what Hugging Face's `from_pretrained` takes, `weights` what model.json records.

    `revision` is the hub commit (None for a folder); `offline` means that only the local cache may be asked.
    """

    load_from: str
    weights: str
    config: dict[str, Any]
    revision: str | None = None
    offline: bool = False


class HubUnreachable(TraceForgeError):
    """Whether a model is on the hub cannot be known: the hub does not answer, and the local cache does not have it."""


def find_model(model: ModelConfig) -> Source:
    """The folder or hub repository that `model.name` names; any but `tiny`. Fetches its config.json at most.

    Raises TraceForgeError where it cannot be used, HubUnreachable where that cannot be found out.
    """
    path = written(model.name)
    if path.is_dir():
        return _find_in_folder(path.resolve())
    if path.exists():
        raise TraceForgeError(
            f"model.name is {model.name}, which is a file. Name the folder that holds config.json and the weights "
            "(a GGUF file cannot be trained)."
        )
    if _is_a_path(model.name):
        raise TraceForgeError(
            f"There is no model at {path} (model.name). Check the path, or give a hub id such as Qwen/Qwen3-8B, "
            "or `tiny` for the embedded model."
        )
    return _find_on_hub(model)


def check_model_path(model: ModelConfig) -> None:
    """Raise TraceForgeError where `model.name` is a folder, a file or a path and cannot be used. Never asks the hub."""
    if written(model.name).exists() or _is_a_path(model.name):
        find_model(model)


def _is_a_path(name: str) -> bool:
    """Whether a name can only be meant as a path: hub ids are `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def _find_in_folder(folder: Path) -> Source:
    if not (folder / "config.json").is_file():
        if (folder / ADAPTER).is_file():
            raise _is_an_adapter(str(folder), read_config(folder / ADAPTER))
        raise TraceForgeError(
            f"The folder {folder} has no config.json, so it is not a model in Hugging Face layout. Name the folder "
            "that holds config.json, the tokenizer and the weights."
        )
    if (folder / ADAPTER).is_file():
        raise _has_an_adapter(str(folder))
    index = read_config(folder / INDEX) if (folder / INDEX).is_file() else {}
    check_weight_files(folder, index)
    return Source(str(folder), str(folder), read_config(folder / "config.json"))


def _find_on_hub(model: ModelConfig) -> Source:
    """Ask the hub for the commit and its files; where it cannot be reached, look into the local cache."""
    import httpx
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, revision = model.name, model.revision
    try:
        info = HfApi().model_info(name, revision=revision, timeout=20)
        files = {file.rfilename for file in info.siblings or ()}
        if "config.json" not in files:
            if ADAPTER in files:
                raise _is_an_adapter(name, read_config(Path(hf_hub_download(name, ADAPTER, revision=info.sha))))
            raise TraceForgeError(
                f"The hub's {name} has no config.json, so transformers cannot load it (GGUF files cannot be trained). "
                "Name the repository with the original weights."
            )
        if ADAPTER in files:
            raise _has_an_adapter(name)
        # By branch or tag, not by commit, so that the cache knows later, offline, which commit the name stood for.
        path = Path(hf_hub_download(name, "config.json", revision=revision))
        return Source(name, name, read_config(path), path.parent.name)
    except HFValidationError:
        raise TraceForgeError(
            f"model.name {name!r} is neither a folder that is there nor a hub id. Give a path, a hub id such as "
            "Qwen/Qwen3-8B, or `tiny`."
        ) from None
    except GatedRepoError:
        raise TraceForgeError(
            f"The hub's {name} asks for its licence to be accepted: do so on its page, then log in with "
            "`hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise TraceForgeError(f"The hub's {name} has no revision {revision!r} (model.revision).") from None
    except RepositoryNotFoundError:
        raise TraceForgeError(
            f"There is no folder {name!r} here and no such model on the hub (or it is private: log in with "
            "`hf auth login`). Check model.name."
        ) from None
    except (httpx.HTTPError, OfflineModeIsEnabled, ConnectionError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
    cached = _in_cache(name, "config.json", revision)
    if cached is None:
        if (adapter := _in_cache(name, ADAPTER, revision)) is not None:
            raise _is_an_adapter(name, read_config(adapter))
        raise HubUnreachable(
            f"There is no folder {name!r} here, and the hub cannot be reached to look for it ({reason}), nor is it in "
            "the local cache. Check the path, go online, or use model.name=tiny, which needs no download."
        )
    log.warning("The hub cannot be reached (%s); using %s from the local cache.", reason, name)
    if (cached.parent / ADAPTER).is_file():
        raise _has_an_adapter(name)
    return Source(name, name, read_config(cached), cached.parent.name, offline=True)


def _in_cache(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub repository in the local cache, None where it is not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _is_an_adapter(where: str, adapter: dict[str, Any]) -> TraceForgeError:
    base = adapter.get("base_model_name_or_path") or "not named in it"
    return TraceForgeError(
        f"{where} is an adapter (LoRA), not a whole model; its base model is: {base}. Name the base as model.name, or "
        "merge the adapter into it first (PEFT's merge_and_unload) and name the merged folder. "
        f"{page('model-is-an-adapter')}"
    )


def _has_an_adapter(where: str) -> TraceForgeError:
    """transformers loads such an adapter with the model, so the base that is measured would not be the base that is
    trained: a fresh adapter takes the place of the one that came with it."""
    return TraceForgeError(
        f"{where} holds a whole model and an adapter (LoRA) beside it ({ADAPTER}), which transformers would load into "
        "the model without a word. To train the model alone, name a copy without adapter_config.json and "
        "adapter_model.safetensors; to train on from both, merge them first (PEFT's merge_and_unload) and name the "
        f"merged folder. {page('model-is-an-adapter')}"
    )


def read_config(path: Path) -> dict[str, Any]:
    """A model's JSON file. Raises TraceForgeError where a field that is read here holds what it cannot."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceForgeError(f"Cannot read {path}: {error}. Fetch the model again.") from None
    if not isinstance(config, dict):
        raise TraceForgeError(f"{path} holds no JSON object. Fetch the model again.")
    for section in (config, config.get("text_config") or {}):
        for name, kinds in READ_FIELDS.items():
            value = section.get(name) if isinstance(section, dict) else section
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise TraceForgeError(
                    f"In {path}, {name} is {value!r:.60}, where {KIND_NAMES[kinds]} belongs. Fetch the model again."
                )
    return config
