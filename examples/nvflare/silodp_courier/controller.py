"""At the server: takes requests at its socket, sends each to the client with the silo's name, gives the answers back.

NVFlare keeps a task until the client has answered it, so a request that is offered again is not sent again. But a
client that was started again is not in the jobs that ran before, and NVFlare 2.9 does not notice it: only another job
reaches it. So the controller asks the client of such a request for a sign of life, and ends the job where none comes.
"""

import time

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReservedTopic
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReturnCode, Shareable
from nvflare.apis.signal import Signal

from silodp_deploy import Reply, Request, give_reply, take_request

TASK = "answer"
_ANSWER_SECONDS, _ALIVE_SECONDS, _PAUSE_SECONDS = 3600, 20.0, 0.2
_MOST_CODE = 100
"""Characters of the code of a refusal that are handed on."""


class CourierController(Controller):
    """Carries messages until there has been no silodp server for a while.

    Args:
        socket: path of the silodp server's socket.
        grace: seconds without a silodp server after which the job ends.
    """

    def __init__(self, socket: str, grace: float = 300.0) -> None:
        super().__init__()
        self._socket, self._grace = socket, grace
        self._sent: set[str] = set()  # exchanges whose task is not done

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing; NVFlare asks for this function."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Withdraw what nobody has answered; the silodp server will offer it to the next job."""
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Take requests and send them; answers are given back in the thread in which NVFlare receives them."""
        last = time.monotonic()
        while not abort_signal.triggered and time.monotonic() < last + self._grace:
            try:
                request = take_request(self._socket, wait=_PAUSE_SECONDS)
            except OSError as error:
                self.log_info(fl_ctx, f"the silodp server cannot be reached: {error}")
                time.sleep(1)
                continue
            last = time.monotonic()
            if request is None:
                continue
            if request.exchange not in self._sent:
                self._send(request, fl_ctx)
            elif not self._is_alive(request.silo, fl_ctx):
                text = f"the client '{request.silo}' is not in this job, or cannot be reached: submit the job again"
                self.system_panic(text, fl_ctx)
                return

    def _send(self, request: Request, fl_ctx: FLContext) -> None:
        self._sent.add(request.exchange)
        task = Task(
            TASK,
            Shareable({"body": request.body}),
            props={"exchange": request.exchange},
            timeout=_ANSWER_SECONDS,
            result_received_cb=self._give,
            task_done_cb=self._forget,
        )
        self.send(task, fl_ctx, targets=[request.silo])

    def _is_alive(self, client: str, fl_ctx: FLContext) -> bool:
        """Return whether the client's process for this job answers, which it does while a silo computes, too."""
        replies = fl_ctx.get_engine().send_aux_request(
            [client], ReservedTopic.SYNC_RUNNER, Shareable(), _ALIVE_SECONDS, fl_ctx, optional=True
        )
        reply = (replies or {}).get(client)
        return reply is not None and reply.get_return_code() == ReturnCode.OK

    def _give(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Give a reply to the server. A client may send anything, so nothing of it is relied on."""
        result, silo = client_task.result, client_task.client.name
        client_task.result = None  # NVFlare would keep it until the task is removed
        if result.get_return_code() != ReturnCode.OK:
            self.log_info(fl_ctx, f"'{silo}' did not answer: {result.get_return_code()}")
            return
        body, refused = result.get("body"), result.get("refused")
        if not isinstance(body, bytes) or not isinstance(refused, str):
            self.log_info(fl_ctx, f"'{silo}' sent something else than a reply")
            return
        try:
            give_reply(self._socket, client_task.task.props["exchange"], Reply(body, refused[:_MOST_CODE]))
        except OSError as error:  # it will be offered again, and the silo gives the same answer
            self.log_info(fl_ctx, f"the reply of '{silo}' was not taken: {error}")

    def _forget(self, task: Task, fl_ctx: FLContext) -> None:
        self._sent.discard(task.props["exchange"])

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop an answer to a task that is over: its request is offered again, and the silo gives the same answer."""
