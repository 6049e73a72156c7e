"""Learning of preferences: DPO, IPO, ORPO, SimPO and KTO of a causal language model of Transformers.

Note [Mean of preferences]: the loss is a mean over the pairs, or labelled completions, of all ranks and micro-batches
of a step, as in Note [Loss of a step]. Two terms are none of a single pair: the likelihood of what is chosen in ORPO, a
mean over its tokens, and KTO's distance to the reference. They are computed over a *round*, the micro-batches that all
ranks run at the same time. So both are the same for any number of ranks with the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from lit_fsdp.adapters.layers import switch_off_adapters
from lit_fsdp.adapters.lora import KEEPS_BASE
from lit_fsdp.checkpoint.sharded import agree
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.sharding.mixed_precision import read_precision
from lit_fsdp.sharding.shard import reshard
from lit_fsdp.strategy.batch_split import BatchPart
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.lightning_internals import is_read_now
from lit_fsdp.strategy.lightning_strategies import call_in_forward
from lit_fsdp.tasks.causal_lm.chunked_loss import install_chunked_loss, list_chunked_losses
from lit_fsdp.tasks.causal_lm.task import CausalLM
from lit_fsdp.tasks.data import Split
from lit_fsdp.tasks.evaluation_mode import evaluation_mode
from lit_fsdp.tasks.model_config import explain_build_errors
from lit_fsdp.tasks.preference.batches import DESIRABLE, REFERENCE
from lit_fsdp.tasks.preference.data import PreferenceData
from lit_fsdp.tasks.preference.losses import (
    LossSettings,
    LossType,
    Scored,
    compute_kto_losses,
    compute_pair_losses,
)
from lit_fsdp.tasks.text.batches import IGNORED, Batch, read_exact
from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text_model import build_model, weigh_aux_loss
from lit_fsdp.weights.base_weights import get_pretrained_folder
from lit_fsdp.weights.load import load_weights
from lit_fsdp.weights.safetensors_io import compute_fingerprint

Reference = Literal["auto", "adapters", "precomputed", "model"]
_COMPARED = "compared"  # in the metadata of a checkpoint
_OF_PAIRS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
_OF_LABELS = ("rewards/chosen", "rewards/rejected", "kl")
_LOGPS = ("logps/chosen", "logps/rejected")


class PreferenceTuning(CausalLM):
    """Trains a causal language model on preferences: pairs of a better and a worse answer, or answers with a label.

    Metrics, besides those of ``CausalLM`` without perplexity: ``rewards/chosen``, ``rewards/rejected``,
    ``rewards/margins``, ``logps/chosen`` and ``logps/rejected``; of pairs also ``rewards/accuracies``, the share in
    which the chosen answer has the higher reward; of ``kto`` the ``kl`` of its loss. Each is under ``train/``, ``val/``
    and ``test/``, a mean over all pairs of a step, or of the data.

    Chosen and rejected answers go through the model as one batch: two passes would keep the same activations, as both
    are needed in backward, and gather every unit twice.

    Args:
        loss_type: ``sigmoid`` is DPO, and ``dpo`` another name of it; ``hinge``, ``robust`` and ``ipo`` are its
            variants. ``orpo`` and ``simpo`` need no reference. ``kto`` learns of single answers with a label; of pairs
            it takes both.
        beta: How much the model is held to its reference. ORPO multiplies its odds with it, SimPO its rewards, for
            which 2 is usual.
        label_smoothing: The share of pairs that are taken to be the wrong way around; of ``sigmoid``, ``robust`` and
            ``simpo``.
        simpo_gamma: The margin of ``simpo``; 0.5 if not given.
        desirable_weight: Weight of good answers in ``kto``; 1 if not given.
        undesirable_weight: Weight of bad answers in ``kto``; 1 if not given.
        reference: What the model is compared with. ``adapters`` switches those of ``lora`` off: no memory, and a
            forward pass in each step. ``precomputed`` computes log-probabilities of all data before training, and keeps
            them beside the tokens: neither memory nor time in a step. ``model`` reads ``pretrained`` again, frozen and
            sharded. ``auto`` is ``adapters`` with ``lora``, and else ``precomputed``.
    """

    target_name = "samples"  # pairs, or labelled answers
    has_perplexity = False
    headline_mode: Literal["min", "max"] = "max"

    def __init__(
        self,
        *,
        loss_type: LossType = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        simpo_gamma: float | None = None,
        desirable_weight: float | None = None,
        undesirable_weight: float | None = None,
        reference: Reference = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.loss = LossSettings(
            loss_type=loss_type,
            beta=beta,
            label_smoothing=label_smoothing,
            simpo_gamma=simpo_gamma,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
        )
        self.reference_source = self._choose_reference(reference)
        self.reference: PreTrainedModel | None
        self.register_module("reference", None)  # before the model, as it runs before it
        self.parts_read_apart = ("reference",)  # from pretrained, where a checkpoint has none
        # Of the settings: what files are stored in, which is found out later, belongs to their fingerprint.
        self._given_quantization = self.quantization
        # Of labelled answers there is no share that is right.
        self.headline_metric = "rewards/margins" if self.loss.is_unpaired else "rewards/accuracies"
        self._compared: dict[str, str] | None = None  # the adapters that it is compared with, as training began
        self._has_trained = False  # the model is no longer the one that training started from
        self._sums: dict[bool, Tensor] = {}  # [2, metrics] sums and counts, of training and of evaluation

    def _choose_reference(self, setting: Reference) -> Reference | None:
        kind = self.loss.loss_type
        if not self.loss.needs_reference:
            if setting != "auto":
                raise ValueError(f"reference: got {setting!r}: loss_type {kind!r} needs none; leave it out")
            return None
        found: Reference = setting
        if setting == "auto":
            found = "adapters" if self.lora is not None and self._find_obstacle() is None else "precomputed"
        if found == "adapters" and (obstacle := self._find_obstacle()) is not None:
            raise ValueError(f"reference: got 'adapters': {obstacle}; set precomputed")
        if found == "model" and self.pretrained is None:
            raise ValueError("reference: got 'model': it is read from pretrained, which is not set; set precomputed")
        if found == "model" and self.stored_adapters is not None:
            raise ValueError(
                "reference: got 'model': it is read from pretrained, without the adapters that training starts from; "
                "set precomputed"
            )
        return found

    def _find_obstacle(self) -> str | None:
        """Return why the model without its adapters is not the one that training starts from."""
        if self.lora is None:
            return "there are none without lora"
        if self.stored_adapters is not None:
            return f"training starts from those of {self.stored_adapters.given}"
        if self.lora.modules_to_save:
            return f"lora.modules_to_save trains {', '.join(self.lora.modules_to_save)} in place"
        if self.lora.init_lora_weights not in KEEPS_BASE:
            return f"lora.init_lora_weights {self.lora.init_lora_weights!r} starts from other weights below them"
        return None

    @override
    def check_sequence(self, size: int) -> None:
        name = type(self).__name__
        raise ValueError(f"mesh.sequence: got {size}: {name} adds up log-probabilities of whole answers; set 1")

    # Model

    @override
    def prepare_plan(self, data: Any) -> list[str]:
        self._tell_data(data)
        notes = super().prepare_plan(data)
        if self.reference_source == "precomputed":
            notes.append("reference: precomputed: the pass over the data before training is not in this plan")
        elif self.reference_source is not None:
            notes.append(
                f"reference: {self.reference_source}: its forward pass counts in memory and compute of this plan, not "
                "in its collectives"
            )
        return notes

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._tell_data(get_data_module(self.trainer))
        splits: dict[str, Split] = {"validate": "validation", "test": "test"}
        if stage in splits:
            self._read_reference(splits[stage])

    def _tell_data(self, data: Any) -> None:
        if not isinstance(data, PreferenceData):
            if isinstance(data, TextData):
                got = type(data).__name__
                raise ValueError(f"data: got {got}: its rows are no preferences; set PreferenceData")  # noqa: TRY004
            if self.reference_source == "precomputed" and data is not None:
                raise ValueError(
                    f"reference: got 'precomputed': {type(data).__name__} cannot keep it; set data to PreferenceData, "
                    "or reference to model"
                )
            return
        data.is_unpaired = self.loss.is_unpaired
        data.has_reference = self.reference_source == "precomputed"
        data.drop_reference()

    @override
    def finish_model(self) -> None:
        if self.reference_source == "model":
            self.reference = self._build_reference()
        super().finish_model()

    @property
    @override
    def leaves_out_frozen(self) -> bool:
        return super().leaves_out_frozen or self.reference_source == "model"

    def _build_reference(self) -> PreTrainedModel:
        with explain_build_errors(self.config_settings):
            model = build_model(self.read_config(), self.attention)
        if self.quantization is not None:
            quantize_model(model, self.quantization, keep=() if self.lora is None else self.lora.modules_to_save)
        model.requires_grad_(False)
        if self.loss_chunks > 1:
            install_chunked_loss(model, self.loss_chunks)
        return model

    @override
    def configure_weights(self) -> None:
        super().configure_weights()
        if self.reference is not None:
            assert self.pretrained is not None
            load_weights(self.reference, get_pretrained_folder(self.pretrained), seed=self.get_seed())

    # Reference

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.reference_source == "precomputed" and (adapters := self.stored_adapters) is not None:
            self._compared = {"place": adapters.place, "fingerprint": adapters.compute_fingerprint()}
        self._precompute("train", "validation")

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._has_trained = True
        self._sums.pop(True, None)  # of a run that failed in a step

    def _precompute(self, *splits: Split) -> None:
        """Give the data its log-probabilities by the model as training starts from it, computed or read."""
        data = get_data_module(self.trainer)
        if self.reference_source != "precomputed" or not isinstance(data, PreferenceData):
            return
        for split in splits:
            if not data.holds_split(split):
                continue
            folder = data.locate_reference(split, **self._identify_reference())
            if all(agree(partial(data.has_kept, folder))):
                data.keep_reference(split, folder, None)
                continue
            is_restored = self.trainer.ckpt_path is not None
            if self._has_trained or (is_restored and not self.trainer.strategy.restore_checkpoint_after_setup):
                raise ValueError(
                    f"reference: the log-probabilities of {split} are not in {folder}, and the model has gone on from "
                    "there; set data.cache_dir to that of the run's start, or for other data make a task anew"
                )
            begin = time.perf_counter()
            logps = call_in_forward(self, partial(self._compute_reference, data, split))
            seconds = time.perf_counter() - begin
            rank_zero_info(f"reference: log-probabilities of {len(logps)} rows of {split} in {seconds:.1f} s")
            data.keep_reference(split, folder, logps)

    def _read_reference(self, split: Split) -> None:
        """Give the data its log-probabilities, which a run has computed before."""
        data = get_data_module(self.trainer)
        if self.reference_source != "precomputed" or not isinstance(data, PreferenceData):
            return
        folder = data.locate_reference(split, **self._identify_reference())
        if not data.has_kept(folder):
            raise ValueError(
                f"reference: got 'precomputed': the log-probabilities of {split} are not in {folder}, and the model is "
                f"another by now; set reference: {'model' if self.lora is None else 'model or adapters'}"
            )
        data.keep_reference(split, folder, None)

    def _identify_reference(self) -> dict[str, Any]:
        """Return what tells the model that training starts from, from others, as JSON."""
        adapters = self.stored_adapters
        lora = None if self.lora is None or self._find_obstacle() is None else asdict(self.lora)
        if self.pretrained is not None:
            weights: Any = compute_fingerprint(get_pretrained_folder(self.pretrained))
        else:
            weights = [self.config_settings, self.get_seed()]
        return {
            "weights": weights,
            "quantization": None if self._given_quantization is None else asdict(self._given_quantization),
            "lora": lora,
            **({} if adapters is None else {"adapters": adapters.compute_fingerprint()}),
            "precision": str(self.trainer.precision),
            **self._list_other_rounding(),
        }

    def _list_other_rounding(self) -> dict[str, Any]:
        """Return how the model computes, where ``FSDP2Strategy`` does not leave that to the Trainer's precision."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, FSDP2Strategy):
            return {}
        own, usual = strategy.precision_plugin.mixed_precision, read_precision(str(self.trainer.precision))
        dtypes, of_precision = ((one.storage_dtype, one.param_dtype) for one in (own, usual))
        found: dict[str, Any] = {} if dtypes == of_precision else {"dtypes": dtypes}
        if (float8 := strategy.settings.float8) is not None:
            found["float8"] = asdict(float8)
        if (bits := strategy.settings.sharding.gather_bits) is not None:
            found["gather_bits"] = bits
        return found

    def _compute_reference(self, data: PreferenceData, split: Split) -> NDArray[np.float32]:
        """Return the log-probabilities of both documents of each row, [rows, 2]. All ranks must call it."""
        indices, found = list[Tensor](), list[Tensor]()
        with evaluation_mode(self):
            for batch in data.build_reference_loader(split):
                batch = self.transfer_batch_to_device(batch, self.device, 0)
                indices.append(batch.pop("index").cpu())
                with self.trainer.precision_plugin.forward_context():
                    logps = self(**{n: v for n, v in batch.items() if n != DESIRABLE})
                found.append(logps.view(2, -1).T.cpu())
        own = torch.cat(indices).numpy(), torch.cat(found).float().numpy()
        whole = np.full((data.count_rows(split), 2), np.nan, dtype=np.float32)
        for places, values in gather_objects(own):
            whole[places[places >= 0]] = values[places >= 0]
        if np.isnan(whole).any():
            num_bad = int(np.isnan(whole).any(1).sum())
            raise ValueError(f"reference: the log-probabilities of {num_bad} rows of {split} are no numbers")
        return whole

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        stored, own = checkpoint.get(_COMPARED), self._compared
        if stored is not None and own is not None and stored["fingerprint"] != own["fingerprint"]:
            raise ValueError(
                f"lora.pretrained: {own['place']} holds other values by now than the reference of this run: set it to "
                f"what training started from, {stored['place']}"
            )

    @contextmanager
    def _use_reference(self) -> Iterator[PreTrainedModel]:
        assert self.model is not None
        model = self.model if self.reference is None else self.reference
        off = nullcontext() if self.reference is not None else switch_off_adapters(model)
        with torch.no_grad(), evaluation_mode(model), off:
            yield model
        if self.reference is not None:
            reshard(self.reference)  # its head stays gathered for a backward, which does not come

    # Steps

    @override
    def forward(self, **inputs: Any) -> Tensor:
        """Return logits [batch, length, vocabulary], or, given ``labels``, log-probabilities of whole rows [batch].

        Under a sharding strategy all ranks must call it.

        Args:
            inputs: ``input_ids``, and ``position_ids`` or ``attention_mask``; ``labels`` are not shifted, -100 is no
                target.
        """
        if "labels" not in inputs:
            return super().forward(**inputs)
        assert self.model is not None
        return self._score(self.model, inputs)[0].logps

    @property
    @override
    def is_sum_of_rows(self) -> bool:
        return not self.loss.is_unpaired and self.loss.loss_type != "orpo"

    @override
    def split_batch(self, batch: Batch, num_parts: int) -> Sequence[BatchPart]:
        if not self.is_sum_of_rows:
            kind = self.loss.loss_type
            raise ValueError(f"loss_type {kind!r} has a mean over the micro-batch, which parts would change")
        # [2 * rows, ...] is first the chosen completions, then the rejected ones.
        pairs = {name: value.unflatten(0, (2, -1)).transpose(0, 1) for name, value in batch.items()}
        return [
            ({name: value.transpose(0, 1).flatten(0, 1) for name, value in part.items()}, weight)
            for part, weight in super().split_batch(pairs, num_parts)
        ]

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all pairs, or labelled completions, and their number.

        Args:
            batch: ``input_ids``, ``labels`` (not shifted; -100 is no target) and ``attention_mask`` [2 * rows, length]:
                first the chosen completions, or the labelled ones, then the rejected ones, or those of other prompts.
                ``desirable`` [rows] of labelled ones; ``reference_logps`` [2 * rows], of ``keep_exact``, where they are
                precomputed. Rows without a target count nothing.
        """
        return self._compute_kto(batch) if self.loss.is_unpaired else self._compute_pairs(batch)

    def _compute_pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.model is not None
        inputs = {name: value for name, value in batch.items() if name != REFERENCE}
        reference = self._get_reference_logps(batch, inputs) if self.loss.needs_reference else None
        scored, extra = self._score(self.model, inputs)
        chosen, rejected = _halve(scored.logps, scored.lengths)
        losses, *rewards = compute_pair_losses(self.loss, chosen, rejected, reference)
        is_pair = (chosen.lengths > 0) & (rejected.lengths > 0)
        num_pairs = is_pair.sum()
        loss_sum = _add_up(losses, is_pair) + extra.aux_loss * num_pairs
        if self.loss.loss_type == "orpo":
            loss_sum = loss_sum + _weigh_tokens(extra.nll_sum, extra.num_tokens, num_pairs)
        logps = [s.logps if self.loss.needs_reference else s.mean_logps for s in (chosen, rejected)]
        values = (*rewards, (rewards[0] > rewards[1]).float(), rewards[0] - rewards[1], *logps)
        self._note([(value, is_pair) for value in values])
        return loss_sum, num_pairs

    def _compute_kto(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.model is not None
        is_desirable = batch[DESIRABLE]
        inputs = {name: value for name, value in batch.items() if name not in (REFERENCE, DESIRABLE)}
        reference, of_others = self._get_reference_logps(batch, inputs).chunk(2)
        own, others = ({name: value.chunk(2)[half] for name, value in inputs.items()} for half in (0, 1))
        with torch.no_grad():
            mismatched = self._score(self.model, others)[0]
        scored, extra = self._score(self.model, own)
        is_row = scored.lengths > 0
        num_rows = is_row.sum()
        sums = torch.stack([_add_up(mismatched.logps - of_others, is_row), num_rows.float()])
        kl_sum, total = _sum_over_ranks(sums)
        kl = (kl_sum / total.clamp(min=1)).clamp(min=0)
        losses, rewards = compute_kto_losses(self.loss, scored.logps, reference, is_desirable, kl)
        good, bad = is_row & is_desirable, is_row & ~is_desirable
        logps = scored.logps
        self._note([(rewards, good), (rewards, bad), (kl.expand_as(rewards), is_row), (logps, good), (logps, bad)])
        return _add_up(losses, is_row) + extra.aux_loss * num_rows, num_rows

    def _get_reference_logps(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        if REFERENCE in batch:
            return read_exact(batch[REFERENCE])
        if self.reference_source == "precomputed":
            raise ValueError(
                "reference: got 'precomputed': the batch has no reference_logps; set data to PreferenceData, or "
                "reference to model"
            )
        with self._use_reference() as model:
            return self._score(model, inputs)[0].logps

    def _score(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[Scored, _Extra]:
        """Return the log-probabilities of completions, and what some losses take of the same pass."""
        inputs = {name: value for name, value in batch.items() if name not in ("labels", REFERENCE)}
        labels = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        is_completion, targets = labels != IGNORED, labels
        learns_prompt = self.loss.loss_type == "orpo"
        if learns_prompt:  # its likelihood is that of the prompt, too
            ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
            targets = functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
        aux_loss = torch.zeros((), device=labels.device)
        if self.loss_chunks > 1:
            losses = list_chunked_losses(model, inputs, targets)
        else:
            output = model(**inputs, use_cache=False)
            losses = _list_losses(output.logits, targets)
            own = weigh_aux_loss(model, output)
            aux_loss = aux_loss if own is None else own
        scored = Scored(logps=-(losses * is_completion).sum(1), lengths=is_completion.sum(1))
        num_chosen = len(labels) // 2
        is_chosen = (scored.lengths > 0)[:num_chosen, None] & (targets != IGNORED)[:num_chosen]
        nll_sum = (losses[:num_chosen] * is_chosen).sum() if learns_prompt else aux_loss
        return scored, _Extra(aux_loss, nll_sum, is_chosen.sum())

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["targets_name"] = "labelled answers" if self.loss.is_unpaired else "preference pairs"  # in the card
        if self._compared is not None:
            checkpoint[_COMPARED] = self._compared

    # Metrics

    @property
    def _metric_names(self) -> tuple[str, ...]:
        return (*(_OF_LABELS if self.loss.is_unpaired else _OF_PAIRS), *_LOGPS)

    def _note(self, values: list[tuple[Tensor, Tensor]]) -> None:
        """Add values to their sums, each with the rows that count."""
        sums = torch.stack([torch.stack([_add_up(v.detach(), rows), rows.sum()]) for v, rows in values], 1).double()
        before = self._sums.get(self.training)
        self._sums[self.training] = sums if before is None else before + sums

    def _take_metrics(self, *, is_training: bool) -> dict[str, Tensor]:
        """Return the means since the last call, over all ranks, which must all call it."""
        if (own := self._sums.pop(is_training, None)) is None:
            return {}
        sums, counts = _sum_over_ranks(own)
        found = dict(zip(self._metric_names, (sums / counts).float(), strict=True))  # not a number of none
        if self.loss.is_unpaired:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if not is_read_now(self, {f"train/{name}" for name in (*self._metric_names, "rewards/margins")}):
            self._sums.pop(True, None)  # else they would be part of a later step; an all-reduce less
            return
        metrics = self._take_metrics(is_training=True)
        self.log_step({f"train/{name}": value for name, value in metrics.items()})

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._sums.pop(False, None)

    on_test_epoch_start = on_validation_epoch_start

    @override
    def log_evaluation(self, stage: Literal["val", "test"]) -> None:
        super().log_evaluation(stage)
        for name, value in self._take_metrics(is_training=False).items():
            self.log(f"{stage}/{name}", value, sync_dist=True)  # equal on all ranks already


class _Extra(NamedTuple):
    """Of a forward pass, besides log-probabilities of completions."""

    aux_loss: Tensor
    nll_sum: Tensor  # of the first half of the rows, prompts included
    num_tokens: Tensor  # that it is of


def _list_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each token, [batch, length] in float32."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(targets.shape)


def _halve(logps: Tensor, lengths: Tensor) -> tuple[Scored, Scored]:
    first, second = (Scored(logps=a, lengths=b) for a, b in zip(logps.chunk(2), lengths.chunk(2), strict=True))
    return first, second


def _add_up(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the values that count; others may be anything, as those of empty rows."""
    return torch.where(counts, values, torch.zeros_like(values)).sum()


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Return sums over all ranks, without a gradient."""
    total = values.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def _weigh_tokens(nll_sum: Tensor, num_tokens: Tensor, num_pairs: Tensor) -> Tensor:
    """Return this rank's part of a mean over tokens, weighed by the pairs of a round: Note [Mean of preferences]."""
    tokens, pairs = _sum_over_ranks(torch.stack([num_tokens, num_pairs]).double())
    return nll_sum * (pairs / tokens.clamp(min=1)).to(nll_sum.dtype)
