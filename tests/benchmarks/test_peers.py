"""The measurements of `benchmarks/correctness/peers.py` on invented data, without the other projects' code."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.correctness import peer_codes
from benchmarks.correctness.peer_caches import (
    Cache,
    Heads,
    jaccard,
    likeness,
    merged,
    output_gap,
    prefilled,
    raw,
    read,
    same,
)
from benchmarks.correctness.peer_merges import window_score
from benchmarks.correctness.peer_pairs import bracket_weights
from kvexport.methods.h2o import H2O
from kvexport.methods.keepkv import KeepKV
from kvexport.methods.slots import corrected_log_ema
from tests.support.recipes import TINY_CHECKPOINT as CHECKPOINT


def heads(tokens: int = 24, seed: int = 0) -> Heads:
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, h, tokens, 8, generator=draw) for h in (4, 2, 2))
    return Heads(query, key, value, 8**-0.5)


def shuffled(cache: Cache, seed: int = 0) -> Cache:
    order = torch.randperm(cache.votes.shape[-1], generator=torch.Generator().manual_seed(seed))
    tensors = (
        cache.key[:, :, order],
        cache.value[:, :, order],
        cache.votes[..., order],
        cache.score[..., order],
        cache.position[..., order],
    )
    return Cache(*tensors)


def test_the_jaccard_index_counts_shared_elements() -> None:
    a = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    b = torch.tensor([[3, 2, 9], [7, 8, 9]])
    assert jaccard(a, b).tolist() == pytest.approx([2 / 5, 0.0])
    assert jaccard(a, a.flip(-1)).tolist() == [1.0, 1.0]
    assert jaccard(a[:, :0], b[:, :0]).tolist() == [1.0, 1.0]


def test_caches_are_compared_in_any_order_of_slots() -> None:
    cache = raw(heads())
    alike = likeness(cache, shuffled(cache))
    assert alike.same
    assert (alike.shared, alike.key, alike.value, alike.votes) == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["key", "value", "votes"])
def test_a_slot_that_differs_is_reported_with_its_tensor(name: str) -> None:
    cache, other = raw(heads()), shuffled(raw(heads()))
    getattr(other, name)[0, 1, 3] += 0.01
    alike = likeness(cache, other)
    assert not alike.same
    assert alike.shared == 47 / 48
    assert {n for n in ("key", "value", "votes") if getattr(alike, n) > 1e-4} == {name}


def test_a_slot_that_nothing_stands_for_makes_the_difference_infinite() -> None:
    cache, other = raw(heads()), raw(heads())
    other.key[0, 0, 5], other.value[0, 0, 5] = other.key[0, 0, 4] + 1e-3, other.value[0, 0, 4]
    alike = likeness(cache, other)
    assert alike.key == float("inf")
    assert not same("", "", [(cache, other)])["holds"]


def test_the_gap_is_zero_without_evictions() -> None:
    text, later = heads(24), heads(4, seed=1)
    full = read(raw(text), later, 0.0)
    assert output_gap(read(shuffled(raw(text)), later, 0.0), full, full) == pytest.approx(0.0, abs=1e-6)
    lost = merged(raw(text), H2O(), 12, sinks=2, recent=4)
    assert output_gap(read(lost, later, 0.0), full, full) > 0.05


def test_votes_change_the_attention_output() -> None:
    text, later = heads(24), heads(4, seed=1)
    twice = Cache(
        *(torch.cat([x, x[:, :, :1]], 2) for x in (text.key, text.value)),
        torch.ones(1, 2, 25),
        *raw(text).tensors(1)[3:],
    )
    counted = raw(text)
    counted.votes[..., 0] = 2.0
    torch.testing.assert_close(read(counted, later, 1.0), read(twice, later, 1.0))


def test_the_whole_text_in_chunks_has_the_mass_of_the_text_at_once() -> None:
    text = heads(24)
    cache = prefilled(text, H2O(), 24, 7)
    assert torch.equal(cache.position[0, 0], torch.arange(24, dtype=torch.int32))
    torch.testing.assert_close(cache.score[:, :, 0], text.mass())


def test_the_score_of_a_window_is_corrected_to_its_mean() -> None:
    text = heads(40).ungrouped()
    cache = raw(text, window_score(text, KeepKV().decay))
    slots = SimpleNamespace(score=cache.score, position=cache.position, now=torch.tensor([[[39]]]))
    s = text.logits().exp()[:, :, -16:]
    expected = (s.sum(2) / (s > 0).sum(2)).log()
    torch.testing.assert_close(corrected_log_ema(slots, 0, KeepKV().decay), expected, rtol=1e-4, atol=1e-4)


def test_weights_of_equal_residuals_are_those_of_the_closed_form() -> None:
    r = torch.tensor([3.0, -4.0])
    for norm in (1, 2):
        for triangle in (True, False):
            first, second = bracket_weights(
                (torch.tensor(0.1), torch.tensor(0.2)), (r, r), norm=norm, triangle=triangle, guarded=True
            )
            assert (float(first), float(second)) == pytest.approx((1 / 3, 2 / 3))
    limit = bracket_weights((torch.tensor(0.2), torch.tensor(0.3)), (r, r), norm=2, triangle=False, guarded=True)
    assert [float(w) for w in limit] == pytest.approx([0.4, 0.6], rel=1e-3)


def test_the_three_switches_of_the_weights_each_do_something() -> None:
    a, residual = (torch.tensor(0.6), torch.tensor(0.1)), (torch.tensor([3.0, -4.0]), torch.tensor([-10.0, 5.0]))
    shares = {
        switches: float(bracket_weights(a, residual, norm=switches[0], triangle=switches[1], guarded=switches[2])[0])
        for switches in [(2, False, True), (1, False, True), (2, True, True), (2, False, False)]
    }
    assert len({round(share, 4) for share in shares.values()}) == 4
    # |c_11| = .6 * .2 * |(3, -4)|, |c_22| = .1 * .8 * |(-10, 5)|, |c_12| = .6 * .1 * |(-7, 1)|
    own, other, cross = 0.6, 0.08 * 125**0.5, 0.06 * 50**0.5
    assert shares[2, False, True] == pytest.approx((own - cross) / (own + other - 2 * cross))
    assert shares[2, False, False] == pytest.approx((-own - cross) / (-own + other - 2 * cross))
    assert shares[2, True, True] == pytest.approx(0.6 / 0.7)


def test_a_press_selects_positions_on_every_layer() -> None:
    from transformers import AutoModelForCausalLM

    from benchmarks.correctness.peer_presses import their_positions

    class Last:
        def compress(
            self, module: Any, hidden: Any, keys: Any, values: Any, attention: Any, kwargs: Any
        ) -> tuple[Any, Any]:
            assert attention is not None
            return keys[:, :, -3:], values[:, :, -3:].flip(2)

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, attn_implementation="eager").eval()
    (kept,) = their_positions(model, Last(), [list(range(1, 11))])
    assert kept.tolist() == [[[7, 8, 9]] * 2] * 2


def test_a_folder_without_the_code_is_named(tmp_path: Path) -> None:
    for load in (peer_codes.load_kvpress, peer_codes.load_zeromerge, peer_codes.load_asymkv, peer_codes.load_keepkv):
        with pytest.raises(FileNotFoundError):
            load(tmp_path)


def test_stand_ins_are_removed_after_the_import(tmp_path: Path) -> None:
    (tmp_path / "mergekv").mkdir()
    (tmp_path / "mergekv" / "mergekv.py").write_text(
        "import transformers\nfrom dotenv import load_dotenv\nload_dotenv()\n"
        "forward = transformers.models.llama.modeling_llama.LlamaSdpaAttention.forward\ndef answer(): return 42\n"
    )
    before = sys.modules.get("dotenv")
    peer = peer_codes.load_zeromerge(tmp_path)
    from transformers.models.llama import modeling_llama

    assert peer.code.answer() == 42
    assert (
        "dotenv" in peer.stand_ins and "transformers.models.llama.modeling_llama.LlamaSdpaAttention" in peer.stand_ins
    )
    assert sys.modules.get("dotenv") is before and not hasattr(modeling_llama, "LlamaSdpaAttention")
