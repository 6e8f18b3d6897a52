"""YAML as people write it for a configuration: the safe subset, and a key that stands there twice is an error.

tree = read_yaml("sft: {max_steps: 20}")

By itself the reader keeps the last of two equal keys in silence, so that half a section is lost to a second `sft:`.
"""

from __future__ import annotations

from typing import Any

import yaml

NOT_YAML = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
"""What the reader raises, besides its own error, for dates that are none, tags that do not fit, endless nesting."""


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue  # what `<<:` brings in may be overridden
            if key.value in first:
                raise yaml.MarkedYAMLError(
                    f"the key {key.value!r} stands here first",
                    first[key.value].start_mark,
                    f"and here again; only one of the two can count. Join them under one {key.value!r}",
                    key.start_mark,
                )
            first[key.value] = key
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        return content


def read_yaml(text: str) -> Any:
    """Plain data. Raises one of NOT_YAML, naming line and column, where the text is not YAML or repeats a key."""
    return yaml.load(text, _UniqueKeys)
