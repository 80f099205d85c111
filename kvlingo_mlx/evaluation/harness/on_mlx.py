"""lm-eval's tasks decoded on MLX: answers of one model, several at once."""

from collections import deque
from collections.abc import Iterator, Sequence

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import memory
from kvlingo_mlx.caches.limits import can_merge
from kvlingo_mlx.engine import hybrid
from kvlingo_mlx.engine.batches import Batch, Row
from kvlingo_mlx.engine.sampling import Choice
from kvlingo_mlx.errors import NotEnoughMemoryError
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.continuation import log_probabilities
from kvlingo_mlx.evaluation.harness.answers import Decoder, TextToWrite
from kvlingo_mlx.loading.notes import tell
from kvlingo_mlx.threads import wired

GREEDY = Choice(None, None, None, ())


class MLXDecoder(Decoder):
    """On MLX; fewer answers are written at once while memory is short."""

    def _empty(self) -> list:
        return conditions.empty(self._target)

    def _next(self, token: int, cache: list) -> mx.array:
        (logs,) = log_probabilities(self._target, cache, token, [token])
        mx.eval(logs, [c.state for c in cache])
        mx.clear_cache()
        self._check_numbers(mx.isnan(logs).any().item())
        return logs[0]

    def _follow(self, tokens: Sequence[int], cache: list) -> tuple[float, bool]:
        start, chosen, first = 1, list[mx.array](), True
        for logs in log_probabilities(self._target, cache, tokens[0], tokens[1:]):
            true = mx.array(list(tokens[start : start + len(logs)]))
            chosen.append(mx.take_along_axis(logs, true[:, None], axis=-1)[:, 0])
            first &= bool(mx.all(mx.argmax(logs, axis=-1) == true).item())
            mx.eval(chosen)
            mx.clear_cache()
            start += len(logs)
        return float(mx.sum(mx.concatenate(chosen))), first

    def write(self, wanted: Sequence[TextToWrite]) -> Iterator[TextToWrite]:
        waiting, batch = deque(wanted), Batch(self._target, records=False)
        running: dict[Row, TextToWrite] = {}
        with wired(self._target.model):
            while waiting or running:
                while waiting and self._fits(waiting[0], running):
                    try:
                        row = self._join(batch, waiting[0])
                    except NotEnoughMemoryError:
                        if not running:
                            raise
                        break  # until one of the others has ended
                    running[row] = waiting.popleft()
                for row, each in list(running.items()):
                    if self._ended(row, each):
                        batch.leave(row)
                        del running[row]
                        mx.clear_cache()
                        yield each
                if running:
                    batch.step()

    def _join(self, batch: Batch, wanted: TextToWrite) -> Row:
        cache = self.make_cache(list(wanted.tokens))
        if self._size > 1 and not can_merge(cache):
            self._size = 1
            tell(
                f"one at a time: {self.name}, {type(cache[0]).__name__}",
                f"mlx-lm cannot merge such caches of {self.name} ({type(cache[0]).__name__}), so "
                "their answers are written one at a time",
            )
        return batch.join(cache, wanted.tokens, GREEDY, wanted.most)

    def _fits(self, wanted: TextToWrite, running: dict[Row, TextToWrite]) -> bool:
        """Whether an answer may begin beside others, which all are as wide as the longest.

        Others' caches are copied when one joins, so both copies and its own must have room.
        """
        if not running:
            return True
        if len(running) >= self._size:
            return False
        every = [wanted, *running.values()]
        longest = max(len(each.tokens) + each.most for each in every)
        free = memory.free()
        needed = memory.cache_bytes(self._target, longest) * (len(every) + 1)
        return free is None or needed <= free

    def _ended(self, row: Row, wanted: TextToWrite) -> bool:
        """Take what a row has written; returns whether its answer has ended."""
        while (response := row.take()) is not None:
            if response.generation_tokens == 1:
                self._check_numbers(mx.isnan(response.logprobs).any().item())
            if response.finish_reason == "stop" or wanted.take(response.token):
                return True
        return row.over

    def read_on(self, cache: list, tokens: Sequence[int]) -> None:
        hybrid.read_layers(self._target, tokens, cache)
