"""One Hypothesis profile for all tests; deterministic in CI."""

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fused_optim",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fused_optim")
torch.set_num_threads(1)
