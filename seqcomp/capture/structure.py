"""A nested container without its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Structure:
    """What is left of a container: `others` are its leaves, None at the `places` of tensors."""

    spec: pytree.TreeSpec
    others: tuple[Any, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, tree: Any) -> tuple[Structure, list[Tensor]]:
        """The structure of `tree`, and its tensors."""
        leaves, spec = pytree.tree_flatten(tree)
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        others = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
        return cls(spec, others, places), [leaves[i] for i in places]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The container with these tensors in their places."""
        leaves = list(self.others)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        return pytree.tree_unflatten(leaves, self.spec)
