"""Steps optimizers inside ``backward()``, so that a whole set of gradients never exists."""

from fused_optim.optimizer import BackwardFusedOptimizer

__all__ = ["BackwardFusedOptimizer"]
__version__ = "0.1.0"
