"""A plan under ``transformers.Trainer`` (5.24): its loop, data, saving; our model.

    PlannedTrainer(model, args, train_dataset=..., plan="usp_2x2").train()

The Trainer believes in as many data-parallel ranks as there are processes, wraps the model in DDP
and multiplies the loss by their number, because DDP averages. Here the ranks of a sequence group
are one data rank with one batch, nothing is wrapped, and gradients are complete after backward.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import convert_to_fp32, recursively_apply
from torch import Tensor
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

import seqcomp
from seqcomp.diagnostics import PlanError, diagnostic, raise_for_errors
from seqcomp.integrations.trainer_settings import is_divided, refused
from seqcomp.integrations.trainer_state import (
    load_whole_optimizer,
    loading_whole_weights,
    save_whole_optimizer,
    whole_weights,
)
from seqcomp.plan.load import load_plan
from seqcomp.plan.resolve import ResolvedPlan, resolve

if TYPE_CHECKING:
    from seqcomp.plan.schema import Plan


def data_ranks(resolved: ResolvedPlan) -> tuple[int, ...]:
    """For every rank of the world, which slice of the batch is its."""
    found = []
    for rank in range(resolved.world_size):
        coords: dict[str, int] = {}
        for axis, size in reversed(tuple(resolved.axes.items())):
            rank, coords[axis] = divmod(rank, size)  # noqa: PLW2901
        index = 0
        for axis in resolved.batch_axes:
            index = index * resolved.axes[axis] + coords[axis]
        found.append(index)
    return tuple(found)


class PlannedTrainer(Trainer):
    """``transformers.Trainer`` whose model runs under `plan`, started by torchrun.

    plan: a path, a preset name, a dict or a Plan. All else as in Trainer; batch sizes are those of
    one data rank, as ever. With adapters of peft the model inside of them is compiled.

    Raises PlanError: SC131 for arguments that do not go with a plan, SC504 where the data gives
    the ranks of a sequence group different batches, and what `seqcomp.parallelize` raises.
    """

    def __init__(
        self, *args: Any, plan: Plan | Mapping[str, Any] | str | Path, **kwargs: Any
    ) -> None:
        loaded = load_plan(plan)
        world = dist.get_world_size() if dist.is_initialized() else None
        self._resolved = resolve(loaded, world_size=world)
        self._slices = data_ranks(self._resolved)
        self._degree = max(self._slices) + 1
        super().__init__(*args, **kwargs)
        raise_for_errors(refused(self.args))
        self._set_signature_columns_if_needed()  # read off the forward, which is replaced
        inner = getattr(self.model, "get_base_model", lambda: self.model)()
        self._compiled: Any = inner
        seqcomp.parallelize(inner, loaded)
        # It "owns its placement and gradient reduction": no DDP around it. What comes with that
        # word is overridden below.
        self.is_distributed_loading_by_transformers = True

    # --- data ----------------------------------------------------------------------------

    @property
    def _slice(self) -> int:
        return self._slices[self.args.process_index]

    def create_accelerator_and_postprocess(self) -> None:
        """As ever, with loaders and gathered metrics by data rank."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = self._deal
        self.accelerator.prepare_model = self._prepared
        self.accelerator.gather_for_metrics = self._gather_metrics
        self.gather_function = self._gather_metrics

    def get_tp_size(self) -> int:
        """How many ranks share a batch."""
        return self._resolved.sequence_size

    def _prepared(self, model: Any, **_: Any) -> Any:
        """Nothing is wrapped around the model: a capture would not see it. See `autocast` below."""
        if model not in self.accelerator._models:
            self.accelerator._models.append(model)
        return model

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Of the forward and the loss, which accelerate would put into the model's forward."""
        if not self.args.bf16:
            return contextlib.nullcontext()
        return torch.autocast(
            self.args.device.type, torch.bfloat16, cache_enabled=bool(cache_enabled)
        )

    def _deal(self, loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
        """Accelerate's loader for this rank's slices of the batches."""
        accelerator = self.accelerator
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        if isinstance(loader.worker_init_fn, functools.partial):  # seeded by rank
            given = loader.worker_init_fn
            loader.worker_init_fn = functools.partial(given.func, **given.keywords | {
                "rank": self._slice
            })  # fmt: skip
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self._degree,
            process_index=self._slice,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement
            if device_placement is None
            else device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,  # the dispatcher counts processes
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """As ever, and compared: the ranks of a sequence group must have got the same."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        mine = torch.tensor([_digest(batches)], device=self.args.device)
        everyone = self.accelerator.gather(mine).tolist()
        by_slice = [
            {found for found, at in zip(everyone, self._slices, strict=True) if at == number}
            for number in range(self._degree)
        ]
        if any(len(digests) > 1 for digests in by_slice):
            raise PlanError(
                diagnostic(
                    "SC504",
                    message="the ranks of a sequence group got different batches",
                    where="transformers.Trainer",
                    found="a data set, sampler or collator that depends on the rank",
                    legal="the same order on every rank; the Trainer deals out the slices",
                    help="seed what is random in it alike on all ranks",
                )
            )
        return batches, count

    def _gather_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """What every data rank has, once, without the samples that fill the last batch."""
        del use_gather_object
        state = self.accelerator.gradient_state
        first = [self._slices.index(number) for number in range(self._degree)]

        def once(gathered: Tensor) -> Tensor:
            rows = gathered.view(len(self._slices), -1, *gathered.shape[1:])[first].flatten(0, 1)
            return (
                rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows
            )

        return recursively_apply(once, self.accelerator.gather(data))

    # --- loss and gradients --------------------------------------------------------------

    def _in_model(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the model computes the loss, which is then that of the whole batch."""
        outside = self.compute_loss_func is not None or self.label_smoother is not None
        return not (outside and "labels" in inputs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As ever, without the factor that undoes DDP's average: nothing is averaged."""
        in_model = self._in_model(inputs)
        # An evaluated loss is averaged over ranks by the Trainer.
        adds_up = self._resolved.gradients == "sum" and torch.is_grad_enabled()
        a_mean = not in_model and num_items_in_batch is None
        if a_mean and adds_up and self._degree > 1:
            raise PlanError(
                diagnostic(
                    "SC131",
                    where="transformers.Trainer loss",
                    found="a mean over this rank's tokens, which would be added up",
                    legal="a loss divided by num_items_in_batch, or averaged gradients",
                    help="strategies: {data: {gradients: mean}}",
                )
            )
        with self._losses_of_fp32():
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        scaled = self.args.average_tokens_across_devices and num_items_in_batch is not None
        scaled = scaled and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        if scaled and (in_model or adds_up):
            loss = loss / self._degree
        return (loss, outputs) if return_outputs else loss

    @contextlib.contextmanager
    def _losses_of_fp32(self) -> Iterator[None]:
        """Losses outside of the model get outputs in fp32, as accelerate gives them."""
        names = ("compute_loss_func", "label_smoother") if self.args.bf16 else ()
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name, loss in own.items():
            setattr(self, name, functools.partial(_of_fp32, loss))
        try:
            yield
        finally:
            for name, loss in own.items():
                setattr(self, name, loss)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As ever; the loss that is logged is averaged over ranks, so parts are made whole."""
        parts = not self._in_model(inputs) and self._resolved.gradients == "sum"
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss * self._degree if parts else loss

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Their gradients are complete, and their values were compared at compilation."""

    def _defer_fsdp_gradient_reduction(self) -> Any:
        """Micro-batches sum their gradients by themselves."""
        return contextlib.nullcontext()

    # --- saving --------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Whole weights, written by one rank; all take part where they are divided."""
        if state_dict is None and is_divided(self._resolved):
            state_dict = whole_weights(self.model)
        if self.args.should_save:
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Every rank takes its part of whole weights."""
        with self._loading():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """The same, at the end of a training."""
        with self._loading():
            super()._load_best_model()

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        divided = is_divided(self._resolved)
        return loading_whole_weights(self.model) if divided else contextlib.nullcontext()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As ever; states of divided parameters are gathered for the rank that writes."""
        super()._save_optimizer_and_scheduler(output_dir)
        if is_divided(self._resolved):
            save_whole_optimizer(
                self.model,
                self._own_optimizer,
                Path(output_dir) / OPTIMIZER_NAME,
                writes=self.args.should_save,
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As ever; every rank takes its part."""
        path = Path(checkpoint or ".") / OPTIMIZER_NAME
        if checkpoint is None or not is_divided(self._resolved) or not path.is_file():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_whole_optimizer(self.model, self._own_optimizer, path)
        scheduler = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    @property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        """Without accelerate's wrapper."""
        given: Any = self.optimizer
        optimizer: torch.optim.Optimizer = getattr(given, "optimizer", given)
        return optimizer


def _of_fp32(loss: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    return loss(convert_to_fp32(outputs), *args, **kwargs)


def _digest(batches: list[Any]) -> int:
    """Equal for equal tokens; host work of microseconds per thousand."""
    value = 0
    for batch in batches:
        for name in sorted(batch) if isinstance(batch, Mapping) else ():
            item = batch[name]
            if isinstance(item, Tensor):
                flat = item.detach().cpu().contiguous().view(-1)
                value = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), value)
    return value
