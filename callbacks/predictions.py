"""What ``predict`` leaves behind: one file with a row for every row of the source, in its order."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lit_fsdp.checkpoint.remote import describe_local_only, is_remote
from lit_fsdp.files import open_whole, refuse_no_folder, refuse_unwritable
from lit_fsdp.reporting.metrics import find_run_folder, is_trial
from lit_fsdp.strategy.trainer_settings import get_data_ranks

FILE_NAME = "predictions.jsonl"
_FILLER = -1  # index of rows that only fill up the last batch: part of what predict_step returns

Record = dict[str, Any]


class WritePredictions(Callback):
    """Write what ``predict_step`` returned on all ranks to one file, in the order of the source.

    ``predict_step`` has to return a dict of lists, tensors or arrays of equal length: ``index``, the place of each row
    in its source (-1 for rows that only fill up a batch), ``prediction``, and whatever else shall be written. Every
    rank keeps its predictions in memory until the end. Of several loaders each row begins with ``loader``, its number,
    and those of the first come first.

    Args:
        path: The file, ``.jsonl``, ``.csv`` (lists and mappings as JSON) or ``.parquet``; one that exists is
            replaced. By default ``predictions.jsonl`` in the folder of the run's logs.
        fallback_dir: Folder for it if the run has no folder for logs.
    """

    def __init__(self, path: str | None = None, fallback_dir: str | None = None) -> None:
        if path is not None and Path(path).suffix not in _WRITERS:
            raise ValueError(f"path: got {path!r}: expected a file that ends in {', '.join(_WRITERS)}")
        if path is not None and is_remote(path):
            raise ValueError(f"path: {describe_local_only(path)}")
        self.path = path
        self.fallback_dir = fallback_dir
        self._records: list[Record] = []
        self._odd: str | None = None  # what came instead of such a dict

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a place that cannot be written to now, not when all is predicted."""
        if stage == "predict" and self.path is not None and trainer.is_global_zero:
            if (path := Path(self.path)).is_dir():
                raise ValueError(f"{type(self).__name__}.path: got {self.path!r}: it is a folder: expected a file")
            refuse_no_folder(f"{type(self).__name__}.path", path.parent)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._records, self._odd = [], None

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loaders = trainer.predict_dataloaders
        place = {"loader": dataloader_idx} if isinstance(loaders, list | tuple | dict) and len(loaders) > 1 else {}
        if not isinstance(outputs, dict) or not {"index", "prediction"} <= outputs.keys():
            self._odd = f"keys {sorted(outputs)}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
            return
        columns = {name: _to_list(values) for name, values in outputs.items()}
        sizes = {name: type(outputs[name]).__name__ if v is None else len(v) for name, v in columns.items()}
        if None in columns.values() or len(set(sizes.values())) > 1:
            self._odd = f"unequal lists ({', '.join(f'{name} {size}' for name, size in sizes.items())})"
            return
        for values in zip(*(values for values in columns.values() if values is not None), strict=True):
            record = place | {name: _to_plain(value) for name, value in zip(columns, values, strict=True)}
            if record["index"] != _FILLER:
                self._records.append(record)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather over all ranks, write on the first."""
        folder = find_run_folder(trainer, self.fallback_dir)
        path = folder / FILE_NAME if self.path is None else Path(self.path)
        # Before anything that one rank alone could leave: the others would wait for it.
        is_copy = get_data_ranks(trainer).place > 0  # of what another rank has, for the same rows
        parts = _gather((self._odd, [] if is_copy else self._records))
        if odd := next((odd for odd, _ in parts if odd is not None), None):
            rank_zero_warn(
                f"predictions are not written: predict_step returned {odd}; expected a dict with the lists "
                "index and prediction"
            )
            return
        gathered = (record for _, part in parts for record in part)
        records = sorted(gathered, key=lambda record: (record.get("loader", 0), record["index"]))
        if is_trial(trainer):
            rank_zero_info(f"{len(records):,} predictions, not written: this is a fast_dev_run")
            return
        if trainer.is_global_zero:
            with refuse_unwritable("predictions", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with open_whole(path, "wb") as file:
                    file.write(_WRITERS[path.suffix](records))
        rank_zero_info(f"{len(records):,} predictions: {path}")


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _format_jsonl(records: list[Record]) -> bytes:
    return "".join(f"{_to_json(record)}\n" for record in records).encode()


def _to_list(values: Any) -> list[Any] | None:
    """Return the values of rows, ``None`` if it is nothing of the kind."""
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    is_of_rows = isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping)
    return list(values) if is_of_rows else None


def _to_plain(value: Any) -> Any:
    """Return a value with tensors and arrays as lists and numbers, wherever they are in it."""
    return tree_map_only((Tensor, np.ndarray, np.generic), lambda found: found.tolist(), value)


def _list_columns(records: list[Record]) -> list[str]:
    """Return the columns of a table; batches may have some that others have not."""
    return list(dict.fromkeys(name for record in records for name in record)) or ["index", "prediction"]


def _format_csv(records: list[Record]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, _list_columns(records), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({name: _to_json(v) if isinstance(v, list | dict) else v for name, v in record.items()})
    return text.getvalue().encode()


def _format_parquet(records: list[Record]) -> bytes:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    file = io.BytesIO()
    pq.write_table(pa.table({name: [one.get(name) for one in records] for name in _list_columns(records)}), file)
    return file.getvalue()


_WRITERS: dict[str, Callable[[list[Record]], bytes]] = {
    ".jsonl": _format_jsonl,
    ".csv": _format_csv,
    ".parquet": _format_parquet,
}


def _gather(part: tuple[str | None, list[Record]]) -> list[tuple[str | None, list[Record]]]:
    """Return the parts of all ranks on the first one, and its own on any other."""
    if not dist.is_initialized():
        return [part]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(part, parts)
    return [part] if parts is None else parts
