import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from silodp.crypto.keys import Identity
from silodp.errors import SilodpError
from silodp.methods import UldpSgd
from silodp.runtime.train import train
from silodp.wire.files import append_durably, write_durably, write_sealed
from silodp.wire.messages import Message
from silodp.wire.schemas import Array
from silodp.wire.store import DirectoryStore, MemoryStore
from silodp.wire.transport import InProcess, Traffic, sign, verify
from support.oracles import logistic_task, small_federation
from support.refusals import refused

MESSAGE = Message(
    "update",
    "run1",
    3,
    1,
    fields={"note": "ü", "numbers": [1, 2.5, None]},
    arrays={"share": np.arange(6.0).reshape(2, 3), "sample": np.array([True, False]), "none": np.empty(0)},
    blobs={"seed": b"\x00\xff"},
)


def same(a: Message, b: Message) -> bool:
    return (
        (a.kind, a.run, a.round, a.attempt, a.fields, a.blobs)
        == (b.kind, b.run, b.round, b.attempt, b.fields, b.blobs)
        and a.arrays.keys() == b.arrays.keys()
        and all(
            np.array_equal(a.arrays[k], b.arrays[k]) and a.arrays[k].dtype == b.arrays[k].dtype
            for k in a.arrays
        )
    )


def test_a_message_survives_the_wire():
    decoded = Message.decode(MESSAGE.encode())
    assert same(decoded, MESSAGE)
    assert decoded.digest() == MESSAGE.digest()


def test_an_array_is_no_byte_string_for_its_name():
    message = Message("update", "run1", arrays={"the blob: of it": np.arange(3.0)}, blobs={"of it": b"1"})
    assert same(Message.decode(message.encode()), message)


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_bytes_that_are_no_message_are_one_sentence(cut):
    with pytest.raises(SilodpError, match="cannot be read"):
        Message.decode(MESSAGE.encode()[:cut])


OTHERWISE = [
    *(
        (name, value)
        for name in ("round", "attempt")
        for value in (False, True, 0.0, 1.0, "0", "", None, [0], -1)
    ),
    *(
        (name, value)
        for name in ("kind", "run")
        for value in (None, 0, ["update"], "update/0", "update\n12:00 INFO", "\x1b[2Kupdate")
    ),
    *(("fields", value) for value in ([], 5, 0.5, True, None, "", "fields", [["roster", []]])),
]
"""What a message has otherwise: False is 0 for whoever calculates, and another name for whoever keeps answers. A log
shows kind and run, and a terminal obeys what steers it. Whoever may sign can sign any JSON as the fields."""


@pytest.mark.parametrize(("name", "value"), OTHERWISE)
def test_what_names_a_message_is_of_one_kind(name, value):
    with pytest.raises(SilodpError, match=f"a message has {name} = "):
        replace(MESSAGE, **{name: value})
    forged = replace(MESSAGE)
    object.__setattr__(forged, name, value)
    with pytest.raises(SilodpError, match="cannot be read"):
        Message.decode(forged.encode())


def test_a_truth_value_is_a_byte_of_0_or_1():
    """Other bytes are true as well, so that one request would have several digests, and noise under each."""
    due = Array("bool", (3,))
    assert due.find_problem(np.array([True, False, True])) is None
    for byte in (2, 255):
        assert due.find_problem(np.array([1, 0, byte], np.uint8).view(bool)) is not None


def test_no_reader_meets_the_names_that_only_the_encoding_uses():
    data = MESSAGE.encode()
    for old, new in ((b"blob:seed", b'blob:see"'), (b'"data_offsets":[0', b'"data_offsets":[9')):
        assert old in data
        with pytest.raises(SilodpError, match="cannot be read") as caught:
            Message.decode(data.replace(old, new))
        assert "blob" not in str(caught.value)
        assert "header" not in str(caught.value)


def test_digests_tell_requests_apart():
    others = [
        Message("update", "run1", 3, 1, arrays={"params": np.zeros(3)}),
        Message("update", "run1", 3, 1, arrays={"params": np.zeros(3, dtype=np.float32)}),
        Message("update", "run1", 3, 1, arrays={"params": np.zeros((3, 1))}),
        Message("update", "run1", 3, 1, arrays={"other": np.zeros(3)}),
        Message("update", "run1", 3, 2, arrays={"params": np.zeros(3)}),
        Message("update", "run1", 3, 1, fields={"a": 1}, arrays={"params": np.zeros(3)}),
        Message("update", "run1", 3, 1, arrays={"params": np.zeros(3)}, blobs={"x": b"y"}),
    ]
    assert len({message.digest() for message in others}) == len(others)


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), lambda path: DirectoryStore(path / "store")])
def test_a_store_keeps_bytes_under_names(make, tmp_path):
    store = make(tmp_path)
    assert store.get("a/b") is None
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    store.put("../escape", b"three")
    assert store.get("a/b") == b"two"
    assert sorted(store.names()) == ["../escape", "a/b"]
    store.drop("a/b")
    store.drop("a/b")
    assert store.get("a/b") is None
    assert [path.name for path in tmp_path.iterdir()] in ([], ["store"]), "a key is a name, never a path"


def test_a_damaged_file_is_named(tmp_path):
    store = DirectoryStore(tmp_path)
    store.put("key", b"value")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(SilodpError, match="damaged"):
        store.get("key")


def test_a_write_that_was_cut_off_is_not_there(tmp_path):
    store = DirectoryStore(tmp_path)
    (tmp_path / "key.partial").write_bytes(b"half")
    assert store.names() == []
    assert store.get("key") is None


