"""At a silo: brings what came over NVFlare to the silo's socket. It can open nothing else of the silo."""

import time

from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReturnCode, Shareable, make_reply
from nvflare.apis.signal import Signal

from silodp.deploy import ask_silo

_SILO_SECONDS = 60.0
"""For which a silo that starts, or starts again, is waited for: the next offer of the request may be as far away."""


class CourierExecutor(Executor):
    """Has the silo answer requests, one after the other.

    Args:
        socket: path of the silo's socket.
    """

    def __init__(self, socket: str) -> None:
        super().__init__()
        self._socket = socket

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Have the silo answer one request; where it is not there, the request is offered again."""
        end = time.monotonic() + _SILO_SECONDS
        while not abort_signal.triggered and time.monotonic() < end:
            try:
                reply = ask_silo(self._socket, shareable["body"])
                return Shareable({"body": reply.body, "refused": reply.refused})
            except OSError as error:
                self.log_info(fl_ctx, f"the silo cannot be reached: {error}")
                time.sleep(1)
        return make_reply(ReturnCode.EXECUTION_EXCEPTION)
