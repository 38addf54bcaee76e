"""The interface of a loaded model and of its state: the KV caches of a batch, and the calls that advance them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvexport.backends.rows import Rows
    from kvexport.images.rows import CallImages
    from kvexport.plan.cache import CachePlan

# A function that returns a given number of bytes of zeros in the host's memory, as an array of uint8. It raises
# EnvironmentProblem if the memory is not available.
Memory = Callable[[int], "NDArray[np.uint8]"]
# A function that waits for a decoder call and returns its logits.
Pending = Callable[[], "Rows"]


class LaneState(Protocol):
    """KV caches of a fixed number of batch lanes (one sequence each), and the graphs that advance them."""

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append tokens to the batch lanes first <= lane < first + n and return logits; other lanes do not change.

        The next call may overwrite the returned arrays.
        """
        ...

    def advance(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append tokens to batch lanes whose prompts have been read, and return logits, as `decode` does.

        A state whose decode steps read only a part of the cache (`kvexport.state.periodic`) overrides this method.
        """
        return self.decode(input_ids, query_length, first)

    def merge(self, first: int, last: int) -> None:
        """Compress the KV cache of each lane first <= lane < last to its budget of slots.

        Each evicted slot merges into a slot of the same lane that stays.
        """
        ...

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Empty the KV caches of batch lanes first <= lane < last."""
        ...


class ModelState(LaneState, Protocol):
    """A `LaneState` (the KV caches of a batch) whose tensors the host can read and write, on any device."""

    # Number of largest logits that `step` returns for each row. 0 if the artifact has no graph for them. None if logits
    # are in the host's memory.
    top_logits: int | None
    # Whether the state has `begin` and `follow`, with which the device computes a decode call before the host has read
    # the tokens of the one before
    runs_ahead: bool = False

    def decode_images(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int, images: CallImages
    ) -> NDArray[np.float32]:
        """Append tokens to batch lanes and return logits, as `decode` does, with rows of images in some places."""
        if images.image_places.any():
            raise NotImplementedError
        return self.decode(input_ids, query_length, first)

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """Append one token [n, 1] to each of n batch lanes, like `decode`, but leave the logits on the device.

        `top_logits` must not be None.
        """
        ...

    def begin(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Pending:
        """Begin a `step`, and return a function that waits for its rows. `follow` may begin the next call before that.

        The rows are valid until the second call of `follow` after this call.
        """
        rows = self.step(input_ids, query_length, first)
        return lambda: rows

    def follow(self) -> Pending:
        """Begin the call after the latest `begin` or `follow`, for the same lanes and lengths, as `begin` does.

        Each lane's token is that of the largest logit in the latest call, and the lowest of these if logits are equal.
        """
        assert not self.runs_ahead
        raise NotImplementedError

    def grown(self, lanes: int) -> ModelState:
        """Return a state with `lanes` batch lanes: copies of all lanes of this state, and then empty lanes."""
        ...

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of one lane's state tensors by input name, in host memory and without the batch dimension.

        Tensors of slots are cut to the occupied slots, which are a prefix.
        """
        ...

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        """Overwrite the state tensors of one batch lane with tensors that `read` returned.

        Slots beyond those of `state` become empty. Tensors that `state` does not contain stay unchanged.
        """
        ...

    def rollback(self, lane: int, count: int) -> None:
        """Remove the last `count` tokens of one batch lane. The tokens must be later than the lane's last merge."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy the state tensors of batch lane `source` over those of lane `target`, on the device."""
        ...

    def adapt(self, lane: int, rows: range) -> None:
        """Choose the LoRA adapter with which one batch lane is computed from now on."""
        if rows:
            raise NotImplementedError

    def view(self, lane: int) -> Mapping[str, NDArray[Any]] | None:
        """Return views of one lane's state tensors with all slots; None if the tensors are not in host memory."""
        ...

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all state tensors (KV caches of all lanes) by graph input name."""
        ...

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Overwrite the state tensors (KV caches) of the first n batch lanes."""
        ...


class LoadedModel(Protocol):
    """A loaded model: its graphs, with one copy of the weights for any number of states."""

    all_logits: bool  # whether a call returns logits of every token instead of the last one
    in_host_memory: bool  # whether the KV caches are in the host's memory

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> ModelState:
        """Return a state of empty KV caches for a batch of sequences."""
        ...


class ImageEncoder(Protocol):
    """A loaded model whose artifact reads images."""

    def encode_tile(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows [rows, hidden] of an image's tile [1, 3, height, width]."""
        ...
