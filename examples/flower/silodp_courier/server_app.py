"""At the server: takes requests at its socket, sends them to SuperNodes, and gives the answers back.

Flower loses a reply now and then, and never sends it again. The silodp server offers the request again after its
`--repeat`, so nothing is repeated here.
"""

import time
from logging import INFO, WARNING

import httpx
from flwr.app import Context, Message
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from silodp_courier.parcels import unwrap, wrap
from silodp_deploy import Reply, Request, give_reply, take_request

app = ServerApp()
QUERY_SECONDS, ANSWER_SECONDS, PAUSE_SECONDS = 60.0, 3600.0, 0.2
_APART_SECONDS = 20.0
"""Between two copies of a request: a SuperNode answers one after the other, and copies sent faster would pile up.

A SuperNode that answered with an error is asked for its silo again after the same time.
"""
_MOST_CODE = 100
"""Characters of the code of a refusal that are handed on."""


class Courier:
    """What is under way; all of it may be lost at any time.

    Args:
        grid: reaches the SuperNodes.
        socket: path of the silodp server's socket.
    """

    def __init__(self, grid: Grid, socket: str) -> None:
        self._grid, self._socket = grid, socket
        self._nodes: dict[str, int] = {}  # by the name of the silo
        self._asked: dict[int, float] = {}  # when a node was asked for its silo
        self._held: list[Request] = []  # for silos whose node is not known yet
        self._sent: dict[str, tuple[str, float, int]] = {}  # message → exchange, end, node

    def carry(self) -> None:
        """Take requests, send them, and give back what has come."""
        request = take_request(self._socket, wait=PAUSE_SECONDS)
        while request is not None:
            self._held = [one for one in self._held if one.exchange != request.exchange] + [request]
            request = take_request(self._socket, wait=0.0)
        if any(one.silo not in self._nodes for one in self._held):
            self._find_nodes()
        ready = [
            (self._nodes[one.silo], one.exchange, one.body) for one in self._held if one.silo in self._nodes
        ]
        self._held = [one for one in self._held if one.silo not in self._nodes]
        recent = self._find_recent()
        # What was sent a moment ago is dropped: the silodp server will offer it again.
        fresh = [one for one in ready if (one[1], one[0]) not in recent]
        self._send("train.answer", fresh, ANSWER_SECONDS)
        self._receive()

    def _find_recent(self) -> set[tuple[str, int]]:
        """Return the exchanges, and their nodes, that were sent a moment ago and have not come back."""
        end = time.monotonic() + ANSWER_SECONDS - _APART_SECONDS
        return {(exchange, node) for exchange, until, node in self._sent.values() if exchange and until > end}

    def _find_nodes(self) -> None:
        """Ask every node for its silo, and again after a while if it has not answered."""
        now = time.monotonic()
        unknown = [node for node in self._grid.get_node_ids() if node not in self._nodes.values()]
        asked = [node for node in unknown if now > self._asked.get(node, 0.0)]
        self._asked.update(dict.fromkeys(asked, now + QUERY_SECONDS))
        self._send("query.silo", [(node, "", b"") for node in asked], QUERY_SECONDS)

    def _send(self, kind: str, parcels: list[tuple[int, str, bytes]], seconds: float) -> None:
        """Send the bytes of every node, exchange and body, all in one call."""
        if not parcels:
            return
        messages = [
            Message(wrap(body), dst_node_id=node, message_type=kind, ttl=seconds) for node, _, body in parcels
        ]
        # Flower returns None for a message that it did not take, and no list where all together were too long.
        for id_, (node, exchange, _) in zip(self._grid.push_messages(messages), parcels, strict=False):
            if id_ is not None:
                self._sent[id_] = exchange, time.monotonic() + seconds, node

    def _receive(self) -> None:
        now = time.monotonic()
        self._sent = {id_: sent for id_, sent in self._sent.items() if sent[1] > now}
        for reply in self._grid.pull_messages(list(self._sent)) if self._sent else ():
            exchange, _, node = self._sent.pop(reply.metadata.reply_to_message_id, ("", 0.0, 0))
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                body, texts = unwrap(reply.content)
            except ValueError as error:
                log(INFO, "node %s: %s", node, error)
                # Perhaps another SuperNode stands beside this silo by now.
                self._nodes = {silo: known for silo, known in self._nodes.items() if known != node}
                self._asked[node] = now if exchange else now + _APART_SECONDS
                continue
            if exchange and "refused" in texts:
                try:
                    give_reply(self._socket, exchange, Reply(body, texts["refused"][:_MOST_CODE]))
                except OSError as error:  # what others sent is given all the same
                    log(INFO, "node %s: its reply was not taken: %s", node, error)
            elif not exchange and "silo" in texts:
                log(INFO, "node %s stands beside silo '%s'", node, texts["silo"])
                if self._nodes.get(texts["silo"], node) != node:
                    known = self._nodes[texts["silo"]]
                    text = "node %s said so before: unless it was restarted, one of both has a wrong --node-config"
                    log(WARNING, text, known)
                self._nodes[texts["silo"]] = node


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry messages until there has been no silodp server for a while."""
    courier = Courier(grid, str(context.run_config["socket"]))
    last = time.monotonic()
    while time.monotonic() < last + float(context.run_config["grace"]):
        try:
            courier.carry()
            last = time.monotonic()
        except (OSError, httpx.HTTPError) as error:
            log(INFO, "the silodp server or the SuperLink cannot be reached: %s", error)
            time.sleep(1)
