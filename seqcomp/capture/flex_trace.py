"""torch's FlexAttention in a capture: each call becomes operations that can be read.

A mask_mod and a score_mod are functions of one pair (batch, head, query, key). During the capture
they are called once, on tensors without dims, so that the graph holds the program of one pair
between `seqcomp::flex_position`, `flex_score` and `flex_attention`; `flex.py` reads it. Nothing of
size S x S is made, and create_block_mask only keeps its mask_mod. Compiled wrappers
(torch.compile(flex_attention)) run as the function that they wrap.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode

from seqcomp.diagnostics import PlanError, diagnostic

BATCH, HEAD, QUERY, KEY = range(4)


# One pair's index along a dim of [B, H, q, k], and its scaled score, both without dims; and from
# the score and mask of one pair (out [B, Hq, Sq, dv], log-sum-exp [B, Hq, Sq]). They are read as an
# attention before anything runs, so they have no kernels.
torch.library.define("seqcomp::flex_position", "(Tensor like, int of) -> Tensor")
torch.library.define("seqcomp::flex_score", "(Tensor q, Tensor k, float scale) -> Tensor")
torch.library.define(
    "seqcomp::flex_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor score, Tensor seen) -> (Tensor, Tensor)",
)


@torch.library.register_fake("seqcomp::flex_position")
def _position(like: Tensor, of: int) -> Tensor:
    return like.new_empty((), dtype=torch.int64)


@torch.library.register_fake("seqcomp::flex_score")
def _score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return q.new_empty((), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.register_fake("seqcomp::flex_attention")
def _result(q: Tensor, k: Tensor, v: Tensor, score: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty((*rows, v.shape[3])), q.new_empty(rows, dtype=score.dtype)


@contextlib.contextmanager
def flex_as_operations() -> Iterator[None]:
    """While the context is open, FlexAttention on this thread is recorded as said above.

    Raises PlanError SC302 inside it for what no reading exists of.
    """
    here = threading.get_ident()
    maker = flex.create_block_mask.__code__
    places = [(flex, name, new) for name, new in _REPLACED.items()]
    masking: Any = sys.modules.get("transformers.masking_utils")
    if hasattr(masking, "fast_all"):  # a shortcut past masks that hide nothing, which reads values
        places.append((masking, "fast_all", lambda tensor: False))

    def ours(name: str, new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            asked = name not in _OF_BLOCK_MASKS or sys._getframe(1).f_code is maker
            is_ours = asked and threading.get_ident() == here
            return (new if is_ours else old)(*args, **kwargs)

        return chosen

    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for (module, name, new), (_, _, old) in zip(places, before, strict=True):
        setattr(module, name, ours(name, new, old))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *buffers: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place of the higher-order operator: (out, lse / ln 2, nothing)."""
    if kernel_options.get("OUTPUT_MAX"):
        raise _refused("AuxRequest(max_scores=True)", "AuxRequest(lse=True) or none")
    mask_mod = block_mask[-1]
    _check_mask(query, key, block_mask)
    pair = [torch.ops.seqcomp.flex_position(query, of) for of in (BATCH, HEAD, QUERY, KEY)]
    score = torch.ops.seqcomp.flex_score(query, key, float(scale))
    with _OnePair():
        modified, seen = score_mod(score, *pair), mask_mod(*pair)
    for name, found in (("score_mod", modified), ("mask_mod", seen)):
        if not isinstance(found, Tensor) or found.ndim:
            raise _refused(f"a {name} that does not return one value per pair", "a scalar tensor")
    out, lse = torch.ops.seqcomp.flex_attention(query, key, value, modified.to(score.dtype), seen)
    return out, lse / math.log(2), lse


def _check_mask(query: Tensor, key: Tensor, block_mask: tuple[Any, ...]) -> None:
    """The mask is that of the lengths of this call, and its function says all of it."""
    *_, block, _, mask_mod = block_mask
    if mask_mod is not flex.noop_mask:
        lengths = (query.shape[2], key.shape[2])
        if any(a != b for a, b in zip(lengths, block_mask[:2], strict=True)):
            raise _refused(
                f"a block mask of {block_mask[0]} queries and {block_mask[1]} keys among "
                f"{lengths[0]} and {lengths[1]}",
                "a mask made for the lengths of the call",
            )
    elif block != flex._LARGE_SPARSE_BLOCK_SIZE:
        raise _refused("a BlockMask of blocks alone, without a mask_mod", "create_block_mask(...)")


class _OnePair(TorchFunctionMode):
    """x[i, j] with tensors without dims is a look-up, not a view at a Python number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index):
                return _looked_up(x, index)
        return func(*args, **(kwargs or {}))


def _looked_up(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Numbers among the indices are taken first, so that one look-up remains."""
    at = 0
    kept: list[Tensor] = []
    for item in index:
        if isinstance(item, int) and not isinstance(item, bool):
            x = x.select(at, item)
        elif isinstance(item, Tensor):
            at, kept = at + 1, [*kept, item]
        else:
            raise _refused(f"x[..., {item!r}, ...] in a mod", "x[b, h, q_idx, kv_idx]")
    return torch.ops.aten.index.Tensor(x, kept)


def _no_mask(mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None) -> Tensor:
    """In place of create_mask within create_block_mask."""
    return torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=device)


def _no_blocks(mask: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return mask, None


def _only_its_function(
    blocks: tuple[Tensor, None], mask_mod: Any, lengths: tuple[Any, Any], *args: Any, **kwargs: Any
) -> flex.BlockMask:
    return bare_mask(mask_mod, lengths, blocks[0].device)


def bare_mask(
    mask_mod: Any, lengths: tuple[Any, Any], device: torch.device, kind: Any = flex.BlockMask
) -> Any:
    """A BlockMask that knows its function and lengths, and no blocks."""
    none = torch.zeros((1, 1, 1), dtype=torch.int32, device=device)
    return kind.from_kv_blocks(
        none,
        none.unsqueeze(-1),
        BLOCK_SIZE=(flex._LARGE_SPARSE_BLOCK_SIZE,) * 2,  # lengths are compared here, not there
        mask_mod=mask_mod,
        seq_lengths=lengths,
        compute_q_blocks=False,
    )


_REPLACED: dict[str, Callable[..., Any]] = {
    "flex_attention_hop": _attention,
    "_validate_device": lambda query, key, value: None,  # it refuses to differentiate on CPU
    "_create_empty_block_mask": lambda query, key: bare_mask(
        flex.noop_mask, (query.shape[2], key.shape[2]), query.device
    ),
    "create_mask": _no_mask,
    "_convert_mask_to_block_mask": _no_blocks,
    "_create_sparse_block_from_block_mask": _only_its_function,
    "_compute_dq_write_order_from_block_mask": lambda *args, **kwargs: (None, None),
}
_OF_BLOCK_MASKS = ("create_mask",)  # has other callers, who want its result


def _refused(found: str, legal: str) -> PlanError:
    return PlanError(
        [
            diagnostic(
                "SC302",
                where="flex_attention",
                found=found,
                legal=legal,
                help="write the mods as element-wise operations on their arguments and on tensors "
                "indexed by them",
            )
        ]
    )
