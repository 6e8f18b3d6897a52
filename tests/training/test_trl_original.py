"""TRL's own CPOTrainer is found again after something has put another class in its place, as Unsloth does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import pickle, sys, types
    import trl.experimental.cpo as package
    import trl.experimental.cpo.cpo_config as config_module
    import trl.experimental.cpo.cpo_trainer as module

    def broken(*args, **kwargs):
        raise AssertionError("the replacement was used")

    genuine = module.CPOTrainer
    for owner in (package, module):
        owner.CPOTrainer = type("UnslothCPOTrainer", (genuine,), {"cpo_loss": broken, "__init__": broken})
    for owner in (package, config_module, module):
        owner.CPOConfig = type("UnslothCPOConfig", (config_module.CPOConfig,), {"__init__": broken})
    sys.modules["unsloth"] = types.ModuleType("unsloth")

    from traceforge_core.training.branch_parallel import BranchParallelTrainer
    from traceforge_core.training.preference import CPOConfig

    names = [cls.__name__ for cls in BranchParallelTrainer.__mro__]
    assert "CPOTrainer" in names and "UnslothCPOTrainer" not in names, names
    arguments = CPOConfig(output_dir="x", use_cpu=True, bf16=False)
    assert pickle.loads(pickle.dumps(arguments)).loss_type == "sigmoid"  # checkpoints pickle them
    assert package.CPOTrainer.__name__ == "UnslothCPOTrainer"  # left where other code expects it
"""


@pytest.mark.slow
def test_strategies_inherit_from_trls_own_source_in_an_unsloth_worker() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], check=True, cwd=root, timeout=100)
