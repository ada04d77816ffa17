"""Attention over a sharded sequence: Ulysses inside, ring outside, one autograd node."""

from seqcomp.runtime.attention.function import AttentionPlan, Transport, attention

__all__ = ["AttentionPlan", "Transport", "attention"]
