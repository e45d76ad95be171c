"""The largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable

LIMIT = 2**16

# The peak in bytes of training with a batch; None where the model rejects it (normalisation of a single
# value).
Peak = Callable[[int], int | None]


def largest_batch(peak: Peak, budget: float, begin: int) -> int:
    """Searches the largest batch whose peak is within a budget; peaks grow with the batch, nearly linearly.

    Args:
        peak: peak in bytes by batch.
        budget: bytes there are.
        begin: batch to try first.

    Returns:
        The batch; 0 where none fits, and at most `LIMIT`.
    """
    fits: dict[int, int] = {}
    too_large: dict[int, int] = {}
    low, high = 0, LIMIT + 1
    candidate = begin
    while high - low > 1:
        size = peak(candidate)
        if size is not None and size > budget:
            high = candidate
            too_large[candidate] = size
        else:
            low = candidate
            fits.update({} if size is None else {candidate: size})
        candidate = min(max(_guess(fits, too_large, low, budget), low + 1), high - 1)
    return max(fits, default=0)


def _guess(fits: dict[int, int], too_large: dict[int, int], low: int, budget: float) -> int:
    if not too_large:
        return _meet(sorted(fits.items())[-2:], budget) or 4 * low
    high = min(too_large)
    if not fits:
        return (low + high) // 2
    # Mostly a straight line finds the answer and its neighbour proves it; halving helps where the line bends.
    turn = (len(fits) + len(too_large)) % 3
    line = [max(fits.items()), (high, too_large[high])]
    return (_meet(line, budget) or 0, low + 1, (low + high) // 2)[turn]


def _meet(points: list[tuple[int, int]], budget: float) -> int | None:
    """Where a straight line through two points meets the budget; None where it does not."""
    if len(points) < 2:
        return None
    (left, left_size), (right, right_size) = points
    if right_size <= left_size:
        return None
    return left + int((budget - left_size) * (right - left) / (right_size - left_size))
