"""Fictitious national numbers: random days of birth and serial numbers, with every check digit that there may be.

What is made here has the shape of a rule's canonical identifiers, without the country. A body is made at random; of its
endings all are listed, so that of each body one, some or no number is right.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from itertools import product
from random import Random

Make = Callable[[Random], str]
"""A body with "?" where a check digit stands, "!" where a check letter does, "*" for either."""

CHECKS = {"?": string.digits, "!": string.ascii_uppercase, "*": string.digits + string.ascii_uppercase}


def digits(rng: Random, count: int) -> str:
    return "".join(rng.choice(string.digits) for _ in range(count))


def letters(rng: Random, count: int, allowed: str = string.ascii_uppercase) -> str:
    return "".join(rng.choice(allowed) for _ in range(count))


def day(
    rng: Random, order: str, first: int = 1920, last: int = 2019, *, months: int = 0, days: int = 0
) -> str:
    """A day of birth, as "ymd", "dmy" (two digits of the year) or "Ymd" (four), with something added to its parts."""
    year = rng.randint(first, last)
    parts = {
        "Y": f"{year:04}",
        "y": f"{year % 100:02}",
        "m": f"{rng.randint(1, 12) + months:02}",
        "d": f"{rng.randint(1, 31) + days:02}",
    }
    return "".join(parts[part] for part in order)


def _make_fi(rng: Random) -> str:
    return f"{day(rng, 'dmy', 1900, 1999)}{rng.choice('+-YXWVUABCDEF')}{digits(rng, 3)}*"


def _make_fr(rng: Random) -> str:
    department = rng.choice([digits(rng, 2), "2A", "2B"])
    return f"{rng.choice('1212378')}{day(rng, 'y')}{rng.randint(1, 12):02}{department}{digits(rng, 6)}??"


def _make_it(rng: Random) -> str:
    month, birth = rng.choice("ABCDEHLMPRST"), rng.choice([rng.randint(1, 31), rng.randint(41, 71)])
    code = f"{letters(rng, 6)}{digits(rng, 2)}{month}{birth:02}{letters(rng, 1)}{digits(rng, 3)}!"
    for place in rng.sample([6, 7, 9, 10, 12, 13, 14], rng.choice([0, 0, 1, 3, 7])):
        code = code[:place] + "LMNPQRSTUV"[int(code[place])] + code[place + 1 :]
    return code


def _make_nz(rng: Random) -> str:
    allowed = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    if rng.random() < 0.5:
        return f"{letters(rng, 3, allowed)}{digits(rng, 3)}?"
    return f"{letters(rng, 3, allowed)}{digits(rng, 2)}{letters(rng, 1, allowed)}!"


def _make_cz(rng: Random) -> str:
    if rng.random() < 0.2:
        return f"{day(rng, 'ymd', 1880, 1953, months=rng.choice([0, 50]))}{digits(rng, 3)}"
    return f"{day(rng, 'ymd', 1954, 2024, months=rng.choice([0, 50, 20, 70]))}{digits(rng, 3)}?"


def _make_tax_id(rng: Random) -> str:
    first = [rng.choice("123456789"), *rng.choices(string.digits, k=9)]
    if rng.random() < 0.9:  # a pair
        first = rng.sample(string.digits, 9)
        first.insert(rng.randint(0, 9), rng.choice(first))
    return "".join(first) + "?"


MAKERS: dict[str, Make] = {
    "SE personnummer": lambda rng: f"{day(rng, 'Ymd', 1850, 2024)}{digits(rng, 3)}?",
    "NO fodselsnummer": lambda rng: (
        f"{day(rng, 'dmy', 1940, 1999, days=rng.choice([0, 0, 40]))}{digits(rng, 3)}??"
    ),
    "DK cpr": lambda rng: f"{day(rng, 'dmy')}{digits(rng, 3)}?",
    "FI hetu": _make_fi,
    "IS kennitala": lambda rng: f"{day(rng, 'dmy')}{digits(rng, 2)}?{rng.choice('90')}",
    "EE isikukood": lambda rng: f"{rng.randint(1, 8)}{day(rng, 'ymd')}{digits(rng, 3)}?",
    "LV personas-kods": lambda rng: f"{day(rng, 'dmy')}{rng.randint(0, 2)}{digits(rng, 3)}?",
    "LT asmens-kodas": lambda rng: f"{rng.randint(1, 6)}{day(rng, 'ymd')}{digits(rng, 3)}?",
    "GB nhs": lambda rng: f"{digits(rng, 9)}?",
    "PL pesel": lambda rng: f"{day(rng, 'ymd', months=rng.choice([0, 20, 40, 60, 80]))}{digits(rng, 4)}?",
    "CZ rodne-cislo": _make_cz,
    "NL bsn": lambda rng: f"{digits(rng, 8)}?",
    "BE rijksregisternummer": lambda rng: (
        f"{day(rng, 'ymd', months=rng.choice([0, 0, 20, 40]))}{digits(rng, 3)}??"
    ),
    "FR nir": _make_fr,
    "ES dni-nie": lambda rng: f"{rng.choice(string.digits + 'XYZ')}{digits(rng, 7)}!",
    "IT codice-fiscale": _make_it,
    "PT nif": lambda rng: f"{digits(rng, 8)}?",
    "DE kvnr": lambda rng: f"{letters(rng, 1)}{digits(rng, 8)}?",
    "DE steuer-id": _make_tax_id,
    "AT svnr": lambda rng: f"{digits(rng, 3)}?{day(rng, 'dmy')}",
    "CH ahv": lambda rng: f"756{digits(rng, 9)}?",
    "RS jmbg": lambda rng: f"{day(rng, 'dm')}{rng.choice(['9', '0'])}{digits(rng, 2)}{digits(rng, 5)}?",
    "TR kimlik": lambda rng: f"{digits(rng, 9)}??",
    "IL teudat-zehut": lambda rng: f"{digits(rng, 8)}?",
    "IN aadhaar": lambda rng: f"{digits(rng, 11)}?",
    "KR rrn": lambda rng: f"{day(rng, 'ymd')}{digits(rng, 6)}?",
    "CN id": lambda rng: f"110105{day(rng, 'Ymd', 1900)}{digits(rng, 3)}*",
    "TH id": lambda rng: f"{digits(rng, 12)}?",
    "BR cpf": lambda rng: f"{digits(rng, 9)}??",
    "BR cns": lambda rng: f"{rng.choice('12789')}{digits(rng, 13)}?",
    "CA sin": lambda rng: f"{digits(rng, 8)}?",
    "AU medicare": lambda rng: f"{rng.randint(2, 6)}{digits(rng, 7)}?{rng.randint(1, 9)}",
    "AU ihi": lambda rng: f"800360{digits(rng, 9)}?",
    "NZ nhi": _make_nz,
    "lei": lambda rng: f"{letters(rng, 18, string.digits + string.ascii_uppercase)}??",
}


def list_endings(body: str) -> Iterator[str]:
    """The body with every check digit."""
    choices = [CHECKS.get(c, c) for c in body]
    return map("".join, product(*choices))


def make_numbers(name: str, count: int, seed: int = 0) -> list[str]:
    """At least `count` numbers of a rule, right and wrong ones, from as many bodies as that takes."""
    rng, found = Random(f"{name} {seed}"), list[str]()
    while len(found) < count:
        found += list_endings(MAKERS[name](rng))
    return found


def corrupt(rng: Random, number: str) -> str:
    """The number with one other digit or letter, or with two neighbors in the other order."""
    place = rng.randrange(len(number))
    if rng.random() < 0.5 and place:
        return number[: place - 1] + number[place] + number[place - 1] + number[place + 1 :]
    pool = string.digits if number[place].isdigit() else string.ascii_uppercase
    return number[:place] + rng.choice(pool) + number[place + 1 :]
