"""What to do about a peak, in plain words."""

from __future__ import annotations

from ._recording import Breakdown, format_bytes

# Below these shares fusing is not the lever to pull, and few parameters are trained.
_WORTHWHILE = 0.1
_FEW = 0.25

_LEVERS = {
    "parameters": "the weights themselves: hold frozen ones in a smaller dtype, or shard them (FSDP)",
    "gradients": "gradients: fuse the step into backward",
    "optimizer_state": "optimizer state: use an 8-bit or a factored optimizer, or shard it (FSDP, ZeRO)",
    "activations": "activations: use activation checkpointing, a smaller batch or shorter sequences",
    "temporaries": "temporaries: use a smaller batch or shorter sequences",
    "other": "buffers and inputs: use a smaller batch",
}


def advice(plain: Breakdown, fused: Breakdown, trainable: int, parameters: int, *, known: bool) -> str:
    """Says which term dominates, what fusing saves, and the better lever where that is little.

    Args:
        plain: peak of ordinary training, in bytes.
        fused: peak of fused training, in bytes.
        trainable: number of parameters that are trained.
        parameters: number of all parameters.
        known: whether activations are among the figures.
    """
    saved = plain.total - fused.total
    share = saved / plain.total if plain.total else 0.0
    sentences = [_dominating(plain, known), _saving(saved, share, known)]
    if trainable < _FEW * parameters:
        sentences.append(
            f"Only {100 * trainable / parameters:.1f} % of the parameters are trained, so gradients are few."
        )
    if share < _WORTHWHILE or fused.largest != "parameters":
        lead = "What helps more works on" if share < _WORTHWHILE else "After fusing, the next lever is"
        sentences.append(f"{lead} {_LEVERS[fused.largest]}.")
    return " ".join(sentences)


def _dominating(plain: Breakdown, known: bool) -> str:
    name = plain.largest
    size = getattr(plain, name)
    of = "" if known else " that is known"
    return (
        f"The ordinary peak{of} is {format_bytes(plain.total)}; "
        f"most of it, {100 * size / max(plain.total, 1):.0f} %, "
        f"is {name.replace('_', ' ')}."
    )


def _saving(saved: int, share: float, known: bool) -> str:
    if saved <= 0:
        return "Fusing saves nothing here."
    worth = "it pays" if share >= _WORTHWHILE else "hardly worth it"
    most = "" if known else " at most"
    return f"Fusing saves{most} {format_bytes(saved)} ({100 * share:.0f} %): {worth}."
