"""What one rank holds at the worst moment of a step, in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from seqcomp.cost.outside import outputs_of
from seqcomp.cost.run import Run
from seqcomp.cost.shape import Block, ModelShape
from seqcomp.cost.source import seen_by
from seqcomp.cost.unfused import held_masks, is_tiled, mask_bytes, takes_dense_mask
from seqcomp.cost.weights import apart_of, root_parameters, sharding
from seqcomp.cost.widths import Widths, padded, widths_of
from seqcomp.plan.resolve import ResolvedPlan

_FEWEST = 1024  # tokens of a chunk of an MLP (runtime/chunked_mlp.py)


@dataclass(frozen=True, slots=True)
class HeldRow:
    """Bytes of one kind; ``on_host``: in host memory, which is not counted against the device."""

    what: str
    bytes: int
    note: str = ""
    on_host: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values with exactly the fields of this class."""
        return asdict(self)


def memory_rows(plan: ResolvedPlan, model: ModelShape, run: Run) -> tuple[HeldRow, ...]:
    """What is there at once when most is; rows add up to the peak."""
    given, run, width = run.seq_len, padded(plan, model, run), widths_of(plan, run)
    rows = [*_state(plan, model, width, run)]
    if run.trains:
        rows += _activations(plan, model, width, run, given)
    else:
        rows.append(HeldRow("keys and values", cache_bytes(plan, model, run), "of all layers"))
        rows.append(HeldRow("working layer", round(_working(plan, model, width, run))))
    masks = held_masks(plan, model, run, width.activation)
    rows.append(HeldRow("masks of attention", masks, "of all pairs"))
    return tuple(row for row in rows if row.bytes)


def peak_bytes(rows: tuple[HeldRow, ...]) -> int:
    """On the device."""
    return sum(row.bytes for row in rows if not row.on_host)


def local_tokens(plan: ResolvedPlan, run: Run) -> int:
    """Tokens of a rank between attentions, of a padded run."""
    return run.batch * run.seq_len // plan.sequence_size


def cache_bytes(plan: ResolvedPlan, model: ModelShape, run: Run) -> int:
    """Keys and values of all layers, of the tokens and KV heads that a rank attends with: of an
    encoder those that the decoder's layers make of it."""
    e, found = widths_of(plan, run).activation, 0
    for block in (b for b in model.blocks if b.cross is not None or not model.source):
        found += block.count * kv_tokens_bytes(plan, model, block, run, e)
        if block.cross is not None:
            # Of another number of tokens they are whole on every rank.
            own = replace(block, source=block.cross.source)
            found += block.count * kv_tokens_bytes(*_seen(plan, model, own, run), e)
    return found


def _seen(
    plan: ResolvedPlan, model: ModelShape, block: Block, run: Run
) -> tuple[ResolvedPlan, ModelShape, Block, Run]:
    over, own = seen_by(plan, block, run)
    return over, model, block, own


def kv_tokens_bytes(
    plan: ResolvedPlan, model: ModelShape, block: Block, run: Run, element: int
) -> int:
    """Keys and values of one layer between the exchanges of ulysses."""
    shape = block.attention(run.batch, run.seq_len, element, model.hidden)
    own = shape.on_tensor_rank(plan.tensor_size).on_ulysses_rank(plan.ulysses_size)
    tokens = run.batch * run.seq_len // plan.ring_size
    return tokens * own.kv_heads * own.kv_head * element


# --- parameters and what goes with them ------------------------------------------------------


