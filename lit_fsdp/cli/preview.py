"""``preview``: what a run would learn, row by row, from its own configuration and without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningDataModule, LightningModule
from rich.console import Console
from rich.text import Text
from typing_extensions import override

from lit_fsdp.cli.train import TrainerCLI, run_trainer
from lit_fsdp.errors import ConfigError
from lit_fsdp.planning.planned_step import PlannedTrainer
from lit_fsdp.redaction import redact
from lit_fsdp.tasks.text.preview import Piece, Preview, describe_row

_LEARNED, _READ = "bold green", "dim"
_BAR = 40


def run_preview(args: Sequence[str]) -> int:
    """Print rows of a configuration as the model sees them.

    Args:
        args: The command line, the command first.
    """
    return run_trainer(args, PreviewCLI)


class PreviewTrainer(PlannedTrainer):
    """Shows data where a Trainer would train."""

    def preview(
        self,
        model: LightningModule,  # noqa: ARG002  read and checked as for fit
        datamodule: LightningDataModule | None = None,
        rows: int = 3,
        split: Literal["train", "validation", "test"] = "train",
        ids: bool = False,
    ) -> None:
        """Show rows as the model sees them, which tokens are learned, and what all rows hold.

        Takes the configuration of `fit`. Data is tokenized, or read from the cache; weights are not needed.

        Args:
            model: That would be trained.
            datamodule: That gives the data.
            rows: How many to show.
            split: Of which data.
            ids: Show the number of each token, too.
        """
        if rows < 0:
            raise ConfigError(f"rows: got {rows}: expected 0 or more")
        data: Any = datamodule
        if not hasattr(data, "make_preview"):
            got = "nothing" if data is None else type(data).__name__
            raise ConfigError(f"data: got {got}: only text has a preview: expected TextData, or one with make_preview")
        stage = {"train": "fit", "validation": "validate"}.get(split, split)
        data.check_stage(stage)
        data.setup(stage)
        print_preview(data.make_preview(split, rows), split=split, shows_ids=ids)


class PreviewCLI(TrainerCLI):
    """Reads the configuration of ``fit``, and builds of it what a preview needs."""

    trainer_type = PreviewTrainer

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.settings["trainer"]
        # Nothing of a run that would write, connect or listen is built.
        trainer["callbacks"] = trainer["profiler"] = None
        trainer["logger"] = False
        # Nor is anything computed.
        trainer["accelerator"], trainer["devices"], trainer["num_nodes"] = "cpu", 1, 1
        trainer["precision"], trainer["strategy"] = None, "auto"
        super().before_instantiate_classes()

    @override
    def choose_parts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.save_config_callback = None
        return {"callbacks": [], "logger": False, "enable_checkpointing": False}


def print_preview(found: Preview, *, split: str, shows_ids: bool) -> None:
    """Print rows and figures, coloured where the terminal is.

    Args:
        found: What to print.
        split: Of which data it is.
        shows_ids: Whether to print the numbers of tokens below each row.
    """
    console = Console(soft_wrap=True, highlight=False)
    for number, row in enumerate(found.rows, start=1):
        console.rule(
            f"{split} row {number}: {describe_row(row, has_learned=found.num_learned is not None)}",
            style=_READ,
            align="left",
        )
        console.print(format_row(row, has_colors=console.color_system is not None))
        if shows_ids:
            for piece in row:
                console.print(Text(" ".join(map(str, piece.ids)), style=_LEARNED if piece.is_learned else _READ))
    console.rule(f"{split}: all rows", style=_READ, align="left")
    for line in found.describe():
        console.print(redact(line), markup=False)  # the address of a source may hold a credential
    console.print("tokens     documents")
    counts = list(found.count_lengths())
    longest = max(min(_BAR, console.width - 22), 1)  # beside the figures
    for least, most, count in counts:
        bar = "█" * -(-longest * count // max(number for _, _, number in counts))
        console.print(f"{f'{least}-{most}' if most > least else least:<10} {count:>9,} {bar}")


def format_row(row: Sequence[Piece], *, has_colors: bool) -> Text:
    """Return a row as text, in which what is learned can be seen."""
    text = Text()
    for number, piece in enumerate(row):
        if piece.begins_document and number:
            text.append("\n┈┈┈\n", style=_READ)
        text.append(piece.text if has_colors else piece.mark(), style=_LEARNED if piece.is_learned else _READ)
    return text