def test_a_write_reaches_the_disk_before_it_is_named(tmp_path, monkeypatch):
    """Durability cannot be seen from inside; that fsync comes before the rename can."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (events.append("rename"), replace(self, target))[1]
    )
    write_durably(tmp_path / "file", b"data")
    assert events == ["fsync", "rename", "fsync"]
    events.clear()
    append_durably(tmp_path / "file", b"line")  # a line of the audit log or of the metrics
    assert events == ["fsync"]


@pytest.mark.parametrize("write", [write_durably, write_sealed])
def test_a_write_that_fails_leaves_what_was_there(write, tmp_path, monkeypatch):
    """A full disk, or a crash, while a ledger or a key is replaced: the earlier one is the one that counts."""
    path = tmp_path / "file"
    write(path, b"old")
    before = path.read_bytes()

    def fails(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        write(path, b"new and longer")
    assert path.read_bytes() == before


class Echo:
    def receive(self, data: bytes) -> bytes:
        if data == b"refuse":
            raise SilodpError("not today", code="gate.past")
        return data


def test_failures_are_data():
    transport = InProcess({"a": Echo(), "b": Echo()})
    answers, failures = transport.ask({"a": b"bytes", "b": b"refuse", "c": b"bytes"})
    assert answers == {"a": b"bytes"}
    assert (failures["b"].kind, failures["b"].reason, failures["b"].code) == (
        "refused",
        "not today",
        "gate.past",
    )
    assert (failures["c"].kind, failures["c"].code) == ("refused", "message.recipient")
    assert transport.traffic == Traffic(5, 5)


def test_what_a_party_keeps_is_for_its_own_account_only(tmp_path):
    DirectoryStore(tmp_path / "checkpoint" / "silos" / "000").put("identity", b"seed")
    assert (tmp_path / "checkpoint" / "silos" / "000").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["checkpoint", "checkpoint/silos/000", "checkpoint/silo_ledgers"])
def test_a_folder_for_secrets_that_others_may_read_is_refused(place, tmp_path):
    """An existing one was taken as it was, with the identity's seed in it."""
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / "checkpoint").chmod(0o700)
    (tmp_path / place).chmod(0o755)
    with refused("store.permissions"):
        train(small_federation(), logistic_task(), UldpSgd(5.0, 0.5), rounds=1, out=tmp_path)
    assert not list((tmp_path / place).rglob("identity"))


def test_what_a_run_keeps_to_itself_is_for_its_owner_alone(tmp_path):
    train(small_federation(), logistic_task(), UldpSgd(5.0, 0.5), rounds=1, out=tmp_path)
    secrets = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert len(secrets) > 10
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044, "what may be shared is not hidden"


def header(text: bytes, claimed: int | None = None) -> bytes:
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text


def in_metadata(message: bytes) -> bytes:
    """As the encoding has it: JSON in JSON."""
    return header(json.dumps({"__metadata__": {"message": message.decode()}}).encode())


TOO_MUCH = {
    "nested header": header(b"[" * 3000),
    "nested metadata": in_metadata(b"[" * 3000),
    "nested objects": in_metadata(b'{"a":' * 3000),
    "nested fields": in_metadata(
        b'{"kind": "update", "run": "r", "round": 0, "attempt": 0, "fields": {"a": [[[[[[]]]]]]}}'
    ),
    "a header of a terabyte": header(b"{}", 2**40),
    "a length beyond 64 bits signed": header(b"{}", 2**63 + 5),
    "no metadata": header(b"{}"),
    "metadata that is a number": header(b'{"__metadata__": 5}'),
    "a message that is a list": in_metadata(b"[]"),
    "another header": in_metadata(b'{"kind": "update"}'),
    "a round of 400 digits": in_metadata(
        b'{"kind": "update", "run": "r", "attempt": 0, "fields": {}, "round": ' + b"9" * 400 + b"}"
    ),
    "a run without an encoding": in_metadata(
        b'{"kind": "update", "run": "\\ud800", "round": 0, "attempt": 0, "fields": {}}'
    ),
    "a header of 16 MiB": Message("update", "r", fields={"a": "x" * (1 << 24)}).encode(),
    "too many entries": Message("update", "r", blobs={str(i): b"" for i in range(1 << 15)}).encode(),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_bytes_that_ask_too_much_of_the_parser_are_refused(name):
    """3,134 bytes of brackets were a RecursionError, before any signature was checked."""
    with refused("message.malformed"):
        Message.decode(TOO_MUCH[name])


def test_nothing_is_parsed_before_its_signature_was_checked(monkeypatch):
    read: list[int] = []
    decode = Message.decode
    monkeypatch.setattr(Message, "decode", lambda data: read.append(len(data)) or decode(data))
    sender, other = Identity.fresh("a"), Identity.fresh("b")
    data = sign(MESSAGE, sender, "silo0")
    for lie in (data[:-1], data + b"x", bytes(len(data)), b"", data[:72], sign(MESSAGE, other, "silo0")):
        with refused("message.signature"):
            verify(lie, sender.public, "a", "silo0")
    with refused("message.too_large"):
        verify(data, sender.public, "a", "silo0", max_bytes=10)
    assert read == []
    verify(data, sender.public, "a", "silo0")
    assert len(read) == 1


def test_a_message_is_encoded_once():
    """An answer is stored, and then signed: to encode a large one takes as long as its masks."""
    message = Message("update", "run", arrays={"sum": np.zeros(3)})
    assert message.encode() is message.encode()
