#!/usr/bin/env bash
# python-stdnum 2.2: numbers that registers give are refused, and numbers that they never give are valid.
#
# Refused: coordination numbers of Sweden (Skatteverket's own example), common help numbers and synthetic persons of
# Norway, Icelandic numbers since 18 February 2026 and system numbers (no check digit), Latvian numbers since 2017 (ten
# random digits), Korean numbers since October 2020 (random digits). Valid: NHS numbers and CPF of one repeated digit, a
# Latvian legal entity as a person, a Czech month 45, 31 February in Austria, an LEI with the check digits 99.
# Belgian, Danish and Norwegian numbers depend on the clock of the machine.
# Seen: "refused: 7 of 7; valid: 6 of 6".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check python-stdnum==2.2
"$work/env/bin/python" - <<'PY'
from stdnum import lei
from stdnum.at import vnr
from stdnum.br import cpf
from stdnum.cz import rc
from stdnum.gb import nhs
from stdnum.is_ import kennitala
from stdnum.kr import rrn
from stdnum.lv import pvn
from stdnum.no import fodselsnummer
from stdnum.se import personnummer

given = [
    (personnummer, "197010632391"),
    (fodselsnummer, "80000000098"),
    (fodselsnummer, "02815698765"),
    (kennitala, "1201603399"),
    (kennitala, "8923501739"),
    (pvn, "32736100000"),
    (rrn, "2010054000000"),
]
never = [
    (nhs, "1111111111"),
    (cpf, "11111111111"),
    (pvn, "40003009497"),
    (rc, "7045151234"),
    (vnr, "1232310280"),
    (lei, "5493001KJTIIGC005299"),
]
refused = sum(not module.is_valid(number) for module, number in given)
valid = sum(module.is_valid(number) for module, number in never)
print(f"refused: {refused} of {len(given)}; valid: {valid} of {len(never)}")
assert refused == len(given) and valid == len(never), "changed"
PY