def _state(plan: ResolvedPlan, model: ModelShape, width: Widths, run: Run) -> Iterator[HeldRow]:
    t = plan.tensor_size
    ways = math.prod(plan.axes[a] for a in sharding(plan)[0])
    blocks = [block_parameters(block, t) for block in model.blocks]
    root = sum(root_parameters(plan, model))
    apart = [-(-one.words // t) + one.other for one in apart_of(plan, model)]
    units = apart
    for block, own in zip(model.blocks, blocks, strict=True):
        if block.parameters.with_root:
            root += block.count * own
        else:
            units += block.count * [own]
    whole = root + sum(units)
    held = -(-whole // ways) * width.kept
    learnt = held - model.frozen // ways * width.kept
    fsdp = plan.plan.strategies.fsdp
    host = fsdp is not None and fsdp.offload == "cpu"
    note = f"shards of 1/{ways}" if ways > 1 else ""
    if fsdp is not None and fsdp.mixed_precision != "none":
        note += f"{', ' if note else ''}kept in {run.dtype}"
    yield HeldRow("parameters", held, note, host)
    if run.trains:
        yield HeldRow("gradients", learnt, "as the parameters", host)
        note = "AdamW: two moments as the parameters"
        yield HeldRow("optimizer state", 2 * learnt, note, host)
    if fsdp is not None and ways > 1:
        reshard = fsdp.reshard or not run.trains
        wanted = sorted(units)[-2:] if reshard else units
        note = f"the root and {'the two largest' if reshard else 'all'} blocks"
        yield HeldRow("gathered parameters", (root + sum(wanted)) * width.gathered, note)


def block_parameters(block: Block, tensor: int) -> int:
    """Of one block, what one tensor rank holds."""
    p = block.parameters
    return p.on_tensor_rank(tensor, block.kv_heads) + p.experts + p.norms + p.whole


# --- activations -----------------------------------------------------------------------------


def _activations(
    plan: ResolvedPlan, model: ModelShape, width: Widths, run: Run, given: int
) -> Iterator[HeldRow]:
    memory, tokens = plan.plan.memory, local_tokens(plan, run)
    checkpoint = memory.checkpoint
    host = memory.offload == "cpu" and checkpoint != "none"
    kept = sum(
        block.count * kept_of(plan, model, block, width, run, checkpoint) for block in model.blocks
    )
    how = "" if checkpoint == "none" else f"checkpoint: {checkpoint}"
    if model.shared is not None:
        kept += tokens * model.shared.of(checkpoint, width.activation)
    if model.sequences > 1 and plan.tensor_size > 1 and checkpoint != "none":  # gathered, for all
        kept += tokens * plan.tensor_size * model.hidden * width.activation
    yield HeldRow("saved activations", round(kept), how, host)
    chunks, e = memory.loss_chunks, width.activation
    logits = 0.0 if chunks > 1 else model.saved_of_logit(e, plan.tensor_size) * model.vocab
    # Latent keys are turned before tensor ranks gather them: tables of own tokens do.
    group = 1 if any(b.latent for b in model.blocks) else plan.tensor_size
    outside = tokens * (model.ends.of(e) + logits + group * model.tables.of(e))
    outside += run.batch * model.whole_ends.of(e) if model.whole_ends else 0
    yield HeldRow("saved outside of blocks", round(outside), "embedding, head and loss")
    if outputs_of(plan) == "full" and model.vocab:
        size = run.batch * given * model.vocab * e  # without what fills the sequence up
        yield HeldRow("output logits", size, "whole on every rank; outputs: {logits: drop}")
    # The gradient of logits, in fp32 and as logits are; chunks make the logits then, too.
    each = (4 + e) + (model.saved_of_logit(e, plan.tensor_size) + e if chunks > 1 else 0)
    loss = tokens * model.vocab * each / chunks
    again = 0.0
    if checkpoint != "none":
        again = max(
            (made_again(plan, model, b, width, run) for b in model.blocks),
            default=0.0,
        )
    working = again + _working(plan, model, width, run)
    if working >= loss:
        what = "a block that runs again, and its work space" if again else "work space of a block"
        yield HeldRow("working block", round(working), what)
    else:
        note = f"of 1/{chunks} of the tokens" if chunks > 1 else ""
        yield HeldRow("gradients of logits", round(loss), note)


def made_again(
    plan: ResolvedPlan, model: ModelShape, block: Block, width: Widths, run: Run
) -> float:
    """What a block keeps while it runs a second time, beside what was kept of the first."""
    whole = kept_of(plan, model, block, width, run, "none")
    if plan.plan.memory.checkpoint == "block":
        return whole
    if block.source:
        return whole - kept_of(plan, model, block, width, run, "selective")
    tokens = local_tokens(plan, run) * width.activation
    kept = kept_of(plan, model, block, width, run, "selective") - tokens * model.hidden
    if plan.tensor_size > 1:  # results of the reduce-scatters, which nothing saves in a first run
        kept -= _scattered(block) * tokens * model.hidden
    inside = 0 if block.experts else tokens * _inside(block)
    return whole - kept - inside * (1 - 1 / _chunks(plan, model, block, run))


def _inside(block: Block) -> int:
    """Elements for a token that an MLP saves between what goes in and out."""
    return (4 if block.gated else 5) * block.mlp_width * max(block.active, 1)


def _chunks(plan: ResolvedPlan, model: ModelShape, block: Block, run: Run) -> int:
    """In how many chunks of tokens the MLP of a block runs: under ``checkpoint: selective`` as many
    as make what one holds inside no larger than what goes in, of 1024 tokens at least."""
    if plan.plan.memory.checkpoint != "selective" or block.experts:
        return 1
    tokens = local_tokens(plan, run) * plan.tensor_size
    return max(1, min(-(-_inside(block) // model.hidden), tokens // _FEWEST))


def kept_of(
    plan: ResolvedPlan,
    model: ModelShape,
    block: Block,
    width: Widths,
    run: Run,
    checkpoint: str,
) -> float:
    """What autograd keeps of one block on one rank, in bytes."""
    tokens, e = local_tokens(plan, run), width.activation
    if block.source:
        return _kept_whole(plan, model, block, e, run, checkpoint)
    kept = tokens * block.saved.of(checkpoint, e)
    if block.whole is not None:  # keys and values of a source, by heads
        kept += run.batch * block.whole.of(checkpoint, e) / plan.tensor_size
    if block.starts_in_product and plan.tensor_size > 1 and checkpoint != "none":
        kept += tokens * plan.tensor_size * model.hidden * e
    if checkpoint == "block":
        return kept
    keeps = checkpoint == "selective"
    pairs = block.scores * _pairs_bytes(plan, block, width, run)
    if pairs and keeps:  # no kernel whose result could be kept
        kept -= tokens * block.heads * ((block.value_dim or block.head_dim) * e + max(e, 4))
    elif pairs:
        kept += pairs
    if takes_dense_mask(plan, block, run) and not (keeps or block.scores):
        kept += mask_bytes(run, e)  # to be added to scores; each layer has its own
    u, t = plan.ulysses_size, plan.tensor_size
    shape = block.attention(1, 1, e, model.hidden)
    on_tensor = shape.on_tensor_rank(t)
    own = on_tensor.on_ulysses_rank(u)
    group = tokens * t  # tokens of a tensor group, whose heads this rank has
    if u > 1:
        # Queries, keys, values and output between the exchanges; the output behind them too.
        between = u * (own.width + own.value_width + own.kv_heads * own.kv_head)
        exchanged = 1 + (block.cross is not None and not block.cross.source)
        kept += exchanged * group * e * between
        if not keeps:
            kept -= tokens * block.saved.attended.of(e)
    elif t > block.kv_heads and not keeps:
        kept += (group - tokens) * e * shape.kv_heads * shape.kv_head  # made whole, then sliced
    if block.key_norm is not None and t > block.kv_heads and not keeps:
        kept += (group - tokens) * block.key_norm.kept.of(e)
    if block.latent is not None and t > 1 and not keeps:
        kept += 2 * (group - tokens) * e * block.latent.rotary  # gathered, and turned
    if keeps and t > 1:
        kept += _scattered(block) * tokens * e * model.hidden
    return kept


def _scattered(block: Block) -> int:
    """Results of reduce-scatters of one block."""
    return block.attentions + (not block.token_local)


def _kept_whole(
    plan: ResolvedPlan, model: ModelShape, block: Block, e: int, run: Run, checkpoint: str
) -> float:
    """Of a sequence that every rank has whole: tensor ranks share what is inside of attention and
    MLP; what its norms are given and give, or its input, each of them keeps."""
    assert block.whole is not None
    kept, t = run.batch * block.whole.of(checkpoint, e), plan.tensor_size
    one = run.batch * block.source * model.hidden * e
    if checkpoint == "block" or t == 1:
        return kept
    outer = min(kept, one if checkpoint == "selective" else 4 * one)
    sums = 2 * one if checkpoint == "selective" else 0
    return outer + (kept - outer) / t + sums


def _pairs_bytes(plan: ResolvedPlan, block: Block, width: Widths, run: Run) -> float:
    """A number for each head of a rank and each pair; 0 where attention is in tiles."""
    if is_tiled(plan, block, run) or block.source:
        return 0.0
    return width.activation * run.batch * run.seq_len**2 * block.heads / plan.tensor_size


def _working(plan: ResolvedPlan, model: ModelShape, width: Widths, run: Run) -> float:
    """Beside what is saved, while one block runs: gathered inputs, blocks of keys and values under
    way with the gradients that travel, and the accumulators of the online softmax."""
    return max(
        (_working_block(plan, model, block, width, run) for block in model.blocks), default=0
    )


def _working_block(
    plan: ResolvedPlan, model: ModelShape, block: Block, width: Widths, run: Run
) -> float:
    plan, run = seen_by(plan, block, run)
    tokens, e, t = local_tokens(plan, run), width.activation, plan.tensor_size
    group = tokens * t
    moved = 2 * group * model.hidden * e
    mlp = (3 if block.gated else 2) * group * e * block.mlp_width * max(block.active, 1)
    found = moved + mlp / (1 if block.experts else t) / _chunks(plan, model, block, run)
    if block.scores:
        found += 2 * _pairs_bytes(plan, block, width, run)  # before and behind one operation
    if plan.ring_size > 1:
        keys = kv_tokens_bytes(plan, model, block, run, e)
        blocks = plan.ring_size if plan.transport == "allgather" else 2
        found += blocks * keys
        own = block.attention(1, 1, e, model.hidden).on_tensor_rank(t)
        own = own.on_ulysses_rank(plan.ulysses_size)
        queries = group * plan.ulysses_size
        wide = max(e, 4)
        found += queries * wide * own.value_width
        if run.trains:
            found += 2 * keys / e * wide + queries * wide * own.width
    return found
