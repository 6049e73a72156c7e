"""Prepared rows for one model: checked, and with a name for who speaks in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lit_fsdp.tasks.tts.families.family import Family, FamilyConfig
from lit_fsdp.tasks.tts.preparation.prepared import UNNAMED, PreparedRow


def check_row(row: PreparedRow, family: Family, config: FamilyConfig) -> None:
    """Refuse a row that the model cannot be trained on.

    Raises:
        ValueError: It has other codebooks or codes, or what the model cannot be told: a language, an instruction,
            speech to go on from.
    """
    size = config.codebook_size
    for codes in [row.codes] if row.ref_codes is None else [row.codes, row.ref_codes]:
        if codes.shape[1] != config.num_codebooks:
            raise ValueError(
                f"{row.place}: got {codes.shape[1]} codebooks: expected {config.num_codebooks}, the model's"
            )
        if codes.size and not 0 <= codes.min() <= codes.max() < size:
            raise ValueError(
                f"{row.place}: got codes from {codes.min()} to {codes.max()}: expected 0 to {size - 1}: "
                "prepare the data with the model that is trained"
            )
    try:
        config.get_language_id(row.language, row.speaker)
        family.check_prompt(ref_text=row.ref_text, instruct=row.instruct)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error


def name_speakers(rows: Sequence[PreparedRow], name: str | None, *, is_needed: bool, source: str) -> list[PreparedRow]:
    """Return rows with a name for who speaks where none is given.

    Args:
        rows: Of one source.
        name: Of that speaker; ``None`` leaves rows as they are.
        is_needed: Refuse a name for nobody.
        source: Names the rows in errors.

    Raises:
        ValueError: All rows have a speaker.
    """
    if name is None:
        return list(rows)
    if is_needed and all(row.speaker != UNNAMED for row in rows):
        raise ValueError(f"default_speaker: not used, as all rows of {source} name a speaker; leave it out")
    own = name.strip().lower()
    return [replace(row, speaker=own) if row.speaker == UNNAMED else row for row in rows]


def refuse_unnamed(rows: Sequence[PreparedRow]) -> None:
    """Refuse to make one voice of rows that do not say who speaks.

    Raises:
        ValueError: With how many they are.
    """
    unnamed = [row for row in rows if row.speaker == UNNAMED and len(row.speaker_embedding)]
    if unnamed:
        raise ValueError(
            f"speaker_embedding: got 'mean': {len(unnamed)} of {len(rows)} rows name no speaker, such as "
            f"{unnamed[0].place}: their mean would be a voice of whoever speaks there: expected default_speaker, the "
            f"name of who speaks in all of them ({UNNAMED!r} is one too), or speaker_embedding: row"
        )
