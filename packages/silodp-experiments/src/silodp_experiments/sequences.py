"""Texts as records: sequences of ids, packed into rows of one length without mixing persons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from silodp.data.public import UNLABELED
from silodp.errors import SilodpError
from silodp.settings import Count, check_value


def pack_sequences(
    sequences: Sequence[Sequence[int]], user: Sequence[int], length: int, separator: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pack sequences into rows for next-token prediction; a row has sequences of one person alone.

    The sequences of a person are joined, each with the separator behind it, and cut into rows; the last row is filled
    with separators. So short texts waste little, a row belongs to one person, and what a person's rows are depends on
    that person's sequences alone.

    Args:
        sequences: Ids of tokens, one sequence for each text.
        user: The person of each sequence.
        length: The tokens L of a row, which is public.
        separator: The id between sequences and behind the last one, which no sequence has.

    Returns:
        x (n, L) ids; y (n, L), the id that follows each of them, −100 where none does; and the person of each row.

    Raises:
        SilodpError: another number of persons than sequences, or a sequence with the separator.
    """
    check_value("length", length, Count)
    if len(sequences) != len(user):
        raise SilodpError(
            f"there are {len(sequences)} sequences and {len(user)} persons: give the person of each sequence.",
            code="argument.shape",
            field="user",
        )
    joined: dict[int, list[int]] = {}
    for sequence, person in zip(sequences, user, strict=True):
        if separator in sequence:
            raise SilodpError(
                f"a sequence has the id {separator}, which separates sequences: choose another separator.",
                code="argument.value",
                field="separator",
            )
        joined.setdefault(int(person), []).extend([*map(int, sequence), separator])
    rows, persons = [], []
    for person, ids in joined.items():
        # The first id of a text follows a separator, so that the model learns how texts begin.
        ids = [separator, *ids]
        for first in range(0, len(ids) - 1, length):
            rows.append(ids[first : first + length + 1])
            persons.append(person)
    x = np.full((len(rows), length), separator, np.int64)
    y = np.full((len(rows), length), UNLABELED, np.int64)
    for number, row in enumerate(rows):
        x[number, : len(row) - 1], y[number, : len(row) - 1] = row[:-1], row[1:]
    return x, y, np.array(persons, np.int64)
