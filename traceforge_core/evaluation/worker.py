"""What the worker process of a job of kind `evaluate` does: load the base once, put each adapter on, measure or write.

`<out_dir>/request.json` says what is wanted (see Request); `measured.json` or `predictions.json` is what comes out.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import write_json
from traceforge_core.training.job import Job

logger = logging.getLogger(__name__)
BASE = "base"
REQUEST = "request.json"
Beat = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """task: measure (figures on held-out rows) or predict (write the next action). adapters: folder by name, in order;
    the base model comes first by itself. sample, new_tokens: for predict, how many histories and tokens at most."""

    task: Literal["measure", "predict"]
    adapters: dict[str, str]
    sample: int = 1
    new_tokens: int = 128

    def write(self, out_dir: Path) -> None:
        write_json(out_dir / REQUEST, asdict(self))

    @classmethod
    def read(cls, out_dir: Path) -> Request:
        return cls(**json.loads((out_dir / REQUEST).read_text(encoding="utf-8")))


def work(job: Job, beat: Beat) -> None:
    """`job.data` is the folder of a finished datasets stage."""
    request = Request.read(job.out_dir)
    beat("loading the model")
    models = Models(job, request)
    if request.task == "measure":
        write_json(job.out_dir / "measured.json", _measure(job, models, beat))
    else:
        write_json(job.out_dir / "predictions.json", _predict(job, request, models, beat))


class Models:
    """The base model and every adapter on it, one loaded model in all. `use(name)` puts one in charge."""

    def __init__(self, job: Job, request: Request) -> None:
        from traceforge_core.modeling.loading import load_model

        self.names = [BASE, *request.adapters]
        first = next(iter(request.adapters.items()), None)
        with _fits(first[1] if first else None):
            self.model, self.tokenizer = load_model(
                job.model_dir,
                job.config.model,
                device=job.device,
                backend="transformers",
                max_length=1,
                adapter=Path(first[1]) if first else None,
                seed=0,
                gradient_checkpointing=False,
            )
        self._loaded = {first[0]: "default"} if first else {}
        for name, folder in list(request.adapters.items())[1:]:
            with _fits(folder):
                self.model.load_adapter(folder, adapter_name=name)
            self._loaded[name] = name
        self.model.eval()
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        if name == BASE:
            with self.model.disable_adapter():
                yield self.model
        else:
            self.model.set_adapter(self._loaded[name])
            yield self.model


@contextmanager
def _fits(folder: str | None) -> Iterator[None]:
    """Say which adapter it is where PEFT finds that one does not fit."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        if folder is None:
            raise
        reason = str(error).strip().splitlines()
        raise TraceForgeError(
            f"The adapter in {folder} cannot be put on this model: {' '.join(reason[:2])}. Name an adapter that was "
            "trained on it, or the run whose model it was trained on."
        ) from error


def _measure(job: Job, models: Models, beat: Beat) -> dict[str, Any]:
    from traceforge_core.evaluation import measure, rows

    limits, preference = job.config.evaluation, job.config.preference
    pairs = list(rows.read_rows(rows.pairs_file(job.data), rows.PAIR_COLUMNS, limits.max_pairs))
    actions = list(rows.read_rows(rows.actions_file(job.data), rows.ACTION_COLUMNS, limits.max_actions))
    highest = max((max(row["prompt_ids"] + row["chosen_ids"] + row["rejected_ids"]) for row in pairs), default=0)
    highest = max([highest, *(max(row["input_ids"]) for row in actions)])
    if highest >= models.vocabulary:
        raise TraceForgeError(
            f"The held-out data in {job.data} has token {highest}, and the model knows {models.vocabulary}: it was "
            "made with another model's tokenizer. Build the datasets for this model."
        )
    answer: dict[str, Any] = {}
    for name in models.names:
        clock = time.perf_counter()
        with models.use(name) as model:
            pair_scores, action_scores = [], []
            for number, row in enumerate(pairs, 1):
                beat(f"scoring pair {number} of {len(pairs)} with {name}")
                pair_scores.append(measure.score_pair(model, row))
            for number, row in enumerate(actions, 1):
                beat(f"scoring action {number} of {len(actions)} with {name}")
                action_scores.append(measure.score_action(model, row))
        answer[name] = {
            "pairs": measure.pair_figures(pair_scores, preference.beta, preference.simpo_gamma) if pairs else None,
            "actions": measure.action_figures(action_scores) if actions else None,
            "seconds": time.perf_counter() - clock,
            "rows": {"pairs": [asdict(s) for s in pair_scores], "actions": [asdict(s) for s in action_scores]},
        }
        logger.info("%s: %d pairs and %d actions in %.1f s", name, len(pairs), len(actions), answer[name]["seconds"])
    return answer


def _predict(job: Job, request: Request, models: Models, beat: Beat) -> list[dict[str, Any]]:
    from traceforge_core.evaluation import predict, rows
    from traceforge_core.modeling.chat import ChatRenderer

    end_of_turn = ChatRenderer(models.tokenizer).end_of_turn
    columns = (*rows.ACTION_COLUMNS, "prompt", "completion", "trimmed_messages")
    answers = []
    for row in rows.read_rows(rows.actions_file(job.data), columns, request.sample):
        prompt_ids, history, recorded = predict.split_sample(row, models.tokenizer, end_of_turn)
        written = {}
        for name in models.names:
            beat(f"writing the next action of {row['sample_id']} with {name}")
            with models.use(name) as model:
                written[name] = predict.write_action(
                    model, models.tokenizer, prompt_ids, request.new_tokens, end_of_turn
                )
        answers.append(
            {
                "sample_id": row["sample_id"],
                "case": row["case"],
                "turn": row["turn"],
                "prompt_tokens": len(prompt_ids),
                "trimmed_messages": row["trimmed_messages"],
                "history": history,
                "recorded": recorded,
                "actions": written,
            }
        )
    return answers
