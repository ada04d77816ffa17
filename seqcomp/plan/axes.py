"""Which strategy uses which mesh axis, and how large it is."""

from __future__ import annotations

from seqcomp.plan.schema import Plan


def owned_axes(plan: Plan) -> dict[str, str]:
    """Strategy name -> the axis that it owns, for the strategies of the plan but fsdp."""
    owners = {}
    for name in ("data", "ring", "ulysses", "megatron_sp"):
        strategy = getattr(plan.strategies, name)
        if strategy is not None:
            owners[name] = strategy.axis
    return owners


def degree(plan: Plan, strategy: str) -> int:
    """Degree of a strategy; 1 where it is not used or its axis does not exist."""
    return plan.mesh.get(owned_axes(plan).get(strategy, ""), 1)


def fsdp_axes_of(plan: Plan) -> tuple[str, ...]:
    """The axes over which parameters are sharded, in mesh order; () without fsdp.

    By default those of data, ring and ulysses, and any axis called data that nothing else uses.
    """
    fsdp = plan.strategies.fsdp
    if fsdp is None:
        return ()
    if fsdp.axes is not None:
        return tuple(axis for axis in plan.mesh if axis in fsdp.axes)
    owners = owned_axes(plan)
    default = {owners.get(name, name) for name in ("data", "ring", "ulysses")}
    return tuple(axis for axis in plan.mesh if axis in default)
