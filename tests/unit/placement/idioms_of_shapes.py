"""Products, shaping, losses: functions of shared inputs `a` (forced.SHAPES)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.unit.placement.idioms import D, Idiom

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
    "cat flat tokens": lambda a: torch.cat([a.x.flatten(0, 1), a.y.flatten(0, 1)]),
    "cat flat tokens, summed": lambda a: torch.cat([a.z.flatten(), a.z.flatten() * 2]).sum(),
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
    "scatter_add of flat tokens": lambda a: torch.zeros(D, dtype=torch.float64).scatter_add(
        0, a.ids.flatten(), a.z.flatten()
    ),
    "scatter_add per sample": lambda a: a.c.new_zeros(a.c.shape).scatter_add(1, a.ids, a.z),
    "scatter_add onto values": lambda a: a.v.scatter_add(0, a.ids.flatten(), a.z.flatten()),
    "histc": lambda a: torch.histc(a.ids.double(), D, 0, D),
    "histc of what is there": lambda a: torch.histc(a.z.detach(), 4),
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
    "type_as of another shape": lambda a: a.x * torch.arange(D).type_as(a.z) + a.t.type_as(a.c),
    "to another of another shape": lambda a: (
        a.x * torch.arange(D).to(a.z) + a.ids.to(a.t)[..., None]
    ),
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
