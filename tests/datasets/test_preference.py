"""Preference pairs: which are made, what counts in them, and why others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceforge_core.config import PreferenceDataConfig
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.messages import messages_from_json
from traceforge_core.datasets.pairs import Surveyed, outcome_candidates, recovery_candidates, survey
from traceforge_core.datasets.preference import PreferencePair, preference_pairs
from traceforge_core.datasets.repeats import turn_keys
from traceforge_core.datasets.sample import learnable_turns
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.trajectories.model import Message, Trajectory

Make = Callable[..., Trajectory]


class InMemory:
    """A corpus that is a list; what mining needs of one."""

    def __init__(self, runs: list[Trajectory]) -> None:
        self.runs = runs

    def at(self, number: int) -> Trajectory:
        return self.runs[number]


def surveyed(runs: Iterable[Trajectory], within: int = 3) -> list[Surveyed]:
    turns = [(run, learnable_turns(run)) for run in runs]
    keys = [dict(zip(own, turn_keys(run, own), strict=True)) for run, own in turns]
    return [survey(number, run, within, keys[number]) for number, (run, _) in enumerate(turns)]


def mine(
    renderer: ChatRenderer, runs: list[Trajectory], miners: tuple[str, ...] = ("outcome",), **settings: Any
) -> tuple[list[PreferencePair], dict[str, int]]:
    config = PreferenceDataConfig(**{"max_pairs_per_case": 100, "near_duplicate": 1, **settings})
    corpus: Any = InMemory(runs)
    records = surveyed(runs, config.recovery_within)
    find = {"outcome": outcome_candidates, "recovery": partial(recovery_candidates, seen=set())}
    cases = []
    for case in sorted({run.case for run in runs}):
        mine = [record for record in records if record.case == case]
        cases.append((case, [list(find[miner](mine, corpus)) for miner in miners]))
    dropped: Counter[str] = Counter()
    pairs = list(preference_pairs(cases, renderer, config, dropped))
    return pairs, dict(dropped)


def scored(renderer: ChatRenderer, ids: Any, mask: Any) -> str:
    return renderer.tokenizer.decode(ids[mask == 1].tolist())


def test_resolved_runs_stand_against_unresolved_ones_with_an_equal_prompt(
    renderer: ChatRenderer, make_run: Make
) -> None:
    runs = [
        make_run("c", "a", [("good", 0)], "resolved"),
        make_run("c", "b", [("bad", 0), ("worse", 0)], "unresolved"),
        make_run("c", "other-prompt", [("bad", 0)], "unresolved", task="Break it."),
        make_run("c", "no-label", [("odd", 0)], None),
        make_run("d", "other-case", [("bad", 0)], "unresolved"),
    ]
    (pair,), dropped = mine(renderer, runs)
    assert dropped == {}
    assert (pair.miner, pair.case) == ("outcome", "c")
    assert (pair.chosen_trajectory, pair.rejected_trajectory) == ("c-a", "c-b")
    assert pair.prompt == runs[0].messages[:2]
    assert pair.chosen == runs[0].messages[2:3]  # ends with the last turn, not with its observation
    assert pair.rejected == runs[1].messages[2:5]


def test_observations_inside_a_completion_do_not_count(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [make_run("c", "a", [("good", 0)], "resolved"), make_run("c", "b", [("x", 0), ("y", 1)], "unresolved")]
    (pair,), _ = mine(renderer, runs)
    whole = renderer.tokenizer.decode(pair.rejected_ids.tolist())
    assert "<returncode>0</returncode>" in whole
    counted = scored(renderer, pair.rejected_ids, pair.rejected_mask)
    assert "returncode" not in counted
    assert counted.count("<|im_end|>") == 2
    assert counted.startswith("<think>\nWhy 0")
    assert whole.endswith("<|im_end|>")


def test_a_recovery_pair_shares_the_history_of_the_failed_turn(renderer: ChatRenderer, make_run: Make) -> None:
    run = make_run("c", "a", [("ls", 0), ("sed a", 1), ("sed b", 0)])
    (pair,), _ = mine(renderer, [run], ("recovery",))
    assert pair.prompt == run.messages[:4]
    assert (pair.chosen, pair.rejected) == ([run.messages[6]], [run.messages[4]])
    assert scored(renderer, pair.chosen_ids, pair.chosen_mask).startswith("<think>\nWhy 2")
    assert pair.chosen_mask.all() and pair.rejected_mask.all()


def test_both_branches_have_the_prompt_tokens_that_the_prompt_alone_has(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [make_run("c", "a", [("good", 0)], "resolved"), make_run("c", "b", [("bad", 0)], "unresolved")]
    (pair,), _ = mine(renderer, runs)
    for completion, ids in ((pair.chosen, pair.chosen_ids), (pair.rejected, pair.rejected_ids)):
        encoded = renderer.encode_completion(pair.prompt, completion, pair.tools)
        assert np.array_equal(encoded.prompt_ids, pair.prompt_ids)
        assert np.array_equal(encoded.completion_ids, ids)


def test_a_row_holds_messages_as_json_and_ids_as_integers(renderer: ChatRenderer, make_run: Make) -> None:
    (pair,), _ = mine(renderer, [make_run("c", "a", [("sed a", 1), ("sed b", 0)])], ("recovery",))
    row = pair.row()
    assert messages_from_json(row["chosen"]) == pair.chosen
    assert row["prompt_ids"].dtype == np.int32
    assert row["pair_id"] == "recovery:c-a#4>c-a#2"


def test_the_cap_takes_the_shortest_and_every_miner_in_turn(renderer: ChatRenderer, make_run: Make) -> None:
    runs = []
    for n in (3, 1, 2):
        steps = [(f"sed {n}", 1), (f"sed {n}0", 0), (f"cat {n}", 1), (f"cat {n}0", 0), ("x" * 10 * n, 0)]
        runs.append(make_run("c", f"good{n}", steps, "resolved"))
    runs.append(make_run("c", "bad", [("bad", 0)], "unresolved"))
    pairs, dropped = mine(renderer, runs, ("outcome", "recovery"), max_pairs_per_case=4)
    assert [pair.miner for pair in pairs] == ["outcome", "recovery", "outcome", "recovery"]
    assert [pair.chosen_trajectory for pair in pairs[::2]] == ["c-good1", "c-good2"]
    assert dropped == {"over max_pairs_per_case": 3 + 6 - 4}


def test_pairs_that_are_too_long_are_dropped_never_cut(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [make_run("c", "a", [("good", 0)], "resolved"), make_run("c", "b", [("bad " * 400, 0)], "unresolved")]
    (pair,), _ = mine(renderer, runs)
    longest = len(pair.prompt_ids) + len(pair.rejected_ids)
    assert mine(renderer, runs, max_length=longest)[0]
    assert mine(renderer, runs, max_length=longest - 1) == ([], {"too long": 1})


def test_sides_that_say_the_same_make_no_pair_even_if_observations_differ(
    renderer: ChatRenderer, make_run: Make
) -> None:
    runs = [
        make_run("c", "a", [("x", 0), ("y", 0)], "resolved", output="one"),
        make_run("c", "b", [("x", 0), ("y", 0)], "unresolved", output="two"),
    ]
    assert mine(renderer, runs) == ([], {"chosen and rejected are identical": 1})


def test_a_side_with_nothing_to_learn_makes_no_pair(renderer: ChatRenderer, make_run: Make) -> None:
    good = make_run("c", "a", [("x", 0)], "resolved")
    silent = make_run("c", "b", [], "unresolved")
    masked = make_run("c", "d", [("y", 0)], "unresolved")
    masked.messages[2] = replace(masked.messages[2], trainable=False)
    pairs, dropped = mine(renderer, [good, silent, masked])
    assert pairs == []
    assert sum(dropped.values()) == 2
    assert set(dropped) <= {"nothing to learn from in rejected", "nothing to learn from in one side"}


def test_the_same_pair_twice_is_one(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [make_run("c", run, [("x", 0)], "resolved") for run in "ab"]
    runs += [make_run("c", run, [("y", 0)], "unresolved") for run in "de"]
    pairs, dropped = mine(renderer, runs)
    assert len(pairs) == 1
    assert dropped == {"duplicate of a pair": 3}


def test_near_duplicates_are_one(renderer: ChatRenderer, make_run: Make) -> None:
    long = " ".join(f"word{n}" for n in range(300))
    runs = [make_run("c", f"a{n}", [(f"{long} {n}", 0)], "resolved") for n in range(3)]
    runs += [make_run("c", "b", [("y", 0)], "unresolved")]
    assert len(mine(renderer, runs)[0]) == 3
    pairs, dropped = mine(renderer, runs, near_duplicate=0.9)
    assert len(pairs) == 1
    assert dropped == {"near duplicate of a pair": 2}


def test_the_rejected_run_is_cut_to_the_rounds_of_the_chosen(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [
        make_run("c", "a", [("good", 0)] * 2, "resolved"),
        make_run("c", "b", [(f"bad{n}", 0) for n in range(6)], "unresolved"),
    ]
    (pair,), _ = mine(renderer, runs, max_extra_rounds=1)
    assert [message.role for message in pair.rejected] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert len(mine(renderer, runs, max_extra_rounds=9)[0][0].rejected) == 11


def test_pairs_of_too_unequal_length_are_dropped_where_a_ratio_is_set(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [make_run("c", "a", [("good", 0)], "resolved"), make_run("c", "b", [("bad", 0)] * 5, "unresolved")]
    assert len(mine(renderer, runs, max_token_ratio=6)[0]) == 1
    assert mine(renderer, runs, max_token_ratio=2) == ([], {"over max_token_ratio": 1})


labels = st.sampled_from(["resolved", "unresolved", None])
step = st.tuples(st.sampled_from(["sed a", "sed b", "cat", "ls"]), st.sampled_from([0, 0, 1]))
runs = st.tuples(st.sampled_from("cd"), st.lists(step, max_size=4), labels, st.sampled_from(["one", "two"]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans=st.lists(runs, max_size=7), cap=st.integers(1, 4))
def test_every_candidate_is_a_pair_or_counted_and_every_pair_is_sound(
    renderer: ChatRenderer, make_run: Make, plans: list[Any], cap: int
) -> None:
    made = [make_run(case, str(n), steps, label, task=task) for n, (case, steps, label, task) in enumerate(plans)]
    records = surveyed(made)
    corpus: Any = InMemory(made)
    candidates = [*outcome_candidates(records, corpus), *recovery_candidates(records, corpus, set())]
    pairs, dropped = mine(renderer, made, ("outcome", "recovery"), max_pairs_per_case=cap)
    assert len(pairs) + sum(dropped.values()) == len(candidates)
    assert max(Counter(pair.case for pair in pairs).values(), default=0) <= cap
    for pair in pairs:
        assert pair.chosen_mask.any() and pair.rejected_mask.any()
        assert len(pair.chosen_ids) == len(pair.chosen_mask)
        assert len(pair.rejected_ids) == len(pair.rejected_mask)
        assert scored(renderer, pair.chosen_ids, pair.chosen_mask) != scored(
            renderer, pair.rejected_ids, pair.rejected_mask
        )
    assert len({pair.pair_id for pair in pairs}) == len(pairs)


def test_the_survey_of_a_real_corpus_reads_only_what_it_needs(
    make_run: Make, ingested: Callable[[list[Trajectory]], Path]
) -> None:
    made = [make_run("c", "a", [("sed a", 1), ("sed b", 0)], "resolved"), make_run("c", "b", [("x", 0)], "unresolved")]
    corpus = Corpus(ingested(made))
    records = surveyed(corpus)
    assert [record.recoveries for record in records][1] == ()
    (candidate,) = outcome_candidates(records, corpus)
    assert candidate.chosen.load() == made[0]
    assert candidate.rejected.load() == made[1]
    (recovery,) = recovery_candidates(records, corpus, set())
    assert (recovery.chosen.start, recovery.rejected.start) == (4, 2)
    assert surveyed(made, 0)[0].recoveries == ()
    assert isinstance(made[0].messages[0], Message)
