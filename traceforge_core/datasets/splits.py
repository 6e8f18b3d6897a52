"""Which cases are held out. A case lies on one side only, whatever is made of it.

side = split_cases(cases, config.datasets.split)     # side("django__django-11815") -> "train" or "held_out"
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from traceforge_core.config import SplitConfig

logger = logging.getLogger(__name__)

Side = Literal["train", "held_out"]
SIDES: tuple[Side, Side] = ("train", "held_out")


def split_cases(
    cases: Iterable[str], config: SplitConfig, alike: Iterable[tuple[str, str]] = ()
) -> Callable[[str], Side]:
    """A function from case to side. The same cases, share and seed give the same split, whatever their order. The two
    cases of each pair in `alike` come to one side, with whatever else is alike to one of them.

    Groups (cases, or repositories where `by` says so) are ranked by a hash of seed and name and the first
    `held_out` share of them, rounded, is held out: at least one where there are two, never all, and never one with more
    than half of the cases. Warns where several cases are one group, so that none can be held out.
    """
    group_of = grouping(config, alike)
    named = set(cases)
    groups = Counter(group_of(case) for case in named)
    count = round(config.held_out * len(groups))
    if config.held_out > 0 and len(groups) > 1:
        count = max(count, 1)
    count = min(count, max(len(groups) - 1, 0))
    if config.held_out > 0 and len(groups) == 1 < len(named):
        why = "are of one repository" if config.by == "repository" else "have turns in common"
        logger.warning("Nothing is held out: all %d cases %s, so they lie on one side.", len(named), why)
    # The last in this order is always trained on: the place of a group that has most of the cases.
    ranked = sorted(groups, key=lambda group: (2 * groups[group] > len(named), _rank(group, config.seed), group))
    held_out = set(ranked[:count])
    return lambda case: "held_out" if group_of(case) in held_out else "train"


def grouping(config: SplitConfig, alike: Iterable[tuple[str, str]] = ()) -> Callable[[str], str]:
    """A function from case to the name of what must not be torn apart: the case, or its repository, with all that
    pairs of `alike` cases join to it under the first of their names."""

    def own(case: str) -> str:
        return repository_of(case) if config.by == "repository" else case

    above: dict[str, str] = {}

    def top(name: str) -> str:
        while (higher := above.get(name, name)) != name:
            above[name] = above.get(higher, higher)
            name = above[name]
        return name

    for pair in alike:
        first, second = sorted(top(own(case)) for case in pair)
        above[second] = first
    return lambda case: top(own(case))


def repository_of(case: str) -> str:
    """The repository in a case's name as SWE-bench and its kin write it (`owner__name-123`, `owner__name.commit.id`);
    the whole name where it has no such form."""
    match = re.match(r"\A(.+?__[^.]+?)(?:-\d+(?:_\d+)?|\.[0-9a-f]{6,}\..*)\Z", case)
    return match.group(1) if match else case


def _rank(group: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{group}".encode("utf-8", "replace")).hexdigest()
