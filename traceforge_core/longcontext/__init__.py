"""Training at long context, exactly: tiled layers, log-probs of kept positions, the shared-prefix pass, the planner.

`enable_long_context(model, mode, settings)` in `enable.py` is the way in for a loaded model; `planner.py` says
beforehand what fits. Every other module here is a part of those two.
"""
