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

# A function that waits for the end of a decoder call and returns its logits.
Pending = Callable[[], "Rows"]


class LaneState(Protocol):
    """KV caches of a fixed number of batch lanes (one sequence each), and the calls of ONNX graphs that change them."""

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append tokens [n, T] to n batch lanes, from lane `first` on, and return logits; other lanes do not change.

        Later decoder calls may overwrite the returned logits.
        """
        ...

    def advance(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append generated tokens to batch lanes whose prompts have been read, and return logits, as `decode` does.

        A state whose decode steps read only part of the KV cache (`kvexport.state.periodic`) overrides this method.
        """
        return self.decode(input_ids, query_length, first)

    def merge(self, first: int, last: int) -> None:
        """Compress the KV caches of batch lanes first <= lane < last to their budgets of slots."""
        ...

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None: ...


class ModelState(LaneState, Protocol):
    """A `LaneState` (the KV caches of a batch) whose tensors the host can read and write, on any device."""

    # How many of the largest logits `step` returns for each row; None if all logits are in host memory.
    top_logits: int | None
    # Whether `begin` and `follow` let the device start a decode call with tokens that it chose itself, before the host
    # has read the logits of the call before.
    runs_ahead: bool = False

    def decode_images(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int, images: CallImages
    ) -> NDArray[np.float32]:
        """Append tokens to batch lanes and return logits, with image embeddings in place of some tokens."""
        if images.image_places.any():
            raise NotImplementedError
        return self.decode(input_ids, query_length, first)

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """Append one token [n, 1] to each of n batch lanes, as `decode` does, but leave the logits on the device.

        The attribute `top_logits` must not be None.
        """
        ...

    def begin(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Pending:
        """Start a `step` without waiting for it; return a function that waits for the logits.

        `follow` may start the next call before these logits are read. The second `follow` after this call overwrites
        these logits.
        """
        rows = self.step(input_ids, query_length, first)
        return lambda: rows

    def follow(self) -> Pending:
        """Start a decode call for the same sequences with the most likely tokens of the previous call, without waiting.

        Among equal logits the lowest token id is taken.
        """
        assert not self.runs_ahead
        raise NotImplementedError

    def grown(self, lanes: int) -> ModelState:
        """Return a new state with `lanes` batch lanes: copies of the existing lanes, then empty lanes."""
        ...

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of one lane's state tensors by input name, in host memory and without the batch dimension.

        Tensors with a dimension of slots are cut to the occupied slots, which are the first slots of each KV head.
        """
        ...

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        """Overwrite the state tensors of one batch lane with tensors that `read` returned.

        Slots beyond those in `state` become empty. State tensors that `state` does not contain stay unchanged.
        """
        ...

    def rollback(self, lane: int, count: int) -> None:
        """Remove the last `count` tokens of one batch lane. No merge may have happened since these tokens."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy the state tensors of batch lane `source` over those of lane `target`, on the device."""
        ...

    def adapt(self, lane: int, rows: range) -> None:
        """Choose a sequence's LoRA adapter for later calls, by its ranks in the stacked matrices of all adapters."""
        if rows:
            raise NotImplementedError

    def view(self, lane: int) -> Mapping[str, NDArray[Any]] | None:
        """Return views of one sequence's state tensors with all slots; None if the tensors are on a device."""
        ...

    def get_state(self) -> dict[str, NDArray[Any]]: ...

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Overwrite the state tensors (KV caches) of the first n batch lanes; n is the length of `past_length`."""
        ...


class LoadedModel(Protocol):
    """A loaded model: ONNX graphs with one copy of the weights, for any number of states (batches of KV caches)."""

    all_logits: bool  # whether a decoder call returns the logits of every token, or of the last token alone
    in_host_memory: bool  # whether the KV caches are in the host's memory

    def new_state(self, plan: CachePlan, lanes: int) -> ModelState: ...


class ImageEncoder(Protocol):
    def encode_tile(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the embeddings [rows, hidden] of one tile of an image; `pixels` are [1, 3, height, width].

        An image that is cut into patches is one tile of any size.
        """
        ...
