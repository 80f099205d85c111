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
from kvlingo_mlx.format.tensor_file import DType, Shapes
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.remote import chunk
from kvlingo_mlx.remote.client import Client
from kvlingo_mlx.remote.model import RemoteModel
from kvlingo_mlx.remote.order import KEPT, Order, split
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.products import loaded

Checked = tuple[dict[str, np.ndarray], DType]
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

    Closing the generator ends the transfer.

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
        order = self._order
        shapes = [order.shapes(span, self._layers) for span in order.spans]
        blobs = self.client.stream(order, max(map(chunk.most_bytes, shapes)))
        try:
            with contextlib.closing(blobs):
                for span, held, blob in zip(order.spans, shapes, blobs, strict=True):
                    if not self._put((span, *self._checked(span, held, blob))):
                        return
        except Exception as error:  # raised where the chunks are waited for
            self._put(error)

    def _checked(self, span: range, shapes: Shapes, blob: bytes) -> Checked:
        """A chunk that is right: its position, and each tensor's name and shape."""
        try:
            return chunk.unpacked(blob, shapes, self._order.told(span))
        except ValueError as error:
            raise RemoteModelError(
                f"the chunk of tokens {span.start} to {span.stop} from {self.client.address} is "
                f"not what was asked for: {error}"
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
