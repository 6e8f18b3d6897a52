"""The sample trajectories that TraceForge ships, and the generator that made them.

    python -m traceforge_core.samples.generate        # writes traceforge_core/samples/data anew

`cases/` holds small programs, each with a bug, its issue text and hidden tests. A scripted debug agent works on copies
of them and really runs its commands; the hidden tests judge its patches. No model is asked: everything in `data/` can
be made again, byte for byte, with the same minor version of Python.
"""
