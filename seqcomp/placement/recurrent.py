"""LSTM, GRU and RNN layers: a state that goes along one dim of their input.

That dim and the features are whole, and so are the weights; samples stay where they are. Where
tokens are the samples (words of characters, chunks of a longer sequence) every rank runs its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from seqcomp.capture.edit import argument, op_name
from seqcomp.capture.export import Capture
from seqcomp.capture.kinds import RECURRENT
from seqcomp.capture.sizes import Size, product
from seqcomp.placement.rule import (
    Decision,
    Env,
    Rule,
    gather_all,
    outputs_of,
    tensor_args,
    unsharded,
)
from seqcomp.placement.spec import Spec, whole


def state_dim(node: Node) -> int | None:
    """The dim of the first operand along which the state goes; None for packed sequences."""
    if not isinstance(argument(node, 8, "batch_first"), bool):
        return None
    return 1 if argument(node, 8, "batch_first") else 0


def recurrent_flops(node: Node, capture: Capture) -> Size:
    """Forward FLOPs of the products with the weights, 2 per multiplication and addition."""
    weights = [capture.shape(weight) for weight in argument(node, 2, "params")]
    samples = capture.shape(node.args[0])[:-1]
    return 2 * product(samples) * sum(product(w) for w in weights if len(w) == 2)


def recurrent_rule(node: Node, env: Env) -> Decision:
    along = state_dim(node)
    if along is None:
        return gather_all(node, env, f"{op_name(node)} carries a state over packed sequences")
    x = node.args[0]
    spec = env.spec(x)
    want = unsharded(spec, [along, 2])
    samples = want.dims[1 - along]
    wants = {n: Spec(tuple(whole(s) for s in env.shape(n))) for n in tensor_args(node)}
    states = argument(node, 1, "hx")
    for state in states if isinstance(states, list | tuple) else [states]:
        wants[state] = wants[state].with_dim(1, samples)
    wants[x] = want
    first, *ends = outputs_of(node, env)
    out = want.with_dim(2, whole(first[2]))
    last = tuple(Spec((whole(s[0]), samples, whole(s[2]))) for s in ends)
    lost = set(spec.axes) - set(want.axes)
    reason = f"{op_name(node)} carries a state along a sharded dim" if lost else ""
    return Decision(wants, (out, *last), gathered=reason)


RECURRENT_RULES: Mapping[str, Rule] = dict.fromkeys(RECURRENT, recurrent_rule)
