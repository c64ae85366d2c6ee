"""Every error carries a stable code that is registered, and every registered code is in use.

What is read here is the source: a code that is built at run time (an f-string, a name from elsewhere) is refused, since
nobody could look it up.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import silodp.errors
from silodp.crypto.keys import ClientHello, HandshakeState, Identity
from silodp.crypto.sampling import SamplingRatio
from silodp.errors import CODES
from silodp.mechanisms.clipping import Bounds
from silodp.mechanisms.quantization import Quantizer
from silodp.runtime.checkpoint import Checkpoint, encode_checkpoint, load_checkpoint, save_checkpoint
from silodp.settings import Probability, check_value
from silodp.wire.store import DirectoryStore
from silodp_private.crypto import lookup
from silodp_private.crypto.oblivious_transfer import BaseTransfers, TransferSender
from silodp_private.paillier.parameters import PaillierParameters
from silodp_private.paillier.scheme import PublicKey
from support.places import ROOT
from support.refusals import refused

SOURCE = Path(silodp.errors.__file__).parent
AREAS = (
    "accounting argument attack budget bundle checkpoint cli cohort config crypto data deploy evaluation extension "
    "gate identity ledger loss message method metric model plan plugin policy regression report run session "
    "statistics store workers"
)


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Every module of silodp and of the packages beside it, by its path."""
    for source in sorted(ROOT.glob("packages/*/src")):
        for path in sorted(source.rglob("*.py")):
            yield path.relative_to(source).as_posix(), ast.parse(path.read_text())


def called(call: ast.Call) -> str:
    """The name of what is called, without what it is an attribute of."""
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


