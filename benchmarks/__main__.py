"""`python -m benchmarks`: layers against their peers; `python -m benchmarks.calibration`: how a model survives."""

from .layers import main

main()
