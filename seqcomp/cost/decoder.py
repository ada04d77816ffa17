"""The shape of a decoder from its widths, without a module."""

from __future__ import annotations

from seqcomp.cost.parts import Bytes, Parameters, Saved
from seqcomp.cost.shape import Apart, Block, MaskKind, ModelShape

LARGE = 2**20  # elements of an embedding or a head (lowering/fsdp_units.py)


def decoder_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    mlp_width: int,
    gated: bool,
    tied: bool,
    mask: MaskKind,
    window: int,
    experts: int,
    active: int,
    name: str,
) -> ModelShape:
    """See `ModelShape.decoder`."""
    attention, kv = 2 * heads * head_dim * hidden, 2 * kv_heads * head_dim * hidden
    linears = (3 if gated else 2) * hidden * mlp_width
    biases = 0 if gated else (heads + 2 * kv_heads) * head_dim + mlp_width + 2 * hidden
    norms = 2 * hidden * (1 if gated else 2)
    router = experts * hidden
    parameters = Parameters(
        matrices=attention + kv + (0 if experts else linears) + (0 if gated else biases),
        kv=kv,
        experts=experts * linears,
        norms=norms + router,
    )
    block = Block(
        count=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        parameters=parameters,
        saved=_saved(hidden, heads, kv_heads, head_dim, mlp_width * max(active, 1), gated=gated),
        mask=mask,
        window=window,
        gated=gated,
        experts=experts,
        active=active,
        token_local=experts > 0,
    )
    embedding = vocab * hidden
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=vocab,
        blocks=(block,),
        embedding=embedding,
        head=0 if tied else embedding,
        other=hidden * (1 if gated else 2),
        # The last norm, tokens.
        ends=Bytes(4 * hidden + 20, 2 * hidden),
        tables=Bytes(0, 2 * head_dim if gated else 0),
        tied=tied,
        apart=() if tied or embedding < LARGE else (Apart(embedding, first=True), Apart(embedding)),
    )


def _saved(h: int, heads: int, kv_heads: int, d: int, width: int, *, gated: bool) -> Saved:
    """As transformers' Llama in bf16, with norms in fp32 and attention in one kernel.

    Two norms, of each the input in fp32, the normalised values and the result;
    q, k, v, the output and its log-sum-exp; of the MLP gate, its activation, up and their product.
    Not gated: GPT-2, its norms in one kernel and its GELU (tanh) written out.
    """
    q, kv = heads * d, 2 * kv_heads * d
    if gated:
        none = Bytes(8 * h + 8 + 4 * heads, 4 * h + 2 * q + kv + 4 * width)
    else:
        none = Bytes(16 + 4 * heads, 4 * h + 2 * q + kv + 5 * width)
    return Saved(
        none=none,
        selective=Bytes(4 * heads, h + q),
        block=Bytes(0, h),
        attended=Bytes(0, q + kv),
    )
