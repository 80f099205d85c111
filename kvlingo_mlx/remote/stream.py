"""The states that arrive from another machine, chunk by chunk, while it still reads.

A thread downloads and checks the next chunks while the last one is translated. It touches no MLX
array. Whatever it cannot repair, it hands on as an error.
"""

import contextlib
import math
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.errors import RemoteModelError
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import DType
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.remote import chunk
from kvlingo_mlx.remote.client import DAMAGED, Client, GoneError
from kvlingo_mlx.remote.model import RemoteModel
from kvlingo_mlx.remote.order import KEPT, Order, split
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.products import loaded

Arrived = tuple[range, dict[str, np.ndarray], DType]  # of one chunk
AHEAD = 2  # chunks that have come and wait to be translated
JOIN_S = 5.0
Spans = Generator[KVStates, None, None]


@dataclass
class Received:
    """What came over the network for one prompt."""

    address: str  # from where
    tokens: int  # whose states came
    bytes: int = 0  # of all chunks, those included that came again

    def __str__(self) -> str:
        """One line."""
        each = f"{self.bytes / max(1, self.tokens):,.0f} bytes a token"
        return f"{self.bytes / 1e6:,.1f} MB from {self.address} (the source's states, {each})"


def spans(model: RemoteModel, order: Order, received: Received) -> Spans:
    """A source's states of a prompt, in order, as they arrive; ``received`` is filled in.

    Closing the generator ends the transfer, and the job there.

    Raises:
        RemoteModelError: The other machine cannot be reached any more, refuses, or sends what is
            wrong. Nothing of a chunk that is wrong is ever handed on.
    """
    with contextlib.closing(Transfer(model.client, order, model.geometry.layers)) as transfer:
        for _ in order.spans:
            found = transfer.arrived.get()
            if isinstance(found, Exception):
                raise found
            received.bytes = transfer.client.received
            with working():
                states = transfer.states(*found)
            del found
            yield states
            del states


class Transfer:
    """An order that is being carried out, by a thread of its own.

    Attributes:
        client: How the other machine is asked.
        arrived: The chunks, each as soon as it is there, or the error that ends them.
    """

    def __init__(self, client: Client, order: Order, layers: Sequence[LayerGeometry]) -> None:
        self._order, self._layers = order, layers
        self.client = Client(client.address, client.key, client.patience)
        self.arrived: queue.Queue[Arrived | Exception] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the transfer, wherever it is."""
        self.client.stopped.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        order, lost = self._order, 0  # the order that is being carried out now
        try:
            while True:
                position = order.start
                try:
                    job = self.client.begin(order)
                    for number, span in enumerate(order.spans):
                        if not self._put((span, *self._chunk(job, order, number))):
                            return
                        position, lost = span.stop, 0
                    return
                except GoneError as error:  # the server was started again, or was idle for too long
                    lost += 1
                    if lost > DAMAGED:
                        raise self.client.odd(f"loses what it reads ({error})") from None
                    order = self._order.rest(position)
        except Exception as error:  # raised where the chunks are waited for
            self._put(error)
        finally:
            self.client.end(order.id)  # even if nobody has heard that it began

    def _chunk(self, job: str, order: Order, number: int) -> tuple[dict[str, np.ndarray], DType]:
        """A chunk that is right: its digest, its position, and each tensor's name and shape."""
        span = order.spans[number]
        shapes = order.shapes(span, self._layers)
        blob = self.client.chunk(job, number, chunk.most_bytes(shapes))
        try:
            return chunk.unpacked(blob, shapes, order.told(span))
        except ValueError as error:
            raise RemoteModelError(
                f"chunk {number} from {self.client.address} is not what was asked for: {error}"
            ) from None

    def _put(self, found: Arrived | Exception) -> bool:
        """Hand something on; whether anybody still waits for it."""
        while not self.client.stopped.is_set():
            with contextlib.suppress(queue.Full):
                self.arrived.put(found, timeout=0.1)
                return True
        return False

    def states(self, span: range, found: dict[str, np.ndarray], dtype: DType) -> KVStates:
        """States of all layers; NaN stands for what no map reads, and is never made."""
        arrays = {name: loaded(array, dtype) for name, array in found.items()}

        def one(side: str, index: int, layer: LayerGeometry) -> mx.array:
            held = [arrays[n] for n in (f"{each}.{index}" for each in SIDES) if n in arrays]
            shape = len(held[0]) if held else len(span), layer.width(side)
            unread = mx.broadcast_to(mx.array(math.nan), shape)
            return arrays.get(f"{side}.{index}", unread)[None]

        keys, values = (
            tuple(one(side, *each) for each in enumerate(self._layers)) for side in SIDES
        )
        named = {split(name): array for name, array in arrays.items()}
        kept = {layer: array[None] for (side, layer), array in named.items() if side == KEPT}
        return KVStates(keys, values, self._order.capture, span.start, kept)