def helpers(tree: ast.Module) -> dict[str, tuple[int, ast.expr | None]]:
    """Functions that are given a code: its place among their positional arguments (without self), and its default."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if "code" in names:
                defaults = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
                found[node.name] = names.index("code"), defaults.get("code")
    return found


def code_of(call: ast.Call, place: int | None = None) -> ast.expr | None:
    """The argument `code` of a call: by keyword, or at this place."""
    by_keyword = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
    by_place = [] if place is None or place >= len(call.args) else [call.args[place]]
    return next(iter(by_keyword + by_place), None)


def literals(code: ast.expr | None, within_helper: bool) -> list[str] | None:
    """The codes that an expression can be, besides one that another error brought along; None: nobody can say."""
    match code:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Attribute(attr="code"):
            return []
        case ast.Name(id="code") if within_helper:
            return []
        case ast.BoolOp(values=parts):
            return joined(literals(part, within_helper) for part in parts)
        case ast.IfExp(body=one, orelse=other):
            return joined(literals(part, within_helper) for part in (one, other))
    return None


def joined(parts: Iterable[list[str] | None]) -> list[str] | None:
    """All of them, if every one is known."""
    found: list[str] = []
    for part in parts:
        if part is None:
            return None
        found += part
    return found


def errors(tree: ast.Module) -> Iterator[tuple[int, list[str] | None]]:
    """Line and codes of every `SilodpError` that a module makes, itself or through a helper of its own."""
    shared = {"require": None, "refuse_malformed": None, "model_error": 1, "loss_error": 1}
    by_helper = {**helpers(tree), **{name: (place, None) for name, place in shared.items()}}
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in by_helper
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "SilodpError":
            yield node.lineno, literals(code_of(node), id(node) in inside)
        elif isinstance(node, ast.Call) and called(node) in by_helper:
            place, default = by_helper[called(node)]
            yield node.lineno, literals(code_of(node, place) or default, id(node) in inside)


def test_every_error_has_a_code_that_can_be_looked_up():
    found = [(name, line, codes) for name, tree in parsed() for line, codes in errors(tree)]
    assert len(found) > 450
    assert [f"{name}:{line}" for name, line, codes in found if codes is None] == []


def test_every_code_that_an_error_has_is_registered():
    named = {
        code: f"{name}:{line}"
        for name, tree in parsed()
        for line, codes in errors(tree)
        for code in codes or ()
    }
    assert {place: code for code, place in named.items() if code not in CODES} == {}


def test_every_registered_code_is_in_use():
    listed = next(
        node.value
        for node in ast.walk(ast.parse((SOURCE / "errors.py").read_text()))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "CODES"
    )
    line = range(listed.lineno, (listed.end_lineno or 0) + 1)
    used = {
        node.value
        for name, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and not (name == "silodp/errors.py" and node.lineno in line)
    }
    assert [code for code in CODES if code not in used] == []


def test_codes_are_an_area_and_a_problem_in_alphabetical_order_with_one_line_each():
    assert list(CODES) == sorted(CODES)
    areas = "|".join(AREAS.split())
    assert [code for code in CODES if not re.fullmatch(rf"(?:{areas})\.[a-z0-9_]+|invalid", code)] == []
    assert [code for code, told in CODES.items() if not told or "\n" in told or told.endswith(".")] == []


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        ('raise SilodpError("no.")', None),
        ('raise SilodpError("no.", code=f"run.{reason}")', None),
        ('raise SilodpError("no.", code=code)', None),
        ('raise SilodpError("no.", code="run.refused")', ["run.refused"]),
        ('raise errors.SilodpError("no.", code="run.refused")', ["run.refused"]),
        ('raise SilodpError("no.", code=error.code)', []),
        ('raise SilodpError("no.", code=failure.code or "run.refused")', ["run.refused"]),
        ('raise SilodpError("no.", code=failure.code or reason)', None),
        ('raise SilodpError("no.", code="run.exists" if full else "run.refused")', ["run.exists", "run.refused"]),
        ('require(fits, "no.", code="a.b")', ["a.b"]),
        ('require(fits, "no.")', None),
        ('def refuse(what, code):\n    raise SilodpError(what, code=code)\nrefuse("no", "a.b")', ["a.b"]),
        ('def refuse(what, code):\n    raise SilodpError(what, code=code)\nrefuse("no")', None),
    ],
)  # fmt: skip
def test_the_reader_of_the_source_finds_what_has_no_code(source, codes):
    found = [some for _, some in errors(ast.parse(source))]
    assert (None in found) == (codes is None)
    assert codes is None or [code for some in found for code in some] == codes


SESSION = bytes(32)


def transfers():
    base = BaseTransfers(SESSION, "test")
    sender, reply = TransferSender.accept(SESSION, "test", base.offer)
    return base.receiver(reply), sender, base, reply


def test_what_a_program_does_about_an_error_is_told_by_its_code(tmp_path):
    receiver, sender, base, reply = transfers()
    message, _ = receiver.choose(0, np.array([0, 1]))
    with refused("message.malformed"):  # cut: ask again
        sender.keys(0, 2, message[:-1])
    with refused("session.transfers_ended"):  # a cheat, or of another session: begin a new run
        sender.keys(0, 2, bytes([*message[:8], message[8] ^ 1]) + message[9:])
    with refused("crypto.reused"):
        base.receiver(reply)
    with refused("crypto.reused"):
        receiver.choose(0, np.array([1, 1]))
    receiver, sender, *_ = transfers()
    asked = lookup.Lookup.ask(receiver, 0, np.array([1]), 2)
    answer = lookup.answer(sender, 0, asked.message, np.array([[5, 6]], np.uint64))
    with refused("message.unexpected"):
        asked.open(answer[:-1] + bytes([answer[-1] ^ 1]))


def test_silos_that_meet_tell_a_wrong_key_from_an_altered_message():
    north, south = (HandshakeState.fresh(Identity.fresh(name), "run") for name in ("north", "south"))
    hellos = [north.hello, south.hello]
    pins = {hello.name: hello.identity for hello in hellos}
    with refused("session.pins"):
        north.meet(hellos, {**pins, "south": north.identity.public}, "")
    with refused("session.pins"):
        north.meet(hellos, {"north": pins["north"]}, "")
    with refused("session.altered"):
        north.meet([hellos[0], ClientHello(**{**vars(hellos[1]), "nonce": bytes(32)})], pins, "")
    with refused("message.malformed"):
        ClientHello.from_bytes(hellos[0].to_bytes()[:-1], "north")
    session = north.meet(hellos, pins, "")
    with refused("session.altered"):
        session.decrypt("south", bytes(48), "test")


@pytest.mark.parametrize("format_", [0, 2, True])
def test_a_checkpoint_of_another_format_is_refused(format_, tmp_path, monkeypatch):
    with monkeypatch.context() as writing:
        writing.setattr("silodp.runtime.checkpoint.FORMAT", format_)
        content = encode_checkpoint(Checkpoint("run", "print", 1, torch.zeros(2)))
    save_checkpoint(tmp_path / "state", content)
    with refused("checkpoint.format"):
        load_checkpoint(tmp_path / "state", "print")


def test_files_tell_damage_from_another_configuration(tmp_path):
    path = tmp_path / "state"
    with refused("run.nothing_to_resume") as caught:
        load_checkpoint(path, "print")
    assert caught.value.field == "out"
    save_checkpoint(path, encode_checkpoint(Checkpoint("run", "print", 1, torch.zeros(2))))
    with refused("checkpoint.setup"):
        load_checkpoint(path, "other print")
    path.write_bytes(path.read_bytes()[:-1])
    with refused("checkpoint.damaged"):
        load_checkpoint(path, "print")
    store = DirectoryStore(tmp_path / "store")
    store.put("key", b"value")
    (tmp_path / "store" / "key").write_bytes(b"other")
    with refused("checkpoint.damaged"):
        store.get("key")


@pytest.mark.parametrize(
    ("code", "field", "make"),
    [
        ("argument.value", "user_sampling", lambda: check_value("user_sampling", 1.5, Probability)),
        ("argument.value", "units", lambda: Quantizer.from_bounds(Bounds(1.0, 1.0, 1.0, 1.0), 3000)),
        ("argument.grid", "units", lambda: Quantizer.from_bounds(Bounds(1.0, 1.0, 1.0, 1.0), 1 << 20)),
        ("argument.grid", "noise_multiplier", lambda: Quantizer.from_bounds(Bounds(1.0, 1.0, 1e6, 1.0))),
        ("argument.value", "key_bits", lambda: PaillierParameters(2, 3, 4, 1, 1 << 16, 1.0, key_bits=1024)),
        ("argument.value", "users", lambda: PaillierParameters(2, 0, 4, 1, 1 << 16, 1.0)),
        ("crypto.parameters", None, lambda: PaillierParameters(9, 3, 4, 999, 1 << 16, 1.0)),
        ("argument.value", None, lambda: SamplingRatio(3, 2)),
        ("crypto.paillier_modulus", None, lambda: PublicKey.from_bytes(bytes(64), 512)),
    ],
)
def test_a_setting_at_fault_is_named_beside_the_code(code, field, make):
    with refused(code) as caught:
        make()
    assert caught.value.field == field
