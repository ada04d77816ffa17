"""Every rule is sound: local operations on placed operands give the global result and gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqcomp.placement import assign
from seqcomp.runtime.threads import run_ranks
from tests.unit.placement.forced import (
    DATA_RING,
    SHAPES,
    SPECIAL_RULES_WITH_FORCE,
    USP,
    Case,
    D,
    Idiom,
    Idioms,
    capture_idioms,
    cases_of,
    cut,
    eager,
    input_spec,
    run_rank,
)

POINTWISE: dict[str, Idiom] = {
    "neg": lambda a: -a.x,
    "add": lambda a: a.x + a.y,
    "add scalar": lambda a: a.x + 1.5,
    "add alpha": lambda a: torch.add(a.x, a.y, alpha=2.0),
    "sub": lambda a: a.x - a.y,
    "rsub": lambda a: 1.0 - a.x,
    "mul": lambda a: a.x * a.y,
    "mul itself": lambda a: a.x * a.x,
    "mul scalar": lambda a: a.x * 3.0,
    "mul row": lambda a: a.x * a.v,
    "mul table": lambda a: a.x * a.t,
    "mul column": lambda a: a.x * a.z[:, :, None],
    "mul per sample": lambda a: a.x * a.c[:, None],
    "mul positions": lambda a: a.z * a.r,
    "div": lambda a: a.x / (a.y.square() + 1),
    "div scalar": lambda a: a.x / 4.0,
    "div rounded": lambda a: torch.div(a.x, 0.3, rounding_mode="floor"),
    "reciprocal": lambda a: 1.0 / (a.x.abs() + 1),
    "gelu": lambda a: F.gelu(a.x),
    "silu": lambda a: F.silu(a.x) * a.y,
    "relu": lambda a: F.relu(a.x),
    "pow": lambda a: a.x.pow(2),
    "exp": lambda a: a.x.exp(),
    "clamp": lambda a: a.x.clamp(-0.5, 0.5),
    "where": lambda a: torch.where(a.keep[:, :, None], a.x, a.y),
    "where scalar": lambda a: torch.where(a.keep, a.z, 0.0),
    "masked_fill": lambda a: a.z.masked_fill(a.keep, 2.0),
    "masked_fill of wide": lambda a: a.x.masked_fill(a.keep[:, :, None], -1.0),
    "lerp": lambda a: torch.lerp(a.x, a.y, 0.3),
    "addcmul": lambda a: torch.addcmul(a.x, a.y, a.y, value=0.5),
    "maximum": lambda a: torch.maximum(a.x, a.y),
    "compare": lambda a: a.x > a.y,
    "and": lambda a: a.keep & (a.z > 0),
    "not": lambda a: ~a.keep,
    "to float": lambda a: a.x.to(torch.float32),
    "to half and back": lambda a: a.x.to(torch.bfloat16).to(torch.float64),
    "ints": lambda a: a.ids + 1,
    "ints to float": lambda a: a.ids.double() * 0.5,
    "zeros_like": lambda a: torch.zeros_like(a.x) + a.y,
    "clone": lambda a: a.x.clone(),
    "detach": lambda a: a.x.detach() * a.y,
    "nan_to_num": lambda a: torch.nan_to_num(a.x),
    "outer product": lambda a: a.z[:, :, None] * a.z[:, None, :],
    "positions apart": lambda a: a.r[:, :, None] - a.r[:, None, :],
}

VIEWS: dict[str, Idiom] = {
    "flatten tokens": lambda a: a.x.flatten(0, 1),
    "flatten and back": lambda a: torch.sin(a.x.view(-1, D)).view(a.x.shape),
    "heads": lambda a: a.x.view(a.x.shape[0], a.x.shape[1], 2, D // 2),
    "heads transposed": lambda a: a.x.view(*a.x.shape[:2], 2, D // 2).transpose(1, 2),
    "heads and back": lambda a: a.h.transpose(1, 2).reshape(a.h.shape[0], a.h.shape[2], 2 * D),
    "heads into batch": lambda a: a.h.reshape(-1, a.h.shape[2], D),
    "flat all": lambda a: a.x.reshape(-1),
    "flat all by features": lambda a: a.x.reshape(-1, 3),
    "tokens first": lambda a: a.x.transpose(0, 1).reshape(-1, D),
    "batch cut in two": lambda a: a.x.reshape(2, -1, *a.x.shape[1:]),
    "sequence cut in two": lambda a: a.x.reshape(a.x.shape[0], 2, -1, D),
    "sequence in chunks of 2": lambda a: a.x.view(a.x.shape[0], -1, 2, D),
    "sequence and features": lambda a: a.x.reshape(a.x.shape[0], -1),
    "a view across": lambda a: a.x.transpose(1, 2).reshape(a.x.shape[0], 2, -1),
    "permute": lambda a: a.x.permute(2, 0, 1),
    "movedim": lambda a: a.x.movedim(1, 0),
    "t": lambda a: a.z.t(),
    "mT": lambda a: a.x.mT,
    "unsqueeze": lambda a: a.x.unsqueeze(1),
    "unsqueeze last": lambda a: a.z.unsqueeze(-1),
    "squeeze": lambda a: a.x.unsqueeze(1).squeeze(1),
    "squeeze a wide dim": lambda a: a.x.squeeze(1),
    "squeeze all": lambda a: a.r.squeeze(),
    "expand": lambda a: a.r.expand(a.x.shape[0], -1),
    "expand new": lambda a: a.z.expand(3, -1, -1),
    "expand last": lambda a: a.z[:, :, None].expand(-1, -1, 4),
    "expand_as": lambda a: a.v.expand_as(a.x) * a.x,
    "view_as": lambda a: a.x.view(-1, D).view_as(a.y.flatten(0, 1)),
    "unflatten": lambda a: a.x.unflatten(-1, (2, 3)),
    "unflatten tokens": lambda a: a.x.flatten(0, 1).unflatten(0, (-1, a.x.shape[1])),
    "repeat": lambda a: a.x.repeat(1, 1, 2),
    "repeat tokens": lambda a: a.x.repeat(1, 2, 1),
    "repeat batch": lambda a: a.z.repeat(3, 1, 1),
    "tile": lambda a: a.v.tile(2),
    "repeat_interleave": lambda a: a.h.repeat_interleave(2, dim=1),
    "repeat_interleave tokens": lambda a: a.x.repeat_interleave(2, dim=1),
    "view_as_complex": lambda a: torch.view_as_real(
        torch.view_as_complex(a.x.reshape(*a.x.shape[:2], 3, 2)) * 1j
    ),
    "broadcast_to": lambda a: torch.broadcast_to(a.r, a.z.shape) + a.z,
}

MIXING: dict[str, Idiom] = {
    "softmax": lambda a: a.x.softmax(-1),
    "softmax over tokens": lambda a: a.x.softmax(1),
    "softmax over batch": lambda a: a.x.softmax(0),
    "log_softmax": lambda a: a.x.log_softmax(-1),
    "log_softmax of none": lambda a: F.log_softmax(a.z, dim=1),
    "cumsum": lambda a: a.x.cumsum(1),
    "cumsum of features": lambda a: a.x.cumsum(-1),
    "roll": lambda a: a.x.roll(1, 1),
    "roll flat": lambda a: a.z.roll(1),
    "roll two": lambda a: a.x.roll((1, 2), (1, 2)),
    "flip": lambda a: a.x.flip(1),
    "flip features": lambda a: a.x.flip([-1]),
    "sort": lambda a: a.x.sort(-1).values,
    "topk": lambda a: a.x.topk(2, dim=-1).values,
    "topk of tokens": lambda a: a.x.topk(2, dim=1).values,
    "argsort": lambda a: a.z.argsort(1),
    "diff": lambda a: a.z.diff(dim=1),
    "diff prepended": lambda a: a.ids.diff(dim=1, prepend=a.ids[:, :1]),
    "diff prepended floats": lambda a: a.z.diff(dim=1, prepend=a.z[:, :1]),
    "glu": lambda a: F.glu(a.x),
    "unfold": lambda a: a.x.unfold(1, 3, 1),
    "tril": lambda a: (a.x @ a.y.mT).tril(),
    "triu": lambda a: torch.triu(a.z, 1),
    "layer_norm": lambda a: F.layer_norm(a.x, (D,), a.scale, a.scale),
    "layer_norm plain": lambda a: F.layer_norm(a.x, (D,)),
    "rms_norm": lambda a: F.rms_norm(a.x, (D,), a.scale),
    "group_norm": lambda a: F.group_norm(a.x.transpose(1, 2), 2),
    "batch_norm": lambda a: F.batch_norm(a.x.transpose(1, 2), None, None, training=True),
    "instance_norm": lambda a: F.instance_norm(a.x.transpose(1, 2)),
    "conv1d": lambda a: F.conv1d(a.x.mT, a.weight[:, :, None].expand(-1, -1, 3), padding=1),
    "normalize": lambda a: F.normalize(a.x, dim=-1),
    "normalize tokens": lambda a: F.normalize(a.x, dim=1),
    "cumprod": lambda a: a.x.cumprod(1),
    "logcumsumexp": lambda a: a.x.logcumsumexp(1),
    "cdist": lambda a: torch.cdist(a.x, a.y),
    "avg_pool": lambda a: F.avg_pool1d(a.x.mT, 2),
    "interpolate": lambda a: F.interpolate(a.x.mT, scale_factor=2),
    "searchsorted": lambda a: torch.searchsorted(a.z.detach().sort(1).values, a.z.detach()),
    "bucketize": lambda a: torch.bucketize(a.z.detach(), a.v.detach().sort().values),
    "cosine": lambda a: F.cosine_similarity(a.x, a.y, dim=-1),
    "cosine of tokens": lambda a: F.cosine_similarity(a.x, a.y, dim=1),
}

REDUCTIONS: dict[str, Idiom] = {
    "sum": lambda a: a.x.sum(),
    "sum tokens": lambda a: a.x.sum(1),
    "sum tokens kept": lambda a: a.x.sum(1, keepdim=True) + a.y,
    "sum features": lambda a: a.x.sum(-1),
    "sum two": lambda a: a.x.sum((0, 1)),
    "sum to float": lambda a: a.keep.sum(),
    "sum bool tokens": lambda a: a.keep.sum(1),
    "sum dtype": lambda a: a.z.sum(1, dtype=torch.float32),
    "mean": lambda a: a.x.mean(),
    "mean tokens": lambda a: a.x.mean(1),
    "mean features": lambda a: a.x.mean(-1, keepdim=True),
    "mean two": lambda a: a.x.mean((0, 1)),
    "mean used twice": lambda a: (m := a.x.mean(1)) * m,
    "mean of a mean": lambda a: a.x.mean(1).mean(),
    "mean dtype": lambda a: a.ids.mean(dtype=torch.float64),
    "sum twice": lambda a: a.x.sum(1).sum(0),
    "masked mean": lambda a: (a.z * a.keep).sum(1) / a.keep.sum(1),
    "max": lambda a: a.x.amax(1),
    "max with index": lambda a: a.x.max(1).values,
    "max all": lambda a: a.x.max(),
    "min features": lambda a: a.x.amin(-1),
    "argmax": lambda a: a.x.argmax(-1),
    "argmax tokens": lambda a: a.x.argmax(1),
    "any": lambda a: a.keep.any(1),
    "all": lambda a: a.keep.all(),
    "logsumexp": lambda a: a.x.logsumexp(1),
    "logsumexp features": lambda a: a.x.logsumexp(-1),
    "var": lambda a: a.x.var(1),
    "var kept": lambda a: a.x.var(-1, keepdim=True),
    "var uncorrected": lambda a: torch.var(a.x, -1, correction=0, keepdim=True),
    "var unbiased": lambda a: a.x.var(-1, unbiased=False),
    "std": lambda a: a.x.std(-1),
    "var_mean": lambda a: torch.var_mean(a.x, dim=-1, keepdim=True),
    "prod": lambda a: a.x.prod(-1),
    "norm": lambda a: a.x.norm(dim=-1),
    "norm all": lambda a: a.x.norm(),
    "vector_norm": lambda a: torch.linalg.vector_norm(a.x, dim=-1, keepdim=True),
    "nansum": lambda a: a.x.nansum(1),
    "count_nonzero": lambda a: a.ids.count_nonzero(),
    "median": lambda a: a.x.median(1).values,
    "max of two": lambda a: torch.max(a.x, a.y),
}

PRODUCTS: dict[str, Idiom] = {
    "linear": lambda a: F.linear(a.x, a.weight, a.bias),
    "linear no bias": lambda a: F.linear(a.x, a.weight),
    "linear 2d": lambda a: F.linear(a.t, a.weight, a.bias),
    "linear over tokens": lambda a: F.linear(a.x.mT, a.t.mT),
    "matmul weight": lambda a: a.x @ a.table,
    "mm": lambda a: a.t @ a.table,
    "mm of tokens": lambda a: a.t.t() @ a.t,
    "scores": lambda a: a.x @ a.y.transpose(1, 2),
    "tokens summed": lambda a: a.x.transpose(1, 2) @ a.y,
    "scores and values": lambda a: (a.x @ a.y.mT).softmax(-1) @ a.y,
    "heads": lambda a: a.h @ a.h.transpose(-1, -2),
    "heads summed": lambda a: a.h.transpose(-1, -2) @ a.h.sin(),
    "bmm": lambda a: torch.bmm(a.x, a.y.mT),
    "baddbmm": lambda a: torch.baddbmm(a.x @ a.y.mT, a.x, a.y.mT),
    "baddbmm over tokens": lambda a: torch.baddbmm(a.c[:, :, None], a.x.mT, a.y),
    "addmm": lambda a: torch.addmm(a.bias, a.t, a.weight.t()),
    "vector": lambda a: a.x @ a.v,
    "vector of tokens": lambda a: a.x.mT @ a.r[0],
    "left vector": lambda a: a.r[0] @ a.x,
    "dot": lambda a: a.r[0] @ a.r[0],
    "outer": lambda a: torch.outer(a.r[0], a.v),
    "2d times 3d": lambda a: a.t @ a.y.mT,
    "3d times 2d of tokens": lambda a: a.x.mT @ a.t,
    "einsum linear": lambda a: torch.einsum("bsd,od->bso", a.x, a.weight),
    "einsum scores": lambda a: torch.einsum("bsd,btd->bst", a.x, a.y),
    "einsum summed": lambda a: torch.einsum("bsd,bse->bde", a.x, a.y),
    "einsum all": lambda a: torch.einsum("bsd,bsd->", a.x, a.y),
    "einsum batch": lambda a: torch.einsum("bsd,bsd->sd", a.x, a.y),
    "einsum one": lambda a: torch.einsum("bsd->bd", a.x),
    "einsum three": lambda a: torch.einsum("bsd,bse,sf->bdef", a.x, a.y, a.t),
    "einsum outer": lambda a: torch.einsum("bs,bt->bst", a.z, a.z.sin()),
    "einsum implicit": lambda a: torch.einsum("bsd,od", a.x, a.weight),
    "einsum dots": lambda a: torch.einsum("...d,od->...o", a.x, a.weight),
    "einsum own": lambda a: torch.einsum("bsd,bsd->bs", a.x, a.x),
    "embedding": lambda a: F.embedding(a.ids, a.table),
    "embedding of tokens": lambda a: F.embedding(a.ids, a.t),
    "tensordot": lambda a: torch.tensordot(a.x, a.weight, dims=([2], [1])),
    "kron": lambda a: torch.kron(a.v, a.v),
    "bilinear": lambda a: F.bilinear(a.x, a.y, a.weight[:, :, None].expand(-1, -1, D)),
    "attention": lambda a: F.softmax(a.h @ a.h.mT, -1) @ a.h,
}

SHAPING: dict[str, Idiom] = {
    "slice features": lambda a: a.x[..., 1:4],
    "slice tokens": lambda a: a.x[:, :-1],
    "slice half": lambda a: a.x[:, : a.x.shape[1] // 2],
    "slice batch": lambda a: a.x[1:],
    "step": lambda a: a.x[:, ::2],
    "narrow": lambda a: a.x.narrow(2, 1, 2),
    "select token": lambda a: a.x[:, 0],
    "select last": lambda a: a.x[:, -1],
    "select sample": lambda a: a.x[0],
    "select feature": lambda a: a.x[..., 2],
    "split": lambda a: a.x.split(2, dim=-1),
    "split sizes": lambda a: a.x.split([1, 5], dim=-1),
    "chunk": lambda a: a.x.chunk(2, dim=-1),
    "chunk tokens": lambda a: a.x.chunk(2, dim=1),
    "unbind": lambda a: a.h.unbind(1),
    "tensor_split": lambda a: a.x.tensor_split(3, -1),
    "cat features": lambda a: torch.cat([a.x, a.y], -1),
    "cat tokens": lambda a: torch.cat([a.x, a.y], 1),
    "cat batch": lambda a: torch.cat([a.x, a.y], 0),
    "cat itself": lambda a: torch.cat([a.x, a.x], -1),
    "cat rotated": lambda a: torch.cat([-a.x[..., 3:], a.x[..., :3]], -1) * a.t,
    "cat shifted": lambda a: torch.cat([a.ids[:, 1:], torch.full_like(a.ids[:, :1], -100)], 1),
    "cat class token": lambda a: torch.cat([a.c[:, None], a.x], 1),
    "stack": lambda a: torch.stack([a.x, a.y]),
    "stack last": lambda a: torch.stack([a.x, a.y], -1),
    "stack middle": lambda a: torch.stack([a.x, a.y], 1),
    "pad features": lambda a: F.pad(a.x, (1, 2)),
    "pad tokens": lambda a: F.pad(a.x, (0, 0, 1, 0)),
    "pad value": lambda a: F.pad(a.ids, (0, 1), value=-100),
    "pad batch": lambda a: F.pad(a.x, (0, 0, 0, 0, 1, 0)),
    "pad negative": lambda a: F.pad(a.x, (0, 0, -1, 1)),
    "pad reflect": lambda a: F.pad(a.x, (1, 1), mode="reflect"),
    "one_hot": lambda a: F.one_hot(a.ids, D),
    "gather features": lambda a: a.x.gather(-1, a.ids[:, :, None]),
    "gather tokens": lambda a: a.x.gather(1, a.ids[:, :, None].expand(-1, -1, D)),
    "gather last token": lambda a: a.z.gather(1, a.keep.sum(1, keepdim=True) - 1),
    "take_along_dim": lambda a: torch.take_along_dim(a.x, a.ids[:, :, None], -1),
    "scatter": lambda a: torch.zeros_like(a.x).scatter(-1, a.ids[:, :, None], 1.0),
    "scatter_add": lambda a: torch.zeros_like(a.x).scatter_add(
        -1, a.ids[:, :, None], a.z[:, :, None]
    ),
    "scatter_add tokens": lambda a: torch.zeros_like(a.z).scatter_add(1, a.ids, a.z),
    "index_select": lambda a: a.x.index_select(-1, torch.tensor([0, 2])),
    "index_select tokens": lambda a: a.x.index_select(1, torch.tensor([0, 2])),
    "index_add": lambda a: a.c.index_add(1, torch.tensor([0, 2]), a.c[:, :2]),
    "index table": lambda a: a.t[a.ids],
    "index by tokens": lambda a: a.table[a.ids],
    "index tokens": lambda a: a.x[:, torch.tensor([0, 3])],
    "index features": lambda a: a.x[:, :, torch.tensor([[0, 3], [1, 2]])],
    "index rows": lambda a: a.x[torch.arange(a.x.shape[0]), -1],
    "index last valid": lambda a: a.x[torch.arange(a.x.shape[0]), a.keep.sum(1) - 1],
    "index of two": lambda a: a.x[torch.arange(a.x.shape[0])[:, None], a.ids],
    "index_put": lambda a: a.x.index_put(
        (torch.arange(a.x.shape[0]), a.ids[:, 0]), torch.zeros((), dtype=torch.float64)
    ),
    "masked scatter": lambda a: a.x.masked_scatter(a.keep[:, :, None], a.y),
    "select_scatter": lambda a: a.x.select_scatter(a.c, 1, 0),
    "slice_scatter": lambda a: a.x.slice_scatter(a.y[:, :2], 1, 0, 2),
    "diagonal": lambda a: (a.x @ a.y.mT).diagonal(dim1=1, dim2=2),
    "diag_embed": lambda a: torch.diag_embed(a.z),
    "meshgrid": lambda a: torch.meshgrid(a.r[0], a.v, indexing="ij")[0],
    "arange": lambda a: a.z + torch.arange(a.z.shape[1]),
    "arange table": lambda a: a.x + a.t[torch.arange(a.x.shape[1])],
    "new_zeros": lambda a: a.x + a.x.new_zeros(a.x.shape[1], 1),
    "full": lambda a: a.x * torch.full((a.x.shape[0], a.x.shape[1], 1), 2.0, dtype=torch.float64),
    "eye": lambda a: a.x @ a.y.mT + torch.eye(a.x.shape[1], dtype=torch.float64),
    "full_like": lambda a: torch.full_like(a.x, 2.0) * a.y,
    "sizes": lambda a: a.x / a.x.shape[1] + a.x.shape[0],
    "isin": lambda a: torch.isin(a.ids, torch.tensor([1, 2])),
    "unique positions": lambda a: (a.ids[:, :, None] == a.ids[:, None, :]).sum(-1),
}

LOSSES: dict[str, Idiom] = {
    "cross_entropy": lambda a: F.cross_entropy(a.x.flatten(0, 1), a.ids.flatten()),
    "cross_entropy sum": lambda a: F.cross_entropy(
        a.x.flatten(0, 1), a.ids.flatten(), reduction="sum"
    ),
    "cross_entropy none": lambda a: F.cross_entropy(
        a.x.flatten(0, 1), a.ids.flatten(), reduction="none"
    ),
    "cross_entropy ignored": lambda a: F.cross_entropy(
        a.x.flatten(0, 1), a.ids.masked_fill(a.keep, -100).flatten()
    ),
    "cross_entropy classes first": lambda a: F.cross_entropy(a.x.mT, a.ids),
    "cross_entropy classes first, none": lambda a: F.cross_entropy(
        a.x.mT, a.ids, reduction="none"
    ).sum(1),
    "cross_entropy tokens as classes": lambda a: F.cross_entropy(
        a.x, a.ids[:, :D], reduction="sum"
    ),
    "cross_entropy weight": lambda a: F.cross_entropy(
        a.x.flatten(0, 1), a.ids.flatten(), weight=a.scale.exp().detach()
    ),
    "cross_entropy probabilities": lambda a: F.cross_entropy(
        a.x.flatten(0, 1), a.y.softmax(-1).flatten(0, 1)
    ),
    "cross_entropy shifted": lambda a: F.cross_entropy(
        a.x[:, :-1].reshape(-1, D), a.ids[:, 1:].reshape(-1)
    ),
    "cross_entropy per sample": lambda a: F.cross_entropy(a.x[:, 0], a.ids[:, 0]),
    "nll": lambda a: F.nll_loss(a.x.log_softmax(-1).flatten(0, 1), a.ids.flatten()),
    "mse": lambda a: F.mse_loss(a.x, a.y),
    "mse sum": lambda a: F.mse_loss(a.x, a.y, reduction="sum"),
    "mse none": lambda a: F.mse_loss(a.x, a.y, reduction="none"),
    "l1": lambda a: F.l1_loss(a.x, a.y),
    "smooth l1": lambda a: F.smooth_l1_loss(a.x, a.y, reduction="sum"),
    "huber": lambda a: F.huber_loss(a.x, a.y),
    "bce": lambda a: F.binary_cross_entropy_with_logits(a.x, a.y.sigmoid()),
    "bce weighted": lambda a: F.binary_cross_entropy_with_logits(
        a.x, a.y.sigmoid(), pos_weight=a.scale.exp().detach()
    ),
    "kl_div": lambda a: F.kl_div(a.x.log_softmax(-1), a.y.softmax(-1), reduction="sum"),
    "kl_div mean": lambda a: F.kl_div(a.x.log_softmax(-1), a.y.softmax(-1), reduction="batchmean"),
    "triplet": lambda a: F.triplet_margin_loss(a.x[:, 0], a.y[:, 0], a.c),
}

TABLES = {
    "pointwise": POINTWISE,
    "views": VIEWS,
    "mixing": MIXING,
    "reductions": REDUCTIONS,
    "products": PRODUCTS,
    "shaping": SHAPING,
    "losses": LOSSES,
}
MESHES = {"data x ring": DATA_RING, "usp": USP}


@functools.cache
def problems(table: str, mesh_name: str) -> dict[str, list[str]]:
    """Per idiom the combinations that went wrong."""
    mesh, idioms = MESHES[mesh_name], TABLES[table]
    capture, expected = capture_idioms(idioms), eager(idioms)
    found: dict[str, list[str]] = {name: [] for name in idioms}
    cases: list[Case] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign, "SPECIAL_RULES", SPECIAL_RULES_WITH_FORCE)
        for name in idioms:
            cases += cases_of(capture, name, mesh, on_error=found[name].append)
    module = Idioms(idioms)
    values = {name: v for name, (v, _) in expected.items()}
    ranks = run_ranks(
        lambda context: run_rank(context, cases, capture, mesh, module, values), mesh.sizes, 30.0
    )
    places = list(itertools.product(*(range(n) for n in mesh.sizes.values())))
    specs = [input_spec(capture, name, mesh) for name in SHAPES]
    for number, case in enumerate(cases):
        name = case.name.partition("[")[0]
        for rank, outcomes in enumerate(ranks):
            place = dict(zip(mesh.sizes, places[rank], strict=True))
            found[name] += [
                f"{case.name} rank {rank}: {text}"
                for text in differences(outcomes[number], case, expected[name], specs, mesh, place)
            ]
    return found


def differences(outcome, case, expected, specs, mesh, place) -> Iterator[str]:  # type: ignore
    if outcome.error:
        yield outcome.error
        return
    values, gradients = expected
    for value, spec, own in zip(values, case.outputs, outcome.values, strict=True):
        want = cut(value, spec, mesh.sizes, place)
        if want.dtype != own.dtype:
            yield f"dtype {own.dtype} instead of {want.dtype}"
        yield from differs("result", own, want)
    specs = [*specs, *[None] * (len(gradients) - len(specs))]
    for index, (value, spec, own) in enumerate(
        zip(gradients, specs, outcome.gradients, strict=True)
    ):
        if value is None and own is None:
            continue
        want = torch.zeros_like(own) if value is None else value
        if spec is not None and value is not None:
            want = cut(value, spec, mesh.sizes, place)
        yield from differs(f"gradient {index}", torch.zeros_like(want) if own is None else own,
                           want)  # fmt: skip


def differs(what: str, own: Tensor, want: Tensor) -> Iterator[str]:
    if own.shape != want.shape:
        yield f"{what}: shape {tuple(own.shape)} instead of {tuple(want.shape)}"
    elif own.dtype in (torch.float32, torch.bfloat16):
        if not torch.allclose(own, want, rtol=1e-5, atol=1e-5):
            yield f"{what} differs"
    elif not torch.allclose(own.double(), want.double(), rtol=1e-9, atol=1e-9, equal_nan=True):
        yield f"{what} differs by {(own.double() - want.double()).abs().max():.2e}"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("table", "name"), [(t, n) for t, ops in TABLES.items() for n in ops])
def test_local_operations_give_the_global_result(table: str, name: str, mesh: str) -> None:
    assert problems(table, mesh)[name] == []
