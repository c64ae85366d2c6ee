"""Test vectors of docs/messages.md: the program, and a second implementation that is written from the page alone.

`compute_by_page` imports nothing of the program. Both compute the same entries from the same secrets, and are compared
with `tests/vectors.json`, which says what earlier versions sent. After a change of the messages, which needs a new
version on the wire (`silodp_deploy.PROTOCOL`): `python tests/unit/crypto/test_vectors.py > tests/vectors.json`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from itertools import combinations

import numpy as np
import pytest
import rbcl
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from silodp_deploy import PROTOCOL
from support.places import VECTORS

NAMES, RUN, CONSTANTS = ["north", "süd", "west"], "run-1", "ab" * 32
ROUND, ATTEMPT, RELEASE = 3, 1, 0
COUNTS = np.array([[0, 3, 1, 40, 2], [0, 4, 2, 40, 1], [5, 0, 2, 40, 0]])  # of five users in each silo
VALUES = [1, -2, 3, 2**18]  # a silo's noisy integers
ROWS = np.array([[1, -1], [0, 0], [7, 2], [-5, 4], [0, 9]])  # of each user, on the grid
CHOICES = [1, 0, 0, 1, 1]
THETA = [0, 1, 1, 0, 1]
FILL = bytes(range(32))  # what the operating system's randomness returns here
USERS = COUNTS.shape[1]
SERVER_CHOOSES, PRODUCTS = "server chooses among silo 0's entries", "server chooses among a silo's streams"


def secret(*purpose: object) -> bytes:
    """Return 32 bytes that stand for a secret."""
    return hashlib.sha256(repr(purpose).encode()).digest()


def scalar(*purpose: object) -> bytes:
    """Return a secret scalar of ristretto255."""
    return bytes(rbcl.crypto_core_ristretto255_scalar_reduce(secret(*purpose) + secret(1, *purpose)))


DELTA = np.unpackbits(np.frombuffer(secret("delta")[:16], np.uint8))


def show(value: bytes) -> str:
    """Return bytes for the file: all of up to 160, and the hash of more."""
    return (
        value.hex()
        if len(value) <= 160
        else f"{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()}"
    )


# --- the page ---------------------------------------------------------------------------------------------------------


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def encode_parts(*parts: str | bytes) -> bytes:
    out = b""
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode()
        out += (b"b" if isinstance(part, bytes) else b"s") + u64(len(raw)) + raw
    return out


def label(*purpose: object) -> bytes:
    return json.dumps(["silodp", *purpose]).encode()


def derive(key: bytes, *purpose: object) -> bytes:
    return HKDFExpand(SHA256(), 32, label(*purpose)).derive(key)


def extract(material: bytes, salt: bytes, *purpose: object) -> bytes:
    return HKDF(SHA256(), 32, salt, label(*purpose)).derive(material)


def stream(key: bytes, size: int) -> bytes:
    return Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(size))


def prefix_or_stream(key: bytes, size: int) -> bytes:
    return key[:size] if size <= 32 else stream(key, size)


def to_words(data: bytes, width: int) -> list[int]:
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def from_words(words: list[int], width: int) -> bytes:
    return b"".join((word % 256**width).to_bytes(width, "little") for word in words)


def bits_of(data: bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(data, np.uint8))


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def hash_message(kind: str, fields: dict, arrays: dict, blobs: dict) -> str:
    parts = [json.dumps([kind, RUN, ROUND, ATTEMPT, fields], sort_keys=True).encode()]
    for name, (type_, shape, data) in sorted(arrays.items()):
        parts += [json.dumps([name, type_, shape]).encode(), data]
    for name, data in sorted(blobs.items()):
        parts += [json.dumps([name, len(data)]).encode(), data]
    return sha(*parts).hex()


def read_message(data: bytes) -> tuple[dict, dict, dict]:
    """Return the plain part of an encoded message, its arrays and its byte strings, as the page says they lie."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    plain = json.loads(header.pop("__metadata__")["message"])
    names = {"F32": "float32", "BOOL": "bool"}
    arrays, blobs = {}, {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        content = data[8 + length + first : 8 + length + last]
        if name.startswith("blob:"):
            blobs[name[5:]] = content
        else:
            arrays[name] = (names[entry["dtype"]], entry["shape"], content)
    return plain, arrays, blobs


def page_session() -> dict:
    version = "silodp secure aggregation 2"
    hellos, ephemerals, parts = [], {}, {}
    for name in NAMES:
        long_term = Ed25519PrivateKey.from_private_bytes(secret("identity", name))
        ephemerals[name] = X25519PrivateKey.from_private_bytes(secret("ephemeral", name))
        six = [
            long_term.public_key().public_bytes_raw(),
            ephemerals[name].public_key().public_bytes_raw(),
            secret("nonce", name),
            sha(encode_parts(version, "contribution", secret("contribution", name))),
        ]
        six.append(long_term.sign(encode_parts(version, "hello", RUN, name, *six)))
        parts[name] = six
        hellos.append(json.dumps([name, *(part.hex() for part in six)]).encode())
    listed = [part for name in NAMES for part in (name, *parts[name])]
    transcript = sha(encode_parts(version, "transcript", RUN, CONSTANTS, *listed))
    first = NAMES[0]
    pairs = {
        peer: extract(ephemerals[first].exchange(ephemerals[peer].public_key()), transcript, "pair")
        for peer in NAMES[1:]
    }
    seen = Ed25519PrivateKey.from_private_bytes(secret("identity", first)).sign(
        encode_parts(version, "seen", transcript)
    )
    key = derive(pairs[NAMES[1]], "to", NAMES[1], "contribution")
    sealed = FILL[:12] + ChaCha20Poly1305(key).encrypt(FILL[:12], secret("contribution", first), None)
    contributions = b"".join(secret("contribution", name) for name in NAMES)
    group = extract(contributions, transcript, "group secret")
    return {
        "hellos": hellos, "transcript": transcript, "pairs": pairs, "seen": seen, "sealed": sealed, "group": group
    }  # fmt: skip


def page_mask(session: dict, bits: int, common: str, digest: str) -> bytes:
    width = 4 if bits <= 32 else 8
    use = [ROUND, ATTEMPT, RELEASE, sha(json.dumps(NAMES).encode()).hex(), "update", common]
    total = list(VALUES)
    for peer in NAMES[1:]:  # the first silo adds all of its masks
        mask = to_words(stream(derive(session["pairs"][peer], "mask", *use), width * len(VALUES)), width)
        total = [a + b for a, b in zip(total, mask, strict=True)]
    key = derive(secret("seal", NAMES[0]), "seal", session["transcript"].hex(), *use, digest)
    seal = to_words(stream(key, width * len(VALUES)), width)
    return from_words([(a + b) % 2**bits for a, b in zip(total, seal, strict=True)], width)


class PageTransfers:
    """Base transfers of one purpose, with what both sides get."""

    def __init__(self, transcript: bytes, purpose: str) -> None:
        self.domain = sha(json.dumps(["silodp transfers", transcript.hex(), purpose]).encode())
        secret_scalar = scalar("a", purpose)
        self.offer = bytes(rbcl.crypto_scalarmult_ristretto255_base(secret_scalar))
        step = rbcl.crypto_scalarmult_ristretto255(secret_scalar, self.offer)
        points, self.chosen, self.both = [], [], []
        for i in range(128):
            own = scalar("b", purpose, i)
            point = bytes(rbcl.crypto_scalarmult_ristretto255_base(own))
            if DELTA[i]:
                point = bytes(rbcl.crypto_core_ristretto255_add(point, self.offer))
            zero = rbcl.crypto_scalarmult_ristretto255(secret_scalar, point)
            one = rbcl.crypto_core_ristretto255_sub(zero, step)
            points.append(point)
            self.chosen.append(self._key(i, point, rbcl.crypto_scalarmult_ristretto255(own, self.offer)))
            self.both.append((self._key(i, point, zero), self._key(i, point, one)))
        self.reply = b"".join(points)

    def _key(self, i: int, point: bytes, shared: bytes) -> bytes:
        return sha(b"base\0", self.domain, u64(i), self.offer, point, bytes(shared))

    def choose(
        self, counter: int, choices: list[int]
    ) -> tuple[bytes, list[bytes], list[tuple[bytes, bytes]]]:
        """Return the message, the chosen keys, and both keys of each transfer as the sender finds them."""
        count = len(choices)
        size = (count + 7) // 8 + 20
        filling = np.frombuffer(stream(FILL, 8 * size - count), np.uint8) & 1
        x = np.concatenate([np.array(choices, np.uint8), filling])
        columns, difference = [], b""
        for zero, one in self.both:
            column = stream(derive(zero, "transfer column", counter), size)
            other = stream(derive(one, "transfer column", counter), size)
            columns.append(bits_of(column))
            difference += xor(xor(column, other), np.packbits(x).tobytes())
        seed = sha(b"check\0", self.domain, u64(counter), u64(count), difference)
        chi = bits_of(stream(seed, 20 * (8 * size - 160))).reshape(-1, 160).astype(int)
        proof = b""
        for vector in (x, *columns):
            folded = (vector[:-160].astype(int) @ chi) % 2 ^ vector[-160:]
            proof += np.packbits(folded.astype(np.uint8)).tobytes()
        rows = [np.packbits([column[j] for column in columns]).tobytes() for j in range(count)]
        chosen = [self._hash_row(counter, j, row) for j, row in enumerate(rows)]
        own = []
        for i, key in enumerate(self.chosen):
            part = difference[i * size : (i + 1) * size] if DELTA[i] else bytes(size)
            own.append(bits_of(xor(stream(derive(key, "transfer column", counter), size), part)))
        sent = [np.packbits([column[j] for column in own]).tobytes() for j in range(count)]
        delta = np.packbits(DELTA).tobytes()
        both = [
            (self._hash_row(counter, j, row), self._hash_row(counter, j, xor(row, delta)))
            for j, row in enumerate(sent)
        ]
        return u64(counter) + difference + proof, chosen, both

    def _hash_row(self, counter: int, j: int, row: bytes) -> bytes:
        return sha(b"row\0", self.domain, u64(counter), u64(j), row)

    def look_up(self, counter: int, indices: list[int], tables: list[list[bytes]]) -> tuple[bytes, bytes]:
        """Return request and answer."""
        entries = len(tables[0])
        width, levels = len(tables[0][0]), (entries - 1).bit_length()
        choices = [index >> i & 1 for index in indices for i in range(levels)]
        request, _, keys = self.choose(counter, choices)
        sent = b""
        for u, table in enumerate(tables):
            for x, entry in enumerate(table):
                for i in range(levels):
                    key = keys[u * levels + i][x >> i & 1]
                    place = (x >> (i + 1) << i) | (x & ((1 << i) - 1))
                    pads = prefix_or_stream(key, 2 ** (levels - 1) * width)
                    entry = xor(entry, pads[place * width : (place + 1) * width])
                sent += entry
        return request, sha(b"answer\0", self.domain, sha(request), sent) + sent


def page_class(count: int) -> int:
    limits = [0, 1, 2, 4, 8, 16, 32]
    return sum(count > limit for limit in limits)


def page_primary_silos(session: dict, transfers: PageTransfers) -> dict[str, bytes]:
    def shared(*purpose: object) -> list[int]:
        key = derive(session["group"], "primary silos", session["transcript"].hex(), *purpose)
        return to_words(stream(key, 8 * USERS), 8)

    silos, wins = len(NAMES), 4
    masks = [[word % 8 for word in shared("class masks", s)] for s in range(silos)]
    masked = [
        [(page_class(int(n)) + m) % 8 for n, m in zip(*both, strict=True)]
        for both in zip(COUNTS, masks, strict=True)
    ]
    key = derive(bytes(32), "order of primary silos", silos, USERS)
    words = to_words(stream(key, 8 * silos * USERS), 8)
    order = [[words[s * USERS + u] // 64 * 64 + s for u in range(USERS)] for s in range(silos)]
    pairs = list(combinations(range(silos), 2))
    r = {(i, j): [word % wins for word in shared("comparisons", i, j)] for i, j in pairs}
    tables, asked, won = [], [], [[0] * USERS for _ in range(silos)]
    for i, j in pairs:
        for u in range(USERS):
            table = []
            for x in range(8):
                for y in range(8):
                    one, other = (x - masks[i][u]) % 8, (y - masks[j][u]) % 8
                    wins_i = one > other or (one == other and order[i][u] > order[j][u])
                    table.append(bytes([(wins_i - r[i, j][u]) % wins]))
            tables.append(table)
            asked.append(8 * masked[i][u] + masked[j][u])
            opened = table[asked[-1]][0]
            won[i][u] += opened
            won[j][u] += 1 - opened
    comparisons = transfers.look_up(0, asked, tables)
    theta = shared("shares")
    own = [[0] * USERS for _ in range(silos)]
    for (i, j), masks_r in r.items():
        for u in range(USERS):
            own[i][u] += masks_r[u]
            own[j][u] -= masks_r[u]
    tables, primary = [], []
    for s in range(silos):
        for u in range(USERS):
            bit = theta[u] >> s & 1
            table = [bytes([((a + own[s][u]) % wins == silos - 1) ^ bit]) for a in range(wins)]
            tables.append(table)
            primary.append(table[won[s][u] % wins][0] ^ bit)
    answered = transfers.look_up(1, [won[s][u] % wins for s in range(silos) for u in range(USERS)], tables)
    return {
        "masked classes": bytes(masked[0]),
        "order": from_words([word for row in order for word in row], 8),
        "comparisons request": comparisons[0],
        "comparisons answer": comparisons[1],
        "primary silos request": answered[0],
        "primary silos answer": answered[1],
        "primary silos": bytes(primary),
    }


def page_products(transfers: PageTransfers, digest: str) -> dict[str, bytes]:
    size = 4 * ROWS.shape[1]
    message, chosen, both = transfers.choose(7, CHOICES)
    prefix = b"request\0" + bytes.fromhex(digest)
    chosen = [sha(prefix + key) for key in chosen]
    both = [(sha(prefix + zero), sha(prefix + one)) for zero, one in both]
    corrections, share, received = b"", [0] * ROWS.shape[1], [0] * ROWS.shape[1]
    for u, (row, theta, (zero, one)) in enumerate(zip(ROWS.tolist(), THETA, both, strict=True)):
        first, second = (to_words(prefix_or_stream(key, size), 4) for key in (zero, one))
        sent = [(1 - 2 * theta) * d + a - b for d, a, b in zip(row, first, second, strict=True)]
        corrections += from_words(sent, 4)
        share = [s + theta * d - a for s, d, a in zip(share, row, first, strict=True)]
        own = to_words(prefix_or_stream(chosen[u], size), 4)
        received = [t + k + CHOICES[u] * c for t, k, c in zip(received, own, sent, strict=True)]
    total = from_words([a + b for a, b in zip(share, received, strict=True)], 4)
    return {"choices": message, "corrections": corrections, "share": from_words(share, 4), "sum": total}


def compute_by_page(wire: bytes) -> dict[str, str]:
    """Return all entries, from docs/messages.md alone; `wire` is a signed message, which is read and checked."""
    plain, arrays, blobs = read_message(wire[72:])
    digest = hash_message(plain["kind"], plain["fields"], arrays, blobs)
    common = hash_message(plain["kind"], plain["fields"], arrays, {})
    text = f"silodp message to {sha('süd'.encode()).hex()} about {sha(b'').hex()}: {sha(wire[72:]).hex()}"
    signature = Ed25519PrivateKey.from_private_bytes(secret("server")).sign(text.encode())
    session = page_session()
    transfers = PageTransfers(session["transcript"], SERVER_CHOOSES)
    products = PageTransfers(session["transcript"], PRODUCTS)
    tables = [[bytes([8 * u + x] * 9) for x in range(5)] for u in range(3)]
    found = {
        "message": wire[:8] + signature + wire[72:],
        "message digest": bytes.fromhex(digest),
        "hello": session["hellos"][1],
        "transcript": session["transcript"],
        "transcript signature": session["seen"],
        "sealed contribution": session["sealed"],
        "group secret": session["group"],
        **{f"masked, 2^{bits}": page_mask(session, bits, common, digest) for bits in (20, 32, 64)},
        "transfers offer": transfers.offer,
        "transfers reply": transfers.reply,
        "lookup": transfers.look_up(9, [4, 0, 3], tables)[1],
        **page_primary_silos(session, transfers),
        **page_products(products, digest),
    }
    return {name: show(value) for name, value in found.items()}


# --- the program ------------------------------------------------------------------------------------------------------


def write_message() -> bytes:
    """Return a signed update of the program."""
    from silodp.crypto.keys import Identity
    from silodp.wire.messages import Message
    from silodp.wire.transport import sign

    arrays = {"params": np.array([0.5, -1.0], "<f4"), "silos": np.array([[True], [False]])}
    fields = {"session": "cd" * 32, "release": RELEASE, "roster": NAMES}
    message = Message("update", RUN, ROUND, ATTEMPT, fields, arrays, {"choices": b"\x00\x01\x02"})
    return sign(message, Identity("server", secret("server")), "süd")


def compute_by_program() -> dict[str, str]:
    """Return all entries as the program computes them."""
    from silodp.aggregators.base import common_digest
    from silodp.crypto import keys
    from silodp.crypto.secure_aggregation import RoundAttempt, WordGroup, apply_masks
    from silodp.wire.transport import SIGNED_BYTES, verify
    from silodp_private import select
    from silodp_private.crypto import lookup, products
    from silodp_private.crypto.oblivious_transfer import BaseTransfers, TransferSender
    from silodp_private.crypto.primary_silos import PrimarySiloParameters
    from silodp_private.crypto.shares import SERVER_CHOOSES as CHOOSES
    from silodp_private.crypto.shares import FirstSilo, ShareServer, SiloShares

    wire = write_message()
    public = keys.Identity("server", secret("server")).public
    request = verify(wire, public, "the server", "süd")
    assert len(wire[:SIGNED_BYTES]) == 72
    openings = {
        name: keys.HandshakeState(
            keys.Identity(name, secret("identity", name)),
            RUN,
            *(secret(what, name) for what in ("ephemeral", "nonce", "seal", "contribution")),
        )
        for name in NAMES
    }
    hellos = [openings[name].hello for name in NAMES]
    pins = {name: openings[name].identity.public for name in NAMES}
    sessions = {name: openings[name].meet(hellos, pins, CONSTANTS) for name in NAMES}
    first, transcript = sessions[NAMES[0]], sessions[NAMES[0]].transcript
    sealed = {name: sessions[name].seal_contributions() for name in NAMES}
    group = first.group_secret({name: sealed[name][NAMES[0]] for name in NAMES[1:]})
    attempt = RoundAttempt(ROUND, ATTEMPT, RELEASE, tuple(NAMES), "update", common_digest(request))
    masked = {}
    for bits in (20, 32, 64):
        ring = WordGroup(len(VALUES), bits)
        value = apply_masks(ring.from_integers(np.array(VALUES)), ring, first, attempt, request.digest())
        masked[f"masked, 2^{bits}"] = value.tobytes()

    def begin(purpose: str):
        """Return both ends of transfers, from the offer and the reply of the page's implementation."""
        page = PageTransfers(transcript, purpose)
        base = BaseTransfers.unpack(page.domain + scalar("a", purpose))
        seeds = np.frombuffer(b"".join(page.chosen), np.uint8).reshape(128, 32)
        return base.offer, base.receiver(page.reply), TransferSender(page.domain, DELTA, seeds), page.reply

    offer, receiver, sender, reply = begin(CHOOSES)
    parameters = PrimarySiloParameters(transcript, USERS, len(NAMES))
    silo = SiloShares(parameters, group)
    server, zero = ShareServer(parameters, receiver), FirstSilo(silo, sender)
    classes = np.stack([parameters.mask_classes(silo, s, COUNTS[s]) for s in range(len(NAMES))])
    pairs = parameters.ask_comparisons(server, classes)
    pairs_answer = parameters.offer_comparisons(zero, pairs.message)
    winners = parameters.ask_primary_silos(server, pairs.entries(pairs_answer, 1))
    primary_answer = parameters.offer_primary_silos(zero, winners.message)
    primary = parameters.unpack(parameters.pack(winners.entries(primary_answer, 1)) ^ silo.shares())
    assert (primary == parameters.find_primary_silos(COUNTS)).all()
    tables = np.array([[[8 * u + x] * 9 for x in range(5)] for u in range(3)], np.uint8)
    asked = lookup.Lookup.ask(receiver, 9, np.array([4, 0, 3]), 5)
    answered = lookup.answer(sender, 9, asked.message, tables)
    assert (asked.entries(answered, 9) == tables[[0, 1, 2], [4, 0, 3]]).all()

    _, receiver, sender, _ = begin(select.PRODUCTS)
    ring = WordGroup(ROWS.shape[1], 32)
    message, chosen = receiver.choose(7, np.array(CHOICES))
    rows = products.MaskedRows.begin(
        products.bind_keys(sender.keys(7, USERS, message), request.digest()), ring
    )
    words, own = ring.from_integers(ROWS), np.array(THETA, bool)[:, None]
    rows.add(np.arange(USERS), np.where(own, -words, words))
    share = rows.share + np.where(own, words, 0).sum(axis=0, dtype=ring.dtype)
    sent = rows.corrections.tobytes()
    chosen = products.bind_keys(chosen, request.digest())
    received = products.add_products(chosen, np.array(CHOICES, bool), sent, ring)
    counted = np.array(CHOICES) ^ np.array(THETA)
    assert (ring.center(share + received) == counted @ ROWS).all()
    found = {
        "message": wire,
        "message digest": bytes.fromhex(request.digest()),
        "hello": hellos[1].to_bytes(),
        "transcript": transcript,
        "transcript signature": first.signature(),
        "sealed contribution": sealed[NAMES[0]][NAMES[1]],
        "group secret": group,
        **masked,
        "transfers offer": offer,
        "transfers reply": reply,
        "lookup": answered,
        "masked classes": classes[0].tobytes(),
        "order": parameters.order().tobytes(),
        "comparisons request": pairs.message,
        "comparisons answer": pairs_answer,
        "primary silos request": winners.message,
        "primary silos answer": primary_answer,
        "primary silos": primary.astype(np.uint8).tobytes(),
        "choices": message,
        "corrections": sent,
        "share": share.tobytes(),
        "sum": (share + received).tobytes(),
    }
    return {name: show(value) for name, value in found.items()}


@pytest.fixture(autouse=True)
def _known_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_bytes", lambda size: FILL[:size])


@pytest.fixture(scope="module")
def vectors() -> dict[str, str]:
    return json.loads(VECTORS.read_text())


def test_the_program_sends_the_bytes_of_the_vectors(vectors):
    assert compute_by_program() == vectors


def test_a_second_implementation_of_the_page_sends_them_too(vectors):
    assert compute_by_page(write_message()) == vectors


def test_other_bytes_are_another_protocol() -> None:
    """Parties of two versions run together if both have the same number, whatever else changed."""
    digest = hashlib.sha256(VECTORS.read_bytes()).hexdigest()
    of_protocol = {1: "1244f18d8f21066f384048db8aa48f8aab6e46051d95b65101ffbd44ac73f6bd"}
    assert of_protocol[PROTOCOL] == digest, "messages have other bytes: raise silodp_deploy.PROTOCOL"


if __name__ == "__main__":
    secrets.token_bytes = lambda size=32: FILL[:size]
    print(json.dumps(compute_by_program(), indent=1))
