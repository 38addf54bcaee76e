"""A Hugging Face decoder that is run and differentiated layer by layer.

The forward pass stores the input of every layer. The backward pass of a layer runs that layer again from its input.
Each module reads its own weights when it is called, and frees them when it returns. At any time, memory therefore holds
the weights and activations of one layer, the inputs of all layers, and the output head. On a GPU, this memory is the
GPU's; weights are read on the host and then copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvexport.errors import KvexportError, UsageError
from kvexport.export.hooks.attention import IMPLEMENTATION, Attending, PassThroughCache, attending
from kvexport.export.model.config import first_line_of, load_config
from kvexport.export.model.conversion import parameter_sources
from kvexport.export.model.hf_model import buffers_as_parameters, on_meta
from kvexport.export.model.tensors import Checkpoint, dense_values
from kvexport.quiet import quiet_exporter
from kvexport.recipe.fields import Recipe
from kvexport.tensor_files.casting import load_tensor, read_rows

UNREAD = nn.UninitializedParameter(requires_grad=False)
"""The placeholder of a weight that is not in memory. Any computation with it is an error."""


CPU = torch.device("cpu")


class LayerwiseDecoder:
    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, device: torch.device = CPU) -> None:
        self.device = device
        with quiet_exporter():
            self._model = float_model(checkpoint, recipe, IMPLEMENTATION)
        self._type = self._model.config.model_type
        sources = parameter_sources(self._model, [*checkpoint.tensors, *checkpoint.computed])
        if unread := next((name for name, _ in self._model.named_parameters() if name not in sources), ""):
            raise UsageError(f"parameter '{unread}' of {self._type} is assembled from several tensors")
        self.layers = self._decoder_layers()
        for module in self._model.modules():  # those that no tensor of the checkpoint gives, such as rotary frequencies
            module._buffers.update({name: x if x is None else x.to(device) for name, x in module._buffers.items()})
        stream_weights(self._model, checkpoint, sources, device)

    def _decoder_layers(self) -> Sequence[nn.Module]:
        config = self._model.config.get_text_config()
        count = config.num_hidden_layers
        if shared := getattr(config, "num_kv_shared_layers", 0):
            raise UsageError(
                f"the last {shared} layers of {self._type} read the caches of other layers, so no layer can be "
                "measured by itself"
            )
        for module in self._model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count and all(_attends(x) for x in module):
                return list(module)
        raise UsageError(f"{self._type} has layers without attention, or no list of {count} layers")

    @contextmanager
    def _running(self, attention: Attending) -> Iterator[None]:
        try:
            with quiet_exporter(), attending(attention), self.device:
                yield
        except KvexportError:
            raise
        except Exception as error:
            raise UsageError(
                f"{self._type} cannot be run a layer at a time: {type(error).__name__}: {first_line_of(error)}"
            ) from error

    def passes(self, ids: Sequence[int], attention: Attending, advance: Callable[[], None] = lambda: None) -> _Passes:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        outputs: list[Any] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            outputs[:] = [output]
            advance()

        hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in self.layers]
        hooks += [layer.register_forward_hook(after) for layer in self.layers]
        try:
            with torch.no_grad(), self._running(attention):
                self._call(ids, [0])
        finally:
            for hook in hooks:
                hook.remove()
        return _Passes(self, ids, calls, outputs[0])

    @torch.no_grad()
    def logits(self, ids: Sequence[int], kept: Sequence[int], attention: Attending) -> Tensor:
        """Return the logits [kept, vocabulary] of the tokens `ids` at the positions `kept`."""
        with self._running(attention):
            return self._call(ids, kept)

    def _call(self, ids: Sequence[int], kept: Sequence[int]) -> Tensor:
        logits: Tensor = self._model(
            input_ids=torch.tensor([list(ids)]),
            position_ids=torch.arange(len(ids))[None],
            logits_to_keep=torch.tensor(kept),
            **PassThroughCache(self._type).as_arguments(self._model),
        ).logits
        return logits[0].float()


class _Passes:
    def __init__(self, decoder: LayerwiseDecoder, ids: Sequence[int], calls: Any, output: Any) -> None:
        self._decoder, self._ids, self._calls, self._output = decoder, ids, calls, output

    def last_gradients(
        self, kept: Sequence[int], attention: Attending, directions: Callable[[Tensor], Iterable[Tensor]]
    ) -> list[Tensor]:
        """Return one gradient [1, T, hidden] at the last layer's output for each of the `directions`.

        A direction is an array of weights for the logits, which `directions` computes from the logits. The gradient is
        that of the sum of all logits times their weights.
        """
        decoder, is_tuple = self._decoder, isinstance(self._output, tuple)
        last = (self._output[0] if is_tuple else self._output).detach().requires_grad_(True)
        for layer in decoder.layers:
            layer.forward = lambda *_, **__: (last,) if is_tuple else last
        try:
            with torch.enable_grad(), decoder._running(attention):
                logits = decoder._call(self._ids, kept)
        finally:
            for layer in decoder.layers:
                del layer.forward
        return [torch.autograd.grad(logits, last, x, retain_graph=True)[0] for x in directions(logits.detach())]

    def layer_gradients(
        self, i: int, attention: Attending, output_of: Callable[[], Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        args, kwargs = self._calls[i]
        layer_input = args[0] if args else kwargs["hidden_states"]
        hidden = layer_input.detach().requires_grad_(True)
        args, kwargs = ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})
        with torch.enable_grad(), self._decoder._running(attention):
            output = self._decoder.layers[i](*args, **kwargs)
        output, inner = output[0] if isinstance(output, tuple) else output, output_of()
        pairs = [
            torch.autograd.grad(output, (inner, hidden), x, retain_graph=x is not gradients[-1]) for x in gradients
        ]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _attends(layer: nn.Module) -> bool:
    return any(isinstance(getattr(module, "layer_idx", None), int) for module in layer.modules())


def stream_weights(model: Any, checkpoint: Checkpoint, sources: Mapping[str, str], device: torch.device = CPU) -> None:
    embedding = model.get_input_embeddings()
    for prefix, module in model.named_modules():
        above = f"{prefix}." if prefix else ""
        names = {own: sources[above + own] for own, p in module._parameters.items() if p is not None}
        if not names:
            continue
        read = (
            _pick_rows(checkpoint, names["weight"], device) if module is embedding else _read(checkpoint, names, device)
        )
        module.register_forward_pre_hook(read)
        unread = dict.fromkeys(names, UNREAD)
        module.register_forward_hook(lambda module, _, __, unread=unread: module._parameters.update(unread))
        module._parameters.update(unread)


def float_model(checkpoint: Checkpoint, recipe: Recipe, attention: str = "sdpa") -> Any:
    config = load_config(str(checkpoint.path), recipe)
    try:
        model = on_meta(config, torch.float32, recipe.rotary_length, attention)
    except ValueError:  # transformers refuses this attention for the model, for example because of sink logits
        model = on_meta(config, torch.float32, recipe.rotary_length, "eager")
    buffers_as_parameters(model)
    return model.eval()


def _read(checkpoint: Checkpoint, names: Mapping[str, str], device: torch.device) -> Any:
    def hook(module: nn.Module, _: Any) -> None:
        for own, tensor in names.items():
            source = checkpoint.computed.get(tensor)
            values = load_tensor(checkpoint.tensors[tensor], "float32") if source is None else dense_values(source)
            module._parameters[own] = nn.Parameter(torch.from_numpy(values).to(device), requires_grad=False)

    return hook


def _pick_rows(checkpoint: Checkpoint, tensor: str, device: torch.device) -> Any:
    """Return a hook that reads only the embeddings of the current tokens, as the embedding may be large."""
    read: tuple[list[int], NDArray[Any]] = [], np.empty(0)  # the last call's, as a text is read several times

    def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal read
        used, places = torch.unique(args[0], return_inverse=True)
        if (wanted := used.tolist()) != read[0]:
            if tensor in checkpoint.tensors:
                rows = np.concatenate([read_rows(checkpoint.tensors[tensor], range(i, i + 1)) for i in wanted])
            else:
                rows = dense_values(checkpoint.computed[tensor])[wanted]
            read = wanted, rows
        module._parameters["weight"] = nn.Parameter(torch.from_numpy(read[1]).to(device), requires_grad=False)
        module.padding_idx = None  # the row of padding may be among those that are not read
        return (places, *args[1:])

    return hook
