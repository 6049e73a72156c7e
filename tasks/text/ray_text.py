"""Text that Ray Data tokenizes on a cluster and streams into training: never all of it on one machine."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import IterableDataset

from lit_fsdp.checkpoint.remote import is_remote
from lit_fsdp.strategy.trainer_settings import get_data_ranks
from lit_fsdp.tasks.data import Split, refuse_empty, refuse_endless
from lit_fsdp.tasks.loading import NEW_RUN, mix_seeds, read_loader_states
from lit_fsdp.tasks.row_files import Row, drop_filled, refuse_splits
from lit_fsdp.tasks.text.batches import TokenRow, stack_rows
from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text.files import read_file
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.preview import Preview
from lit_fsdp.tasks.text.rows import RowFormat
from lit_fsdp.tasks.text.sources import check_source
from lit_fsdp.tasks.text.streaming import Document, EndlessLoader, RowMaker, StreamPlace
from lit_fsdp.tasks.text.tokenizer import get_pad_id, load_tokenizer
from lit_fsdp.tasks.text.tokens import NUM_AT_ONCE, Encoder, encode_rows

_KINDS = ([".parquet"], [".jsonl", ".json"], [".csv"])
_ROW = "row of lit_fsdp"  # the column of rows that our own readers have read, as JSON
_SHARD = "train"
_AHEAD = 4  # blocks of documents that a rank fetches while it trains
_SHUFFLED_AT_ONCE = 10_000  # documents


class RayTextData(TextData):
    """Text that Ray Data tokenizes and streams into training, for data that no machine should have to keep.

    Rows, and what is learned of them, are those of ``TextData``. Nothing is kept on disk. ``fit --launcher ray``
    tokenizes on the CPUs of the cluster that its ranks leave free. In a ``TorchTrainer`` of your own, pass
    ``make_ray_datasets()`` as its ``datasets``. ``num_workers`` and ``cache_dir`` are for the other splits, which
    ``TextData`` reads.

    The stream has no end: when all documents have come, it starts again, so set ``trainer.max_steps``. Which rank
    gets which document depends on the speed of the machines. A resumed run starts a new pass: documents of the last
    one may come again before others come at all. Take ``TextData`` where a resumed run has to be exactly the same.

    Args:
        train: A ``.parquet``, ``.jsonl``, ``.json`` or ``.csv`` file that all machines can read, a folder of files of
            one kind, or a list of these; also an address, such as ``s3://bucket/part.parquet``.
        tokenizer: Model name on the Hub, or folder to load it from.
        shuffle: Take files in a new order each pass, and documents within each 10,000.
    """

    is_endless = True

    def __init__(self, *, train: str | list[str], tokenizer: str, shuffle: bool = True, **kwargs: Any) -> None:
        if kwargs.get("streaming"):
            raise ValueError("streaming: got true: Ray Data streams already; leave it out, or take TextData")
        super().__init__(tokenizer=tokenizer, shuffle=shuffle, **kwargs)
        if self.holds_out or kwargs.get("validation_fraction"):
            raise ValueError("validation_fraction: a stream has no share to hold out: set validation")
        if not self.packing:
            raise ValueError("packing: got false: a stream is packed; leave it out")
        if self.share is not None:
            raise ValueError(f"share: got {self.share!r}: Ray deals documents out by speed already; leave it out")
        refuse_empty("train", train, "files, or a folder of files")
        self.train = [train] if isinstance(train, str) else list(train)
        self.suffixes = _choose_kind(self.train)

    def make_ray_datasets(self) -> dict[str, Any]:
        """Return what a ``TorchTrainer`` takes as ``datasets``: tokens of the training documents, by ``ray.data``."""
        import ray.data

        paths = [source if is_remote(source) else _make_absolute(source) for source in self.train]
        shuffled = {"shuffle": "files"} if self.shuffle else {}
        try:
            if self.suffixes == [".parquet"]:
                rows = ray.data.read_parquet(paths, **shuffled)
            else:
                rows = ray.data.read_datasource(_make_source(paths, self.suffixes, **shuffled))
        except FileNotFoundError as error:
            _refuse_missing(paths)
            raise ValueError(f"train: {error}: no such file or folder; Ray reads no patterns") from error
        tokenizer = str(self.tokenizer_setting)
        settings = {
            "tokenizer": _make_absolute(tokenizer) if Path(tokenizer).expanduser().is_dir() else tokenizer,
            "chat_template": self.chat_template,
            "row_format": self.row_format,
            "skips_bad_rows": self.skips_bad_rows,
        }
        return {
            _SHARD: rows.map_batches(
                tokenize, fn_kwargs=settings, batch_size=NUM_AT_ONCE, batch_format="pyarrow", zero_copy_batch=True
            )
        }

    def check_stage(self, stage: str) -> None:
        """Look at nothing: the workers may see what this machine does not."""

    def setup(self, stage: str | None = None) -> None:
        """Load the tokenizer and make the tokens of the other splits; training documents come as they are needed."""
        super().setup("validate" if stage == "fit" else stage)

    def make_preview(self, split: Split, num_shown: int) -> Preview:
        """Return the preview of another split.

        Raises:
            ValueError: It is ``train``.
        """
        if split == "train":
            raise ValueError("train: a stream is not looked at before it is trained on: preview it with TextData")
        return super().make_preview(split, num_shown)

    def train_dataloader(self) -> EndlessLoader:  # type: ignore[override]
        """Return this rank's part of the stream. To be called in a worker of Ray Train."""
        if self.trainer is not None and get_data_ranks(self.trainer).count < self.trainer.world_size:
            raise ValueError(
                "train: Ray deals different documents to ranks that have to see the same rows: expected mesh.tensor 1 "
                "and mesh.sequence 1, or TextData"
            )
        if self.trainer is not None:
            refuse_endless(self.trainer, self)
        try:
            from ray.train import get_dataset_shard

            shard = get_dataset_shard(_SHARD)
        except ImportError as error:
            raise ValueError(f"train: a stream needs Ray ({error}): pip install 'lit_fsdp[ray]'") from error
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"train: Ray streams nothing to this process ({error}): expected fit --launcher ray, or a TorchTrainer "
                "with datasets=data.make_ray_datasets()"
            ) from error
        rows = StreamedRows(
            lambda number: self._iterate(shard, number), seq_length=self.seq_length, pad_id=get_pad_id(self.tokenizer)
        )
        return PassLoader(rows, trainer=self.trainer, batch_size=self.batch_size, collate_fn=stack_rows)

    def _iterate(self, shard: Any, number: int) -> Iterator[Document]:
        seed = mix_seeds(self.seed, number)
        shuffled = {"local_shuffle_buffer_size": _SHUFFLED_AT_ONCE, "local_shuffle_seed": seed % 2**32}
        batches = shard.iter_batches(
            prefetch_batches=_AHEAD, batch_size=NUM_AT_ONCE, **(shuffled if self.shuffle else {})
        )
        for batch in batches:
            yield from zip(batch["ids"], batch["learn"], strict=True)


