"""torchtitan's config under a plan: what is set, and what is refused with the line to set."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from seqcomp.diagnostics import PlanError
from seqcomp.integrations.titan_training import parallelize_fn, with_plan
from seqcomp.plan.load import load_plan
from tests.fixtures.families import needs_torchtitan

pytestmark = needs_torchtitan


def settings(**changes: Any) -> dict[str, Any]:
    """What the Trainer hands to a parallelize_fn: 2 data ranks of 2 ranks for the sequence."""
    dims = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1, "ep": 1}
    degrees = {
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "spmd_backend": "partial_dtensor",
    }
    training = {
        "mixed_precision_param": "float32",
        "enable_cpu_offload": False,
        "disable_cuda_graphs": True,
        "local_batch_size": 1,
        "seq_len": 32,
    }
    from torchtitan.config import CompileConfig

    every = {**dims, **degrees, **training, "ac": None, "compile": False} | changes

    def pick(names: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**{name: every[name] for name in names})

    return {
        "parallel_dims": SimpleNamespace(**vars(pick(dims)), world_size=4),
        "parallelism": pick(degrees),
        "training": pick(training),
        "compile_config": CompileConfig(enable=every["compile"]),
        "ac_config": every["ac"],
        "dump_folder": "",
    }


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tensor_parallel_degree": 4}, "config.parallelism.tensor_parallel_degree = 2"),
        ({"dp_shard": 1}, "config.parallelism.data_parallel_shard_degree = 2"),
        ({"context_parallel_degree": 2}, "config.parallelism.context_parallel_degree = 1"),
        ({"spmd_backend": "spmd_types"}, "config.parallelism.spmd_backend = 'partial_dtensor'"),
        ({"mixed_precision_param": "bfloat16"}, "config.training.mixed_precision_param ="),
        ({"disable_cuda_graphs": False}, "config.training.disable_cuda_graphs = True"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_settings_are_refused_with_the_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        parallelize_fn("data_2+ring_2")(nn.Linear(1, 1), **settings(**changes))
    assert [item.code for item in caught.value.diagnostics] == ["SC131"]
    assert line in str(caught.value)


def test_checkpoints_and_compilation_that_a_plan_has_no_word_for() -> None:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    class Own(SelectiveAC):
        """Decides by itself what is saved."""

        @dataclass(kw_only=True, slots=True)
        class Config(SelectiveAC.Config):
            pass

    block = {**load_plan("data_2+ring_2").model_dump(), "memory": {"checkpoint": "block"}}
    fsdp = "data_2+ring_2+fsdp"
    off = "config.activation_checkpoint = None"
    for plan, changes, found, line in (
        ("data_2+ring_2", {"ac": MemoryBudgetAC.Config()}, "MemoryBudgetAC", off),
        ("data_2+ring_2", {"ac": Own.Config()}, "Own.Config", off),
        ("data_2+ring_2", {"ac": FullAC.Config(debug=True)}, "FullAC", off),
        (block, {"ac": SelectiveAC.Config()}, "beside memory.checkpoint: block", off),
        (fsdp, {"compile": True}, "fsdp", "config.compile.components = ['loss']"),
        (block, {"compile": True}, "memory.checkpoint", "config.compile.components = ['loss']"),
    ):
        with pytest.raises(PlanError) as caught:
            parallelize_fn(plan)(nn.Linear(1, 1), **settings(**changes))
        assert [item.code for item in caught.value.diagnostics] == ["SC131"]
        assert found in str(caught.value)
        assert line in str(caught.value)


def test_the_trainers_order_of_ranks() -> None:
    plan = {"mesh": {"ring": 2, "data": 2}, "strategies": {"ring": {}, "data": {}}}
    with pytest.raises(PlanError, match=r"mesh: \{data: 2, ring: 2\}"):
        parallelize_fn(plan)(nn.Linear(1, 1), **settings())


def config() -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    made = llama3_debugmodel()
    made.loss = CrossEntropyLoss.Config()
    return made


def test_with_plan_sets_what_parallelize_fn_checks() -> None:
    made = with_plan(config(), load_plan("data_2+usp_3x2+fsdp"))
    parallelism = made.parallelism
    assert parallelism.tensor_parallel_degree == 6
    assert parallelism.data_parallel_shard_degree == 2
    assert type(made.activation_checkpoint).__qualname__ == "SelectiveAC.Config"  # as a plan's
    # 16 heads do not divide by 6, which is torchtitan's rule; rings have any degree.
    made.model_spec.model.update_from_config(config=made)
    assert made.model_spec.model.layers[0].attention.rope.max_seq_len == made.training.seq_len
    assert type(made.model_spec.model.build()).__name__ == "Llama3Model"


def test_with_plan_keeps_to_the_checkpoints_of_a_plan() -> None:
    plan = {"mesh": {"ring": 2}, "strategies": {"ring": {}}, "memory": {"checkpoint": "block"}}
    assert with_plan(config(), plan).activation_checkpoint is None
    compiled = config()
    compiled.compile.enable = True
    with pytest.raises(PlanError, match="activation_checkpoint"):
        with_plan(compiled, "ring_2")


def test_a_loss_that_runs_the_head_itself() -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    with pytest.raises(PlanError, match="ChunkedLossWrapper"):
        with_plan(llama3_debugmodel(), "ring_2")
