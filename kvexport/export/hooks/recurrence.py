"""The recurrence hook: one cache object for decoders whose layers have convolutions or recurrent states.

transformers passes the new inputs of a causal convolution to `Cache.update_conv_state`, which returns them behind the
last inputs of earlier calls. transformers passes the state of a linear attention to `Cache.update_recurrent_state`.
`RecurrentCache` takes past states from the ONNX graph's inputs and collects present states for its outputs.

The functions of a model's Python module that compute linear attention are named in `FUNCTIONS`. `recurring` replaces
them during a call. In a probe and in a trace the replacement calls a placeholder of the operator LinearAttention; in
the PyTorch reference it calls the replaced function. Tokens beyond the `query_length` of a sequence are padding, and
change no state.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvexport.errors import UsageError
from kvexport.export.hooks.attention import PassThroughCache
from kvexport.ops.linear_attention import ATTRIBUTES, INPUTS, OPTIONAL
from kvexport.plan.cache import LayerStates
from kvexport.schema.state import StateTensor

Place = tuple[int, str]  # the number of a layer, and the name of a state tensor
NORM_EPSILON = 1e-6  # added to the squared norm of queries and keys in the gated delta rule

_tensors = [f"Tensor{'?' if name in OPTIONAL else ''} {name}" for name in INPUTS]
_attributes = [f"{kind} {name}" for name, kind in ATTRIBUTES.items()]
torch.library.define(
    "kvexport::linear_attention", f"({', '.join(_tensors)}, *, {', '.join(_attributes)}) -> (Tensor, Tensor)"
)
torch.library.register_fake(
    "kvexport::linear_attention",
    lambda query, key, value, past_state, *rest, **attributes: (torch.empty_like(value), torch.empty_like(past_state)),
)
LINEAR_ATTENTION: Any = torch.ops.kvexport.linear_attention.default


class RecurrentCache(PassThroughCache):
    def __init__(
        self,
        model_type: str = "the model",
        past: dict[Place, Tensor] | None = None,
        query_length: Tensor | None = None,
        *,
        traced: bool = True,
    ) -> None:
        super().__init__(model_type)
        self.past, self.query_length, self.traced = past or {}, query_length, traced
        self.present: dict[Place, Tensor] = {}
        self.place: Place = (0, "")  # place of the linear attention that is running
        # States after the call: one, or one for each scan of a layer that runs several (Zamba)
        self._computed: list[Tensor] = []

    def as_arguments(self, model: Any) -> dict[str, Any]:
        # These models write into states of their own. Hooks keep the states, so the models run without them.
        if self.model_type == "xlstm":
            return {"use_cache": False}
        return {**super().as_arguments(model), "use_cache": self.model_type not in ("rwkv", "recurrent_gemma")}

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, so that layers of transformers compute one token with the same code as several tokens."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.past)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that a layer takes the inputs of its convolution from `update_conv_state`."""

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return a convolution's inputs [B, channels, K - 1 + T]: of the last K - 1 tokens, then of the T new ones."""
        if conv_kernel_size is None:
            raise UsageError(
                f"layer {layer_idx} of {self.model_type} keeps a convolution state without naming the size of its "
                "kernel; it cannot be exported"
            )
        if conv_states.dim() != 3:
            raise UsageError(
                f"layer {layer_idx} of {self.model_type} keeps the ids of earlier tokens (for embeddings of n-grams); "
                "it cannot be exported"
            )
        batch, channels, _ = conv_states.shape
        place, kept = (layer_idx, _name("conv_state", state_idx)), conv_kernel_size - 1
        past = self.past.get(place)
        if past is None:
            past = conv_states.new_zeros(batch, channels, kept)
        inputs = torch.cat([past, conv_states], -1)
        if self.query_length is None:
            self.present[place] = inputs[..., -kept:]
            return inputs
        columns = self.query_length[:, :, None] + torch.arange(kept, device=inputs.device)  # [B, 1, K - 1]
        self.present[place] = inputs.gather(2, columns.expand(batch, channels, kept))
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that a layer calls the function of its linear attention for several tokens, without a state.

        The replacement of that function takes the state from this cache, which stores the layer's number here.
        """
        self.place, self._computed = (layer_idx, _name("recurrent_state", state_idx)), []

    def real(self, x: Tensor, padding: float = 0.0, dim: int = 1) -> Tensor:
        """Return `x` with the value `padding` where tokens, its dimension `dim`, are padding."""
        if self.query_length is None:
            return x
        shape = [size if i in (0, dim) else 1 for i, size in enumerate(x.shape)]
        is_real = torch.arange(x.shape[dim], device=self.query_length.device) < self.query_length
        return torch.where(is_real.reshape(shape), x, padding)

    def past_state(self, batch: int, heads: int, key_size: int, value_size: int) -> Tensor:
        """Return the state [B, heads, dk, dv] of the running linear attention before the call; zeros in a probe."""
        past = self.past.get(self.place)
        if past is None:
            return torch.zeros(batch, heads, key_size, value_size)
        return past[:, len(self._computed)] if past.dim() > 4 else past

    def computed(self, state: Tensor, past: Tensor) -> Tensor:
        """Store and return a layer's recurrent state after a call.

        Sequences without a token in the call keep the state `past`. In the PyTorch reference this method keeps it; in a
        trace the operator LinearAttention does.
        """
        if self.query_length is not None and not self.traced:
            state = torch.where((self.query_length > 0)[:, :, None, None], state, past)
        self._computed.append(state)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        known = recurrent_states.dim() > 4 or any(recurrent_states is state for state in self._computed)
        if self.traced and (not known or recurrent_states.numel() != sum(x.numel() for x in self._computed)):
            raise UsageError(
                f"layer {layer_idx} of {self.model_type} computes its recurrent state in code of its own (state-space "
                "or linear attention other than the gated delta rule, Kimi's delta attention and Mamba); it cannot "
                "be exported"
            )
        self.present[layer_idx, _name("recurrent_state", state_idx)] = recurrent_states
        return recurrent_states

    def states(self) -> tuple[LayerStates, ...]:
        layers: dict[int, list[StateTensor]] = {}
        for (layer, name), x in sorted(self.present.items()):
            dtype: Any = str(x.dtype).removeprefix("torch.")
            meaning = "the last inputs of the convolution" if name.startswith("conv") else "linear attention's state"
            layers.setdefault(layer, []).append(StateTensor(name, ("B", *map(int, x.shape[1:])), dtype, meaning))
        return tuple(LayerStates(layer, tuple(tensors)) for layer, tensors in layers.items())


class _Unbounded(int):
    """A number that is never less than another, such as the number of tokens, which a trace does not know."""

    def __lt__(self, other: int) -> bool:
        return False


def _name(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number else kind


@contextlib.contextmanager
def recurring(model: Any, cache: RecurrentCache) -> Iterator[None]:
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    own = [(module, name, vars(module)[name]) for module in modules for name in FUNCTIONS if name in vars(module)]
    # Methods of modules, by the modules and the methods' names
    methods: dict[tuple[nn.Module, str], Callable[..., Any]] = {}
    chunk_size = getattr(model.config, "max_inference_chunksize", None)
    for name, module in model.named_modules():
        if hasattr(module, "time_shift"):  # RWKV
            number = int(not hasattr(module, "time_first"))
            methods[module.time_shift, "forward"] = partial(_time_shift, cache, module.layer_id, number)
            model.config.rescale_every = 0  # else the model changes its weights, and halves hidden states to match
        if hasattr(module, "rg_lru"):  # RecurrentGemma
            layer = int(name.split(".")[2])
            methods[module.conv_1d, "forward"] = partial(_own_convolution, cache, layer, module.conv_1d)
            methods[module.rg_lru, "_rnn_scan"] = partial(_rg_lru, cache, layer, module.rg_lru._rnn_scan)
        if hasattr(module, "mlstm_backend"):  # xLSTM
            backend, layer = module.mlstm_backend, int(name.split(".")[2])
            methods[backend, "forward"] = partial(_mlstm, cache, layer, backend.forward, backend.config.eps)
            model.config.max_inference_chunksize = _Unbounded()  # else the model compares the number of tokens with it
    for (module, name), method in methods.items():
        setattr(module, name, method)
    try:
        for module, name, function in own:
            setattr(module, name, partial(FUNCTIONS[name], cache, function))
        yield
    finally:
        for module, name, function in own:
            setattr(module, name, function)
        for module, name in methods:
            delattr(module, name)
        if chunk_size is not None:
            model.config.max_inference_chunksize = chunk_size


def _delta_rule(
    cache: RecurrentCache,
    own: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule (Qwen3-Next, Qwen3.5), or Kimi's delta attention, whose decay differs by channel.

    query and key are [B, T, Hk, dk] of Hk key heads, value is [B, T, H, dv] with H a multiple of Hk, beta [B, T, H], g
    (the logarithm of the decay) [B, T, H] or [B, T, H, dk]. The outputs are [B, T, H, dv], the state [B, H, dk, dv].
    """
    key_size = key.shape[3]
    past = cache.past_state(value.shape[0], value.shape[2], key_size, value.shape[3])
    if not cache.traced:
        options |= {"initial_state": past, "output_final_state": True}
        g, beta = cache.real(g), cache.real(beta)
        output, state = own(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)
        return output, cache.computed(state.to(past.dtype), past)
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query), _normalized(key)
    output, state = _placeholder(cache, (query, key, value), past, g, beta, "gated_delta", key_size**-0.5)
    return output.reshape(value.shape).to(value.dtype), cache.computed(state, past)


