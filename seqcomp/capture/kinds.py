"""What kind of operation a node is, whatever its placement."""

from __future__ import annotations

import torch
from torch.fx import Node

from seqcomp.capture.edit import TRANSPOSITIONS, op_name

VIEWS = TRANSPOSITIONS | frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as",
        "_reshape_alias", "expand", "expand_as", "broadcast_to", "unsqueeze", "squeeze", "repeat",
        "tile", "repeat_interleave", "view_as_complex", "view_as_real",
    )
)  # fmt: skip

CONVOLUTIONS = (
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution", "aten.conv_transpose1d",
)  # fmt: skip

DROPOUTS = ("aten.dropout", "aten.dropout_", "aten.feature_dropout", "aten.feature_dropout_")
# Without a form of our own where they are on.
OTHER_DROPOUTS = (
    "aten.alpha_dropout", "aten.alpha_dropout_", "aten.feature_alpha_dropout",
    "aten.feature_alpha_dropout_",
)  # fmt: skip

RECURRENT = ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")

# Element-wise in fact though not tagged so.
_UNTAGGED = {
    "aten.__and__", "aten.__or__", "aten.__xor__", "aten.to", "aten.type_as", "aten.contiguous",
    "aten.clone", "aten.alias", "aten.detach", "aten.lift_fresh_copy", "aten.zeros_like",
    "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.polar", "aten.complex",
    "aten.real", "aten.imag", "aten.conj", "keyed_dropout", "aten.where", "aten._conj",
    "aten.mse_loss_none", "aten.nan_to_num", "aten.isclose", "aten.scalar_tensor",
    "aten.floor_divide", "aten.true_divide", "aten.divide", "aten.multiply", "aten.subtract",
    "aten.negative", "aten.absolute", "aten.greater", "aten.greater_equal", "aten.less",
    "aten.less_equal", "aten.not_equal", "aten.rsub", "aten.fmod", "aten.remainder",
}  # fmt: skip


def is_off(dropout: Node) -> bool:
    """Whether a dropout changes nothing."""
    return not dropout.args[2] or dropout.args[1] == 0.0


def is_pointwise(node: Node) -> bool:
    target = node.target
    return op_name(node) in _UNTAGGED or (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    )
