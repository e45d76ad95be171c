"""One Hypothesis profile for all tests; deterministic in CI."""

import os

import pytest
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

# The frameworks and the published optimizers come with the test extra, and ask for a newer torch than the oldest one.
collect_ignore_glob = ["frameworks/*", "*published_optimizers.py"] if torch.__version__ < "2.6" else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiling comes last: dynamo of the oldest torch takes the step hooks off every optimizer class for good."""
    items.sort(key=lambda item: "test_compile" in item.nodeid)