def _mamba2(
    cache: RecurrentCache,
    own: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute a scan of Mamba-2 as a gated linear attention.

    The query is C, the key is B, the value is dt x, and the logarithm of the decay is dt A; D x is added to the output.
    x is [B, T, H, dv], dt [B, T, H], A (below 0) and D [H], B and C [B, T, groups, dk] with H a multiple of the groups.
    The outputs are [B, T, H, dv], the state [B, H, dk, dv].
    """
    if z is not None:
        raise UsageError(f"{cache.model_type} gates its scan of Mamba-2 within the scan; it cannot be exported")
    batch, _, heads, value_size = hidden_states.shape
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = torch.clamp(functional.softplus(step) if dt_softplus else step, *dt_limit)
    past = cache.past_state(batch, heads, B.shape[3], value_size)
    if not cache.traced:
        step = cache.real(step)
        options |= {"initial_states": past.transpose(2, 3), "return_final_states": True}
        output, state = own(hidden_states, step, A, B, C, chunk_size, D=D, **options)
        return output, cache.computed(state.transpose(2, 3).to(past.dtype), past)
    wide = hidden_states.float()
    decay = step * A.float()
    output, state = _placeholder(cache, (C, B, wide * step[..., None]), past, decay, None, "gated", 1.0)
    output = output.reshape(wide.shape)
    if D is not None:
        output = output + wide * D.float()[:, None]
    return output.to(hidden_states.dtype), cache.computed(state, past)


def _mamba(
    cache: RecurrentCache,
    own: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute a selective scan of Mamba as a gated linear attention with a head of one value for each channel.

    x, dt and the gate z are [B, channels, T], A (below 0) is [channels, n], B and C are [B, n, T], D is [channels]. The
    outputs are [B, channels, T], the state [B, channels, n, 1].
    """
    x, step, query, key, gate = (each.transpose(1, 2).float() for each in (hidden_states, dt, C, B, z))
    step = functional.softplus(step if delta_bias is None else step + delta_bias.float())
    past = cache.past_state(x.shape[0], x.shape[2], A.shape[1], 1)
    if cache.traced:
        rows = query[:, :, None], key[:, :, None], (step * x)[..., None]
        output, state = _placeholder(cache, rows, past, step[..., None] * A.float(), None, "gated", 1.0)
        output = output.reshape(x.shape)
    else:  # the model's function starts at zero, so what is left of the past state is added to its results
        step = cache.real(step)
        output, state = own(hidden_states, step.transpose(1, 2), A, B, C, return_last_state=True)
        left = torch.exp(step.cumsum(1)[..., None] * A) * past[:, None, :, :, 0]  # [B, T, channels, n]
        output = output.transpose(1, 2) + (left * query[:, :, None]).sum(-1)
        state = (state + left[:, -1])[..., None].to(past.dtype)
    output = (output + x * D.float()) * functional.silu(gate)
    return output.transpose(1, 2).to(hidden_states.dtype), cache.computed(state, past)


def _time_shift(cache: RecurrentCache, layer: int, number: int, hidden: Tensor) -> Tensor:
    """Return the hidden state [B, T, C] of the token before each token: zeros before the first one (RWKV)."""
    cache.get_recurrent_state(layer)  # the number of the layer for `_wkv`, which runs next
    return cache.update_conv_state(hidden.transpose(1, 2), layer, number, 2)[..., :-1].transpose(1, 2)


def _wkv(
    cache: RecurrentCache,
    own: Callable[..., Any],
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute RWKV's mean of values, weighted by exp(key), as a gated linear attention with a head for each channel.

    The output is (a + exp(u + k) v) / (b + exp(u + k)). The state [B, C, 1, 2] has the sums a of exp(k) v and b of
    exp(k) over earlier tokens, which decay by exp(-exp(w)) with every token; w is `time_decay` [C] and u `time_first`
    [C]. k and v are [B, T, C]. The sums lack the latest token, whose two terms are in a convolution state, because a
    linear attention updates its state before it reads it.

    RWKV subtracts the largest key from the exponents. Here a key counts as one from -60 to 60 instead.
    """
    layer, (batch, tokens, channels) = cache.place[0], key.shape
    past = cache.past_state(batch, channels, 1, 2)
    k, v = key.float(), value.float()
    if cache.traced:
        weight = torch.exp(k.clamp(-60, 60))
        terms = torch.stack([weight * v, weight], -1)
        before = cache.update_conv_state(terms.flatten(2).transpose(1, 2), layer, 2, 2)[..., :-1].transpose(1, 2)
        ones, decay = k.new_ones(batch, tokens, 1, 1), -torch.exp(time_decay.float()).expand(k.shape)
        sums, state = _placeholder(cache, (ones, ones, before.reshape(terms.shape)), past, decay, None, "gated", 1.0)
        sums = sums.reshape(terms.shape) + torch.exp(time_first.float())[:, None] * terms
        output = sums[..., 0] / sums[..., 1]
    else:  # the model's function has no padding, and a state that has all tokens: it is kept where the latest terms are
        last, output = cache.past[layer, "conv_state_2"], torch.zeros_like(v)
        sums = past[:, :, 0] * torch.exp(-torch.exp(time_decay.float()))[:, None] + last.reshape(batch, channels, 2)
        for b, count in enumerate(cache.query_length[:, 0].tolist() if cache.query_length is not None else ()):
            held = *sums[b : b + 1].unbind(-1), torch.zeros_like(sums[b : b + 1, :, 0])
            real = k[b : b + 1, :count], v[b : b + 1, :count]
            rows, (a, total, largest) = own(time_decay, time_first, *real, state=held, return_state=True)
            output[b, :count], sums[b] = rows[0], (torch.stack([a, total], -1) * torch.exp(largest)[..., None])[0]
        cache.present[layer, "conv_state_2"], state = sums.reshape(last.shape).to(last.dtype), torch.zeros_like(past)
    cache.update_recurrent_state(cache.computed(state, past), layer)
    return output.to(value.dtype), None


def _own_convolution(cache: RecurrentCache, layer: int, convolution: nn.Conv1d, hidden: Tensor) -> Tensor:
    """Compute a causal convolution [B, C, T] of a layer that keeps its last inputs itself (RecurrentGemma)."""
    inputs = cache.update_conv_state(hidden, layer, 0, convolution.kernel_size[0])
    weights = convolution.weight, convolution.bias
    output: Tensor = _convolution(cache, functional.conv1d, inputs, *weights, groups=convolution.groups)
    return output


def _rg_lru(
    cache: RecurrentCache,
    layer: int,
    own: Callable[..., Any],
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: None,
) -> tuple[Tensor, None]:
    """Compute RecurrentGemma's recurrence h = a h + x as a gated linear attention with a head for each channel.

    x and a are [B, T, C], the state is [B, C, 1, 1]. The first token of a sequence meets a state of zeros, so `reset`
    has no effect.
    """
    cache.get_recurrent_state(layer)
    past = cache.past_state(hidden_states.shape[0], hidden_states.shape[2], 1, 1)
    if cache.traced:
        ones, decay = hidden_states.new_ones(*hidden_states.shape[:2], 1, 1), torch.log(recurrent_gate.float() + 1e-37)
        rows = ones, ones, hidden_states[..., None]
        output, state = _placeholder(cache, rows, past, decay, None, "gated", 1.0)
        output = output.reshape(hidden_states.shape)
    else:
        hidden_states, recurrent_gate = cache.real(hidden_states), cache.real(recurrent_gate, 1.0)
        output, state = own(hidden_states, recurrent_gate, torch.zeros_like(reset), past[..., 0, 0])
        state = state[..., None, None].to(past.dtype)
    cache.update_recurrent_state(cache.computed(state, past), layer)
    return output.to(hidden_states.dtype), None


def _mlstm(
    cache: RecurrentCache,
    layer: int,
    own: Callable[..., Any],
    epsilon: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the matrix memory of xLSTM as a gated linear attention.

    Query and key are [B, H, T, dk], the value is [B, H, T, dv], the input gate i and the forget gate f are [B, H, T].
    The memory C and the sum n of keys decay by sigmoid(f), and a token adds exp(i) k v and exp(i) k. The output is
    q C / max(|q n|, 1). The state [B, H, dk, dv + 1] has n as another column of C: that of a value of ones.

    The model divides C and n by exp(m), with m = max(log sigmoid(f) + m, i). As a convolution's state does, the state
    of m [B, H, 1] holds the value of the latest token alone.
    """
    batch, heads, tokens, key_size = query.shape
    cache.get_recurrent_state(layer)
    past = cache.past_state(batch, heads, key_size, value.shape[3] + 1)
    largest = cache.past.get((layer, "conv_state"))
    if largest is None:
        largest = torch.zeros(batch, heads, 1)
    if cache.traced:
        decay, added = functional.logsigmoid(fgate.float()), igate.float()
        total, number = decay.cumsum(2), torch.arange(tokens, device=query.device)
        earlier = torch.where(number <= number[:, None], (added - total)[:, :, None], -torch.inf).amax(3)
        m = total + torch.maximum(largest, earlier)
        before = cache.update_conv_state(m, layer, 0, 2)[..., :-1]
        ones = torch.ones_like(m)[..., None]
        rows = query, key.float() * torch.exp(added - m)[..., None], torch.cat([value.float(), ones], 3)
        by_token = (rows[0].transpose(1, 2), rows[1].transpose(1, 2), rows[2].transpose(1, 2))
        decay = (decay + before - m).transpose(1, 2)
        sums, state = _placeholder(cache, by_token, past, decay, None, "gated", key_size**-0.5)
        sums = sums.reshape(batch, tokens, heads, -1).transpose(1, 2)
        output = sums[..., :-1] / (torch.maximum(sums[..., -1].abs(), torch.exp(-m)) + epsilon)[..., None]
    else:
        igate, fgate = cache.real(igate, -torch.inf, 2), cache.real(fgate, torch.inf, 2)
        given = {"query": query, "key": key, "value": value, "igate": igate, "fgate": fgate}
        states = {"c_initial": past[..., :-1], "n_initial": past[..., -1], "m_initial": largest}
        output, (memory, keys, m) = own(**given, **states)
        cache.present[layer, "conv_state"] = m.to(largest.dtype)
        state = torch.cat([memory, keys[..., None]], 3).to(past.dtype)
    cache.update_recurrent_state(cache.computed(state, past), layer)
    return output.to(value.dtype), None


def _placeholder(
    cache: RecurrentCache,
    rows: tuple[Tensor, Tensor, Tensor],
    past: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    update_rule: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Call the custom operator of PyTorch that the exporter writes as a node LinearAttention into the ONNX graph."""
    key, value = rows[1:]
    length = cache.query_length
    if length is None:  # in a probe
        length = torch.full((value.shape[0], 1), value.shape[1])
    result: tuple[Tensor, Tensor] = LINEAR_ATTENTION(
        *(x.float().flatten(2) for x in rows),
        past,
        length,
        decay.float().flatten(2) if decay.dim() == 4 else decay.float(),
        None if beta is None else beta.float(),
        heads=value.shape[2],
        key_heads=key.shape[2],
        update_rule=update_rule,
        scale=scale,
    )
    return result


def _normalized(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def _convolution(
    cache: RecurrentCache,
    own: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute a causal convolution by the function of the model's Python module.

    A convolution refuses a bias of another type than its input before `in_float64` can cast the bias. In the PyTorch
    reference the bias is therefore the result of an addition, which `in_float64` casts.
    """
    return own(hidden_states, weight, bias if bias is None or cache.traced else bias + 0.0, **options)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
    "rwkv_linear_attention": _wkv,
}
"""The replacements of functions of a model's Python module, by the function's name."""
