"""What a backend is, and what the engine drives, whatever runs an artifact's ONNX graphs.

Importing this takes the standard library alone, so that `kvexport doctor` can ask backends where everything is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvexport.errors import UsageError

if TYPE_CHECKING:
    from mmap import mmap
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from kvexport.artifact.manifest import Manifest
    from kvexport.backends.rows import Rows
    from kvexport.cache import CachePlan
    from kvexport.packages import Package
    from kvexport.recipe.fields import Recipe
    from kvexport.report.sections import Section
    from kvexport.terminal import Progress

# Adds to a staged artifact what a backend needs beside the ONNX graphs, and returns the manifest that says so.
Preparation = Callable[["Path", "Manifest", Callable[[str, "int | None"], "Progress"]], "Manifest"]


# So many bytes of zeros in the host's memory, as an array of uint8. Raises EnvironmentProblem where they are not there.
Memory = Callable[[int], "NDArray[np.uint8]"]


@dataclass(frozen=True)
class LoadOptions:
    """What a call asks for in place of the recipe's; None: the recipe's. float_input: packed weights are multiplied
    with inputs as they are, whatever the ONNX graph allows. A backend without such a setting passes over it."""

    threads: int | None = None
    device: str | None = None
    cuda_graph: bool | None = None
    float_input: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What a backend finds of itself on this machine. rows: for a person; data: the same for JSON. broken: packages
    that are installed and cannot be used, with the reason. provided: packages whose module another package gives.
    lacks: what else is missing without which nothing runs."""

    rows: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    provided: frozenset[str] = frozenset()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """What a backend says of an artifact: sections for a person, and the same for JSON."""

    sections: tuple[Section, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Runners:
    """What `kvexport validate` compares with PyTorch: the two ONNX graphs, past and present in buffers of their own.
    Each is a context manager with `infer(feed) -> outputs`, as polygraphy's runners are. decode: for calls of one token
    of each lane; merge: None where no layer merges. open_decoder: opens a session of ONNX Runtime of another decoder
    (the bytes of its ONNX graph) over the same weights; None where the backend runs no ONNX graphs."""

    decode: Any
    prefill: Any
    merge: Any
    open_decoder: Callable[[bytes], Any] | None = None


A_RANK_FAILED = "a rank has failed"  # as a sum says that could not be made, because of another error


class Collectives(Protocol):
    """How the processes that are ranks of one model add up what they made, over memory of the host that they share."""

    def bytes(self, ranks: int) -> int:
        """Of the shared memory, which begins as zeros; 0 where there cannot be as many ranks."""
        ...

    def environment(self, rank: int) -> Mapping[str, str]:
        """Variables of the process of a rank but the first, beside this one's."""
        ...

    def join(self, memory: mmap, rank: int, ranks: int) -> None:
        """From now on the calling thread opens sessions of this rank. Ends when all ranks have joined, or raises what
        keeps them from it."""
        ...

    def fail(self, memory: mmap) -> None:
        """From now on every sum is an error, those that are waited for too."""
        ...

    def problem(self, memory: mmap) -> str:
        """Why the sums of the calls that have ended are none, where the calls did not say so; "" where they are."""
        ...


class Backend(ABC):
    """What runs ONNX graphs. A subclass in a folder's `backend.py` is all that kvexport knows of it.

    name: the folder's. packages: what it asks for. devices: on which graphs can be asked to run; (None,) where there is
    no choice. prepared: files that `preparation` may write into an artifact; none where
    the ONNX graphs are all that is needed. positive_scales: whether it takes packed weights with scales above 0 alone.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[Package, ...]] = ()
    devices: ClassVar[tuple[str | None, ...]] = (None,)
    prepared: ClassVar[frozenset[str]] = frozenset()
    positive_scales: ClassVar[bool] = False

    @abstractmethod
    def problems(self, recipe: Recipe) -> list[tuple[str, str]]:
        """Why the recipe's artifact cannot run here, each with the line that mends it; empty where it can."""

    @abstractmethod
    def load(self, path: Path, manifest: Manifest, options: LoadOptions) -> LoadedModel:
        """The artifact, ready to run. Raises EnvironmentProblem for what this machine lacks, ArtifactError where the
        artifact lacks what `preparation` adds, UsageError for options that cannot be."""

    @abstractmethod
    def runners(self, model: Any, manifest: Manifest) -> Runners:
        """What `validate` compares; `sessions` is what `load` returned."""

    def require_ranks(self, recipe: Recipe, device: str | None = None) -> None:
        """Raises UsageError where the backend runs no model of several ranks. device: another than the recipe's."""
        raise UsageError(
            f"backend.tensor_parallel is {recipe.backend.tensor_parallel}, and {self.name} runs a model in one process",
            "--set backend.tensor_parallel=1",
        )

    def collectives(self, manifest: Manifest, options: LoadOptions) -> Collectives:
        """How the ranks of an artifact add up here. Raises what `require_ranks` raises, and EnvironmentProblem for what
        this machine lacks."""
        self.require_ranks(manifest.recipe, options.device)
        raise NotImplementedError

    def device(self, recipe: Recipe) -> str | None:
        """Where the recipe asks the graphs to run; None where there is no choice."""
        return None

    def preparation(self, recipe: Recipe) -> Preparation | None:
        """What a build does after the ONNX graphs are written; None where they are all that is needed. Asked for before
        anything else of a build, so that what is missing is said at once: raises EnvironmentProblem for that."""
        return None

    def packing_problem(self, dtype: str, group: int, *, has_offset: bool, picked: bool) -> tuple[str, str] | None:
        """Why it does not take a packed weight, which is then kept in floats, and the line that has weights rounded as
        it takes them; None where it does. dtype: int4, uint4, int8 or uint8. group: inputs that share a scale.
        has_offset: zero points or minima stand beside the scales. picked: single rows are read, as an embedding's."""
        return None

    def operators(self, manifest: Manifest, device: str | None) -> dict[str, str]:
        """What runs each operator of the artifact on this machine. device: another than the recipe's."""
        return {op: how for op, how in manifest.operators.items() if how}

    def diagnose(self) -> Diagnosis:
        """What `kvexport doctor` shows of it. Never raises."""
        return Diagnosis()

    def describe(self, path: Path, manifest: Manifest) -> Description:
        """What `kvexport inspect` shows of it."""
        return Description()


class LaneState(Protocol):
    """State tensors of a fixed number of lanes, and the two graphs that advance them."""

    def decode(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Append [n, T] tokens to lanes first <= lane < first + n, of which the first query_length [n, 1] are real; the
        other lanes take no part. Logits [n, 1 or T, vocabulary]. All three arrays may be overwritten by the next
        call."""
        ...

    def advance(
        self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0
    ) -> NDArray[np.float32]:
        """Run a decode step: as `decode`, of lanes whose prompts have been read.

        A state whose decode steps read less than the whole cache (`kvexport.state.periodic`) overrides this.
        """
        return self.decode(input_ids, query_length, first)

    def merge(self, first: int, last: int) -> None:
        """Bring lanes first <= lane < last back within their budgets."""
        ...

    def clear(self, first: int, last: int, *, poisoned: bool = False) -> None:
        """Empty lanes first <= lane < last. poisoned: they may hold NaN, so that no value of theirs may stay."""
        ...


class ModelState(LaneState, Protocol):
    """A `LaneState` that can be read and written, wherever it is. top_logits: how many of a row `step` gives; 0 where
    the artifact has no graph for them; None where logits are in the host's memory."""

    top_logits: int | None

    def step(self, input_ids: NDArray[np.int64], query_length: NDArray[np.int64], first: int = 0) -> Rows:
        """As `decode` with one token of each lane [n, 1], but the logits stay where they are. Needs `top_logits`."""
        ...

    def grown(self, lanes: int) -> ModelState:
        """A state of more lanes, the first of which are copies of these; the others are empty."""
        ...

    def read(self, lane: int, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Copies of a lane's state tensors by their input names, in the host's memory and without the batch's
        dimension; of tensors of slots the used ones, which are a prefix. names: those that are wanted, None: all."""
        ...

    def write(self, lane: int, state: Mapping[str, NDArray[Any]], past_length: int | None = None) -> None:
        """Take over a lane's state tensors as `read` gives them: slots beyond theirs become empty, other tensors stay.
        past_length: tokens that the lane has seen, None: they stay."""
        ...

    def rollback(self, lane: int, count: int) -> None:
        """Forget a lane's last `count` tokens, all of them appended since its last merge: their slots become empty."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Make a lane the same as another, where they are."""
        ...

    def view(self, lane: int) -> Mapping[str, NDArray[Any]] | None:
        """A lane's state tensors with all their slots, where they are; None where that is not the host's memory."""
        ...

    def get_state(self) -> dict[str, NDArray[Any]]:
        """A copy of every state tensor, by its input name."""
        ...

    def set_state(self, state: Mapping[str, NDArray[Any]], past_length: NDArray[np.int64]) -> None:
        """Take over a state, and the tokens that each lane has seen [n, 1]; of n lanes, which become the first."""
        ...


class LoadedModel(Protocol):
    """What runs the graphs of one artifact, holding the weights once, however many states use it. all_logits: of every
    token of a call, or of the last."""

    all_logits: bool

    def new_state(self, plan: CachePlan, lanes: int, memory: Memory | None = None) -> ModelState:
        """State for `lanes` sequences, all empty. memory: where one in the host's memory lies, None: anywhere there."""
        ...
