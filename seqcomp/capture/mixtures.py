"""Mixtures of experts that are known to treat each token alone, and the tokens that they count."""

from __future__ import annotations

from torch import nn

from seqcomp.diagnostics import PlanError, diagnostic

# How many tokens went to each expert since it was last set to zero: whoever balances the experts
# reads it. It is a sum over tokens, so what ranks count of their own adds up.
_COUNTER = "tokens_per_expert_E"


def is_experts(module: nn.Module) -> bool:
    """Whether it is an experts module of transformers whose code depends on where tokens go.

    Those take tokens, their experts and weights, and return the tokens' sums; of the ways to
    compute them, `batched_mm` alone is plain tensor operations.
    """
    how = getattr(getattr(module, "config", None), "_experts_implementation", None)
    own = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
    return isinstance(how, str) and how != "batched_mm" and all(hasattr(module, n) for n in own)


def is_mixture(path: str, module: nn.Module) -> bool:
    """Whether it is torchtitan's mixture: router, experts and shared experts in one module.

    Raises PlanError SC313 where it is set up so that a token's experts depend on other tokens, or
    tokens leave the rank.
    """
    router, routed = getattr(module, "router", None), getattr(module, "routed_experts", None)
    dispatcher = getattr(routed, "token_dispatcher", None)
    if router is None or dispatcher is None or _COUNTER not in dict(module.named_buffers()):
        return False
    if getattr(router, "_debug_force_load_balance", False):
        raise _refused(
            path,
            "_debug_force_load_balance, which deals experts out by the place of a token",
            "set _debug_force_load_balance to False in the router's config",
        )
    if getattr(dispatcher, "ep_mesh", None) is not None:
        raise _refused(
            path,
            f"a {type(dispatcher).__name__} with a mesh, over which it sends tokens to other ranks",
            "build it without expert parallelism: leave the dispatcher's ep_mesh at None",
        )
    return True


def counters_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the buffers below `module` that count its tokens by expert."""
    return tuple(
        name
        for name, _ in module.named_buffers(remove_duplicate=False)
        if name.rpartition(".")[2] == _COUNTER
    )


def _refused(where: str, found: str, fix: str) -> PlanError:
    return PlanError(
        [
            diagnostic(
                "SC313",
                where=where,
                found=found,
                legal="a router that looks at each token alone, experts on the token's rank",
                help=fix,
            )
        ]
    )
