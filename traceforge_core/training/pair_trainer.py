"""The oracle, and what every other strategy shares with it.

`PairTrainer` is TRL's CPOTrainer (`loss_type="simpo"`) on pairs that are tokens already. Its forward, its log-probs and
its loss are TRL's own, so it is the oracle. The other strategies inherit from it and compute the same function
in another way.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from traceforge_core.errors import TraceForgeError
from traceforge_core.training.mesh import Mesh
from traceforge_core.training.pairs import IGNORED
from traceforge_core.training.recorded import Recorded, StepTally, gradient_norm, peak_memory_mib
from traceforge_core.training.sketch import sketch
from traceforge_core.training.trl_original import original

if TYPE_CHECKING:
    from trl.experimental.cpo import CPOTrainer
else:
    CPOTrainer = original("trl.experimental.cpo.cpo_trainer", "CPOTrainer")

TRACKED = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
           "logps/rejected", "nll_loss")  # fmt: skip
"""What TRL tells the trackers of every step beside loss, gradient norm and rate."""


class PairTrainer(Recorded, CPOTrainer):
    """The oracle: TRL's CPOTrainer, made to record. Subclasses override `concatenated_forward` and nothing else.

    A subclass's `concatenated_forward(model, batch)` returns what TRL's does: the scores of the chosen and of the
    rejected completions, each (pairs,), two tensors in place of logits (unused), and the NLL of the chosen completions
    (a scalar; 0 where `cpo_alpha` is 0). Where it computes only a part, the rest must come as constants: this worker's
    backward then gives this worker's share, and shares are summed over the mesh once an optimizer step.

    With D replicas each one goes through all micro-batches of a step (D × gradient_accumulation) and computes every
    D-th, so that steps, loss scale and the data's order are those of one replica, whatever D is.
    """

    mesh: Mesh = Mesh()
    # Unsloth ignores a tensor of positions as logits_to_keep (full logits come back) but takes a number of last ones.
    keeps_tail = False
    # Tiled decoder layers: "off", "on", or "as configured". The oracle stays TRL's own.
    tiles = "off"
    workers_may_be_apart = 1e-5

    def computes(self, micro_batch: int) -> bool:
        return micro_batch % self.mesh.replicas == self.mesh.replica

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        outputs = super().concatenated_forward(model, batch)
        for branch in ("chosen", "rejected"):
            self.note_scored(batch[f"{branch}_labels"][:, 1:] != IGNORED)
        self.require_finite_scores(batch, outputs[0], outputs[1])
        return outputs

    def note_scored(self, counted: torch.Tensor) -> None:
        """Tell the step log which tokens this worker's scores are means over: bool, any shape. Each strategy calls it
        with what it really counted, for what itself computed."""
        if self.tally is not None and torch.is_grad_enabled():  # not while evaluating
            self.tally.scored_tokens += int(counted.sum())

    def require_finite_scores(self, batch: dict[str, Any], chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        """Raises TraceForgeError naming the pairs whose score is NaN or inf. Every branch sees both scores, so every
        branch of the replica raises at the same step."""
        finite = torch.isfinite(chosen.detach()) & torch.isfinite(rejected.detach())
        if not bool(finite.all()):
            names = [name for name, fine in zip(batch["pair_id"], finite.tolist(), strict=True) if not fine]
            raise TraceForgeError(
                f"The score of pair {', '.join(names)} is NaN or inf at step {self.state.global_step + 1}. No weight "
                "was changed by it. Look at that pair, lower the learning rate, or try float32."
            )

    def get_batch_loss_metrics(
        self, model: Any, batch: dict[str, Any], train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
        # TRL averages logits over padding: a figure that depends on the batch's shape, and that only the oracle has.
        metrics = {name: value for name, value in metrics.items() if "logits/" not in name}
        if train_eval == "train" and self.tally is not None:
            pairs = len(batch["pair_id"])
            self.tally.pairs += pairs
            self.tally.score_chosen += pairs * metrics["logps/chosen"]
            self.tally.score_rejected += pairs * metrics["logps/rejected"]
            self.tally.correct += pairs * metrics["rewards/accuracies"]
            self.beat(f"in the backward of step {self.state.global_step + 1}")
        return loss, metrics

    def finish_gradients(self, tally: StepTally) -> float:
        """Sum the gradients over the mesh, check them, and bring the step's figures together. One message for the
        gradients, one for the figures."""
        mesh, parameters = self.mesh, self.trained_parameters()
        mesh.sum_gradients(parameters)
        finite = math.isfinite(tally.loss) and math.isfinite(gradient_norm(parameters))
        # The branches of a replica know the same scores and have the same loss. What is recorded is their mean: exactly
        # that, and off where any of them has something else.
        sums = (tally.loss, tally.pairs, tally.score_chosen, tally.score_rejected, tally.correct)
        own = [value / mesh.branches for value in sums]
        own += [
            mesh.score_seconds,
            mesh.gradient_seconds,
            peak_memory_mib(),
            tally.first_bad,
            float(finite),
            self.trace(),
            tally.scored_tokens,
            data_hash(tally.ids),
            float(self.sees_stop_file()),
            *self._tracked_sums(),
        ]
        rows = mesh.gather(own)
        mesh.score_seconds = mesh.gradient_seconds = 0.0
        columns = list(zip(*rows, strict=True))
        if not all(columns[9]):
            bad = [int(value) for value in columns[8] if value >= 0]
            self.raise_not_finite(tally, min(bad) if bad else -1)
        tally.workers_apart = self._require_equal_weights(columns[10])
        lacking = sum(columns[0]) - tally.loss
        tally.loss, pairs, tally.score_chosen, tally.score_rejected, tally.correct = (sum(columns[i]) for i in range(5))
        tally.pairs = int(pairs)
        tally.scored_tokens = int(sum(columns[11]))
        if mesh.replicas > 1:
            self._track_means([sum(column) for column in columns[14:]])
        self._stop_asked = any(columns[13])  # all stop after the same step, whoever saw the file first
        seen = columns[12] if len(set(columns[12])) > 1 else columns[12][:1]
        tally.data = "+".join(f"{int(value):012x}" for value in seen)
        if self.writes:
            named: Any = self.model
            trained = [(name, p) for name, p in named.named_parameters() if p.requires_grad]
            tally.weights_sketch = sketch(trained)
            tally.b_sketch = sketch((name, p) for name, p in trained if ".lora_B." in name)
            tally.gradient_sketch = sketch((name, p.grad) for name, p in trained if p.grad is not None)
        # The last to arrive waits for nobody: its time is the exchange itself, the others' has their waiting in it.
        tally.exchange_seconds = min(columns[5]) + min(columns[6])
        tally.peak_memory_mib = max(columns[7])
        self.save_gradients()
        return lacking

    def _tracked_sums(self) -> list[float]:
        """How many micro-batches of this step this worker has figures of for the trackers, and the sum of each."""
        stored = self._stored_metrics["train"]
        return [float(len(stored[TRACKED[0]])), *(sum(stored[name]) for name in TRACKED)]

    def _track_means(self, sums: list[float]) -> None:
        """Have TRL report the mean over the micro-batches of all replicas, not over those that rank 0 computed."""
        for name, value in zip(TRACKED, sums[1:], strict=True):
            self._stored_metrics["train"][name] = [value / sums[0]]

    def trace(self) -> float:
        """One number that moves when any trained weight moves: their sum, weighted 1, 2, 3, 1, 2, 3, ..."""
        if self.mesh.size == 1:
            return 0.0
        weights = [parameter.detach().reshape(-1).double() for parameter in self.trained_parameters()]
        return float(sum(k * weight[k - 1 :: 3].sum() for weight in weights for k in (1, 2, 3)))

    def _require_equal_weights(self, traces: tuple[float, ...]) -> float:
        if self.mesh.size == 1:
            return 0.0
        size = math.sqrt(sum(float(p.detach().double().square().sum()) for p in self.trained_parameters()))
        apart = (max(traces) - min(traces)) / size if size else 0.0
        if apart > self.workers_may_be_apart:
            raise TraceForgeError(
                f"The adapters of the workers have drifted apart by step {self.state.global_step + 1} (checks "
                f"{', '.join(f'{trace:.9g}' for trace in traces)}): some gradient was not summed. Please report this."
            )
        return apart

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        return super().prediction_step(model, inputs, True, ignore_keys)


def data_hash(ids: list[list[str]]) -> int:
    """48 bits of a hash of a step's pair ids, micro-batch by micro-batch: few enough to travel as a float64."""
    return int(hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12], 16)
