"""At a silo: brings what came over Flower to the silo's socket. It can open nothing else of the silo."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from silodp_courier.parcels import unwrap, wrap
from silodp_deploy import ask_silo

app = ClientApp()
SILO_SECONDS = 60.0


@app.query("silo")
def state_name(message: Message, context: Context) -> Message:
    """Say which silo this SuperNode stands beside; a wrong name gets nobody anything, since requests are signed."""
    return Message(wrap(b"", silo=str(context.node_config["silo"])), reply_to=message)


@app.train("answer")
def answer(message: Message, context: Context) -> Message:
    """Have the silo answer one request; an exception is a lost message, and the request is offered again."""
    request, _ = unwrap(message.content)
    reply = ask_silo(str(context.node_config["socket"]), request, wait=SILO_SECONDS)
    return Message(wrap(reply.body, refused=reply.refused), reply_to=message)