class StreamedRows(IterableDataset[TokenRow]):
    """Documents packed into rows as they come, pass after pass without an end; see ``PackedRows``.

    Args:
        open_pass: Returns the documents of a pass, by its number.
        seq_length: Tokens in a row.
        pad_id: Of the tokenizer; no row is filled up with it.
    """

    def __init__(self, open_pass: Callable[[int], Iterable[Document]], *, seq_length: int, pad_id: int) -> None:
        self.open_pass, self.seq_length, self.pad_id = open_pass, seq_length, pad_id
        self.num_passes = 0

    def __iter__(self) -> Iterator[TokenRow]:
        maker = RowMaker(packing=True, seq_length=self.seq_length, pad_id=self.pad_id)
        while True:
            self.num_passes += 1
            num_documents = 0
            for document in self.open_pass(self.num_passes - 1):
                num_documents += 1
                maker.add(document, StreamPlace())
                while maker.has_row:
                    yield maker.take()
            if not num_documents:
                raise ValueError("train: Ray streams no document to this rank: expected at least one for each")


class PassLoader(EndlessLoader):
    """A loader of a stream that cannot be entered in its middle; says so when a run is resumed."""

    def __init__(self, dataset: StreamedRows, *, trainer: Trainer | None, **options: Any) -> None:
        super().__init__(dataset, trainer=trainer, **options)
        if trainer is not None:
            for state in read_loader_states(trainer):  # Lightning hands it over in the middle of an epoch only
                self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return which pass it is in."""
        rows: Any = self.dataset
        return {"passes": rows.num_passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a new pass."""
        if "passes" not in state:
            raise ValueError(f"data: the checkpoint was saved with rows of another kind: restore them, or {NEW_RUN}")
        rows: Any = self.dataset
        rows.num_passes = state["passes"]
        rank_zero_warn(
            f"train: pass {state['passes']} of the stream is not gone on with: a new one begins, in which documents "
            "may come again that training has seen in that one"
        )


