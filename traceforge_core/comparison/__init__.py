"""Whether a strategy computes what the oracle computes, what is wrong first if not, and whether this can be relied on.

Measured: parity.py (differences of two runs), deviations.py (the same, as the noise of bfloat16 has it). Judged by:
tolerances.py (float32), noise.py with student.py (bfloat16); verdict.py is what both end in. The stages: compare.py;
noise_floor.py, which runs the oracle against itself (variants.py; in float32 rounding.py); exact.py, the float32 part
beside a bfloat16 run; planted_faults.py, which plants what faults/ holds and reads what came of it (detection.py).
series.py trains all of those runs in one set of workers. Shown by: report.py, document.py, plots.py. Over time:
history.py, drift.py, trend.py. rehearsal.py is for the benchmark: all faults at the precision itself, errors of falling
size, clean runs.
"""
