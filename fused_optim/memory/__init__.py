"""Where the memory of a training run goes, and what fusing would save.

`record` follows a real run, `estimate` predicts one without allocating it, `compare` draws two recordings on
one scale. ``python -m fused_optim.memory`` is the command line.
"""

from ._estimate import Estimate, estimate
from ._plot import compare
from ._record import record
from ._recording import Breakdown, Moment, Recording, Sample, Span
from ._simulation import Variant

__all__ = [
    "Breakdown",
    "Estimate",
    "Moment",
    "Recording",
    "Sample",
    "Span",
    "Variant",
    "compare",
    "estimate",
    "record",
]