@dataclass(frozen=True, kw_only=True)
class _StoredFile:
    """A file as our readers take it, of a store that Ray has found."""

    path: str
    store: Any

    @property
    def suffix(self) -> str:
        return PurePath(self.path).suffix

    def open(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self.store.open_input_stream(self.path))

    def __str__(self) -> str:
        return self.path


def read_tables(path: str, store: Any) -> Iterator[Any]:
    """Yield tables of the rows of a file that is no Parquet, each row with its place as JSON.

    Ray's own readers guess what text means: 007 is a number then, and an argument of a tool a point in time.

    Args:
        path: In the store.
        store: A file system of Arrow.
    """
    import pyarrow as pa  # type: ignore[import-untyped]

    file: Any = _StoredFile(path=path, store=store)
    rows = read_file(file, txt_documents="file")
    while chunk := [json.dumps(asdict(row)) for row in islice(rows, NUM_AT_ONCE)]:
        yield pa.table({_ROW: chunk})


def _make_source(paths: list[str], suffixes: list[str], **options: Any) -> Any:
    """Return files for Ray Data, which ``read_tables`` reads."""
    from ray.data.datasource import FileBasedDatasource

    class FileRows(FileBasedDatasource):  # type: ignore[misc, unused-ignore]
        def _read_stream(self, _: Any, path: str) -> Iterator[Any]:
            return read_tables(path, self._filesystem)  # private, seen in Ray 2.60

    return FileRows(paths, file_extensions=[suffix.removeprefix(".") for suffix in suffixes], **options)


def tokenize(
    table: Any, *, tokenizer: str, chat_template: str | None, row_format: RowFormat, skips_bad_rows: bool
) -> Any:
    """Return a table with ``ids`` and ``learn`` of each row of a table; runs in processes of Ray Data.

    Raises:
        ValueError: On the first bad row, unless they are skipped.
    """
    import pyarrow as pa

    encoder = _make_encoder(tokenizer, chat_template, row_format)
    found: list[Any] = []
    for row, result in encode_rows((_make_row(fields) for fields in table.to_pylist()), encoder):
        if not isinstance(result, RowError):
            found.append(result)
        elif not skips_bad_rows:
            raise ValueError(f"train: {row.where}: {result}")
    columns = {
        "ids": pa.array([document.ids for document in found], type=pa.list_(pa.int32())),
        "learn": pa.array([document.learn for document in found], type=pa.list_(pa.bool_())),
    }
    return pa.table(columns)


def _make_row(fields: dict[str, Any]) -> Row:
    if _ROW in fields:
        return Row(**json.loads(fields[_ROW]))
    # A table gives every row all columns that any row has.
    own = drop_filled({name: value for name, value in fields.items() if value is not None})
    return Row(where=f"the row {repr(own)[:80]}", fields=own)


@cache
def _make_encoder(tokenizer: str, chat_template: str | None, row_format: RowFormat) -> Encoder:
    loaded = load_tokenizer(tokenizer)
    if chat_template is not None:
        loaded.chat_template = chat_template
    return Encoder(loaded, row_format)


def _make_absolute(path: str) -> str:
    """Return a path as processes of Ray find it, which run in another folder."""
    return str(Path(path).expanduser().absolute())


def _refuse_missing(paths: list[str]) -> None:
    """Refuse the first path that is not there, with the nearest name that is."""
    for path in paths:
        try:
            check_source(path)
        except ValueError as error:
            raise ValueError(f"train: {error}") from None


def _choose_kind(sources: list[str]) -> list[str]:
    """Return the suffixes of what all sources are."""
    suffixes: set[str] = set()
    for source in sources:
        folder = Path(source).expanduser()
        inside_it = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
        read = [path for path in inside_it if path.suffix.lower() in chain(*_KINDS)]
        refuse_splits(folder, [path.name for path in read])
        inside = {path.suffix.lower() for path in (read if folder.is_dir() else [folder])}
        suffixes |= inside or {""}
    kind = next((kind for kind in _KINDS if suffixes and suffixes <= set(kind)), None)
    if kind is None:
        _refuse_missing([_make_absolute(s) for s in sources if not is_remote(s) and not Path(s).suffix])
        raise ValueError(
            f"train: got {', '.join(sources) or 'nothing'}: expected files or folders of one kind: "
            f"{', '.join(chain(*_KINDS))}"
        )
    return kind
