"""At a silo: brings what came over NVFlare to the silo's socket. It can open nothing else of the silo."""

from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReturnCode, Shareable, make_reply
from nvflare.apis.signal import Signal

from silodp_deploy import ask_silo

_SILO_SECONDS = 60.0


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
        try:
            reply = ask_silo(self._socket, shareable["body"], wait=_SILO_SECONDS)
        except OSError as error:
            self.log_info(fl_ctx, f"the silo cannot be reached: {error}")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return Shareable({"body": reply.body, "refused": reply.refused})
