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

    Groups (cases, or repositories where `by` says so, with what is alike) are ranked by a hash of seed and name. The
    first of them are held out, up to `held_out` of the cases, rounded; one that is too large for that is passed over,
    so that many cases with turns in common are not all held out for a small share. At least one is held out where there
    are two, the smallest if need be, and never all. Warns where several cases are one group, so that none can be.
    """
    group_of = grouping(config, alike)
    named = set(cases)
    sizes = Counter(map(group_of, named))
    groups = sizes.keys()
    if config.held_out > 0 and len(groups) == 1 < len(named):
        why = "are of one repository" if config.by == "repository" else "have turns in common"
        logger.warning("Nothing is held out: all %d cases %s, so they lie on one side.", len(named), why)
    held_out: set[str] = set()
    if config.held_out > 0 and len(groups) > 1:
        ranked = sorted(groups, key=lambda group: (_rank(group, config.seed), group))
        room = min(round(config.held_out * len(named)), len(named) - 1)
        for group in ranked:
            if sizes[group] <= room:
                held_out.add(group)
                room -= sizes[group]
        if not held_out:
            held_out.add(min(ranked, key=lambda group: sizes[group]))
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
