"""Dropout keeps any placement of its operand: a mask is a function of places in the whole."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from seqcomp.placement.pointwise import aligned
from seqcomp.placement.rule import Decision, Env, Rule
from seqcomp.placement.spec import replicated


def dropout_rule(node: Node, env: Env) -> Decision:
    """Of a sum of parts the whole is dropped, so the parts are added up first."""
    x, keys = node.args[:2]
    decision = aligned(node, [x], env)
    wants = {**decision.wants, keys: replicated(env.shape(keys))}
    return replace(decision, wants=wants, form="dropout")


DROPOUT_RULES: dict[str, Rule] = {"keyed_dropout": dropout_rule}
