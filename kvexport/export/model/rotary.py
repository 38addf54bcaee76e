"""The rotary embedding of a decoder as frequencies, measured on the model's own functions.

Compression methods that rotate keys, and the setting `cache.positions: cache`, need these frequencies. A model whose
keys are rotated in another way than by position times frequency is refused.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kvexport.errors import UsageError
from kvexport.export.hooks.attention import attending
from kvexport.export.hooks.key_shift import key_bias
from kvexport.export.hooks.latent import is_latent
from kvexport.export.hooks.recurrence import RecurrentCache, recurring
from kvexport.methods.primitives.pairs import rotated
from kvexport.methods.slots import Rotary
from kvexport.plan.cache import LayerGeometry

APPLY = "apply_rotary_pos_emb"  # the name of the function that rotates, in nearly every model of transformers
POSITIONS = (0, 1, 7, 1000)
METHOD, OTHER_METHOD = (
    "this method rotates keys to each other's positions",
    "--set cache.method=ballot, or another that rotates no keys",
)
CACHE_POSITIONS = "cache.positions: cache turns keys to their places in the cache"


class _NotRotary(Exception):
    """The error that says why a model's keys cannot be rotated by angles of position times frequency."""


@dataclass(frozen=True)
class _RotaryCall:
    apply: Any
    module: nn.Module
    layer_type: dict[str, Any]
    options: dict[str, Any]
    key_size: int


class _Probe:
    """A recorder of the rotary embedding call before each layer's attention, in a forward pass without data."""

    def __init__(self, model: Any) -> None:
        self.model_type = model.config.model_type
        self.modules = [
            m for m in model.modules() if any(name.endswith("inv_freq") for name, _ in m.named_buffers(recurse=False))
        ]
        self.cosines: list[tuple[Tensor, nn.Module, dict[str, Any]]] = []
        self.latest: _RotaryCall | None = None
        self.layers: dict[int, _RotaryCall | None] = {}
        self.biased: dict[int, bool] = {}  # whether the layer's keys have a bias

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        if is_latent(module):
            raise _NotRotary("keys are latents, of which only the last numbers are rotated")
        if self.modules and not hasattr(sys.modules[type(module).__module__], APPLY):
            raise _NotRotary(f"{type(module).__name__} rotates keys in code of its own")
        if options["reads"] is None:
            self.layers[options["layer"]] = self.latest
            self.biased[options["layer"]] = key_bias(module) is not None
        self.latest = None
        return query.new_empty(*query.shape[:3], value.shape[3])

    def note(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        extra = (
            {"layer_type": arguments[2]}
            if len(arguments) > 2
            else {k: v for k, v in options.items() if k == "layer_type"}
        )
        if isinstance(output, tuple):
            self.cosines.append((output[0], module, extra))

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        namespaces = {type(m).__module__ for m in model.modules() if hasattr(sys.modules[type(m).__module__], APPLY)}
        own = {name: getattr(sys.modules[name], APPLY) for name in namespaces}
        hooks = [m.register_forward_hook(self.note, with_kwargs=True) for m in self.modules]
        for name, apply in own.items():
            setattr(sys.modules[name], APPLY, self._spy(apply))
        try:
            yield
        finally:
            for name, apply in own.items():
                setattr(sys.modules[name], APPLY, apply)
            for hook in hooks:
                hook.remove()

    def _spy(self, apply: Any) -> Any:
        def spy(*arguments: Any, **options: Any) -> Any:
            named = dict(zip(("q", "k", "cos", "sin"), arguments, strict=False)) | options
            source = next((c for c in self.cosines if c[0] is named.get("cos")), None)
            if source is None or len(arguments) > 4 or not isinstance(named.get("k"), Tensor):
                raise _NotRotary(f"{APPLY} gets other arguments than query, key, cosines and sines")
            rest = {k: v for k, v in options.items() if k not in ("q", "k", "cos", "sin")}
            self.latest = _RotaryCall(apply, source[1], source[2], rest, named["k"].shape[-1])
            return apply(*arguments, **options)

        return spy


def read_rotary(
    model: Any, mode: FakeTensorMode, geometry: list[LayerGeometry], *, cache_positions: bool = False
) -> list[LayerGeometry]:
    try:
        _, read = _probed(model, mode, geometry)
        if cache_positions:
            _require_rotary_alone(model, read)
    except _NotRotary as reason:
        what, fix = (CACHE_POSITIONS, "--set cache.positions=absolute") if cache_positions else (METHOD, OTHER_METHOD)
        raise UsageError(
            f"{model.config.model_type}: {what}, which needs the frequencies of the rotary embedding: {reason}", fix
        ) from None
    return [replace(x, rotary=replace(x.rotary, cache_positions=cache_positions)) for x in read]


def _require_rotary_alone(model: Any, geometry: list[LayerGeometry]) -> None:
    if not any(layer.rotary.inverse_frequencies for layer in geometry):
        raise _NotRotary("no layer rotates keys")
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta") or getattr(config, "attn_temperature_tuning", None):
        raise _NotRotary("queries are also scaled by their positions")


def read_key_shifts(model: Any, mode: FakeTensorMode, geometry: list[LayerGeometry]) -> list[LayerGeometry]:
    """Return the layers' geometry with `key_shift` where keys have a bias that neither sinks nor caps see."""
    try:
        probe, read = _probed(model, mode, geometry)
    except _NotRotary:
        return geometry
    biases = [bias for _, bias in sorted(probe.biased.items())]
    biased = [bias and not (x.sink_logits or x.softcap) for bias, x in zip(biases, read, strict=True)]
    return [replace(x, key_shift=y.rotary) if b else x for x, y, b in zip(geometry, read, biased, strict=True)]


def _probed(model: Any, mode: FakeTensorMode, geometry: list[LayerGeometry]) -> tuple[_Probe, list[LayerGeometry]]:
    probe = _Probe(model)
    states = RecurrentCache(probe.model_type)
    with probe.watching(model), attending(probe), recurring(model, states), torch.no_grad(), mode:
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        model(input_ids=tokens, position_ids=tokens, **states.as_arguments(model))
    calls = [call for _, call in sorted(probe.layers.items())]
    return probe, [replace(layer, rotary=_rotary(call)) for layer, call in zip(geometry, calls, strict=True)]


@torch.no_grad()
def _rotary(call: _RotaryCall | None) -> Rotary:
    if call is None:
        return Rotary()
    positions = torch.tensor([POSITIONS])
    cosine, sine = call.module(torch.zeros(1, 1, 1), positions, **call.layer_type)
    key = torch.linspace(-1.0, 1.0, call.key_size).expand(1, 1, len(POSITIONS), -1)
    across = call.options.get("unsqueeze_dim", 1) == 2  # whether tokens come before heads
    arranged = key.transpose(1, 2) if across else key
    result = call.apply(arranged, arranged, cosine, sine, **call.options)[1]
    result = result.transpose(1, 2) if across else result
    start, steps = result[:, :, :1].expand_as(key), positions[:, None]
    for name, buffer in call.module.named_buffers(recurse=False):
        for interleaved in (False, True):
            if name.endswith("inv_freq") and buffer is not None and 2 * buffer.numel() <= call.key_size:
                rotary = Rotary(tuple(buffer.float().tolist()), interleaved)
                if torch.allclose(rotated(start, steps, rotary), result, atol=1e-3):
                    return rotary
    raise _NotRotary("keys are not rotated by position times fixed frequencies of the first dimensions")
