"""Planted bugs, by file below plugins/, for `mutants.py`."""

from __future__ import annotations

# fmt: off
# Bugs of the CPU kernels for `kvexport validate`: name, text, its replacement, key of ENGINES.
VALIDATE: dict[str, list[tuple[str, ...]]] = {
    "cpu/attention/attention.h": [
        ("window off by one, decode", "<= now - call.sliding_window", "< now - call.sliding_window", "window"),
        ("wrong position", "static_cast<int32_t>(head.first + i)", "static_cast<int32_t>(head.first + i + 1)",
         "keepkv"),
    ],
    "cpu/attention/prefill.h": [
        ("window off by one, prefill", "rows.now[r] - call.sliding_window :",
         "rows.now[r] - call.sliding_window - 1 :", "window"),
        ("votes not read in prefill", "head.past_votes[slot] : 1.0f", "1.0f : 1.0f", "keepkv"),
        ("a token does not see itself", "(position <= rows.now[r])", "(position < rows.now[r])", "keepkv"),
        ("average does not decay", "past[c] + log_decay", "past[c]", "keepkv"),
        ("votes not read in prefill, int8", "head.past_votes[slot] : 1.0f", "1.0f : 1.0f", "int8"),
        ("average does not decay, int8", "past[c] + log_decay", "past[c]", "int8 keepkv"),
    ],
    "math/merge.h": [
        ("lost vote", "votes += member_votes;", "votes += 1.0f;", "ballot"),
        ("fractional votes", "weighted_logit += w * l;", "weighted_logit += l;", "keepkv"),
        ("age off by one", "static_cast<unsigned>(position) + 1u", "static_cast<unsigned>(position)", "keepkv"),
        ("lost vote, int8", "votes += member_votes;", "votes += 1.0f;", "int8"),
        ("fractional votes, int8", "weighted_logit += w * l;", "weighted_logit += l;", "int8 keepkv"),
        ("age off by one, int8", "static_cast<unsigned>(position) + 1u", "static_cast<unsigned>(position)",
         "int8 keepkv"),
    ],
    "cpu/attention/decode.h": [
        ("wrong group of query heads", "call.query_heads + head.h * group + g % group;",
         "call.query_heads + g % group * call.heads + head.h;", "keepkv"),
        ("stale score", "load(past + c) * decay + received", "load(past + c) * decay", "h2o"),
        ("wrong scale", "* call.scale", "* call.scale * 1.001f", "keepkv"),
        ("wrong scale, int8", "* call.scale", "* call.scale * 1.001f", "int8"),
        ("a few tokens see the next one", "max_of(from, own + 1)", "max_of(from, own + 2)", "full"),
    ],
    "cpu/linear/epilogue.h": [
        ("missing bias", "if (p.bias) add_row(", "if (false) add_row(", "bias"),
        ("transposed rotary", "u * c - v * s", "u * c + v * s", "keepkv"),
        ("gate", "exp(-x)", "exp(-1.0001f * x)", "keepkv"),
    ],
    "cpu/merge/select.h": [
        ("eviction tie", "keep_score[i] == keep_score[j] && i < j", "keep_score[i] == keep_score[j] && i > j",
         "snapkv"),
        ("sinks off by one", "is_unprotected[i] = position[i] >= call.sinks",
         "is_unprotected[i] = position[i] > call.sinks", "h2o"),
        ("recent off by one", "position[i] <= head.now - head.recent;", "position[i] < head.now - head.recent;", "h2o"),
        ("pooled neighbours", "reach = policy.pooled / 2", "reach = policy.pooled / 2 + 1", "snapkv"),
    ],
    "cpu/core/quantized.h": [
        ("scales are truncated to bfloat16", "(bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000", "bits & 0xffff0000",
         "int8"),
        ("numbers are rounded towards zero", "x + 12582912.0f - 12582912.0f", "x", "int8"),
        ("a tie goes to the larger int4 number", "distance(kInt4[code], 0) < distance(kInt4[best], 0)", "true", "int4"),
    ],
    "cpu/merge/merge_cache.cpp": [
        ("threshold, int8", "[i] > policy.threshold)", "[i] > policy.threshold - 0.02f)", "int8 keepkv"),
        ("position of a merged slot, int8", "latest = max_of(latest, members[j])", "latest = members[0]", "int8"),
        ("threshold", "[i] > policy.threshold)", "[i] > policy.threshold - 0.02f)", "keepkv"),
        ("position of a merged slot", "latest = max_of(latest, members[j])", "latest = members[0]", "ballot"),
        ("keys turned the wrong way", "place++ - before", "before - place++", "places"),
    ],
    "cpu/linear/rows.h": [
        ("epsilon", "static_cast<float>(size) + epsilon", "static_cast<float>(size)", "keepkv"),
    ],
    "cpu/core/tile.h": [
        ("a product loses an input", "i < last; ++i", "i < last - 1; ++i", "keepkv"),
    ],
    "cpu/merge/fit.h": [
        ("a fit reads targets with the votes before their merge", "bias_of(votes[i]);\n      for",
         "bias_of(work.votes.get()[i]);\n      for", "fitted"),
        ("a fit does not know targets' merged values", "difference[j] = to[j] - merged[c * kBlock + j]",
         "difference[j] = 0.0f * merged[c * kBlock + j]", "fitted"),
    ],
}

# Bugs of the CPU kernels for their random calls: name, text, its replacement, the instruction set (if not AVX2).
KERNELS: dict[str, list[tuple[str, ...]]] = {
    "cpu/linear/panel_products.cpp": [
        ("a group has the scale of the one before", "groups.scales(g, s)", "groups.scales(g ? g - 1 : 0, s)"),
        ("a row has the step of another", "times(scale[s], b.step[kFrom + i])", "times(scale[s], b.step[kFrom])"),
        ("the low byte of an input is dropped", "vf) * (1.0f / 256.0f);", "vf) * 0.0f;"),
        ("the low bytes of other rows are added", "fine & 1 << kGroup", "fine & 2 << kGroup"),
        ("the upper bits of the first 16 inputs, 3 bits", ">> (odd ? 4 : 0);", ">> 0;"),
        ("numbers with super-scales lack their center", "static_cast<float>(-center_of(kRead)) * of_products",
         "0.0f * of_products"),
    ],
    "cpu/linear/panel_groups.h": [
        ("a zero point is added", "* -scale_of_group", "* scale_of_group"),
        ("unsigned numbers with a minimum lack their center", " + static_cast<float>(center) * scale_of_group;", ";"),
        ("the other scale of a byte, 2 bits", "4 * (i & 1) & 15", "4 * (~i & 1) & 15"),
        ("every fourth scale lacks bits, 3 bits", " | row(2) >> 6 << 4) - 32", ") - 32"),
    ],
    "cpu/linear/rounding.h": [
        ("a block's sum has no step", "= size / 256.0f * static_cast<float>(256 * high + low)",
         "= static_cast<float>(256 * high + low)"),
        ("half of the center, VNNI", "= -8 * high,", "= -4 * high,", "avx512vnni"),
    ],
    "cpu/linear/repack.cpp": [
        ("halves of a byte in the other order, panels", "spread(nibbles & 0xffffu) | spread(nibbles >> 16) << 4",
         "spread(nibbles >> 16) | spread(nibbles & 0xffffu) << 4"),
        ("the last column of an odd number", "rest < kPanelColumns ? rest : kPanelColumns",
         "rest < kPanelColumns ? rest - 1 : kPanelColumns"),
    ],
    "cpu/linear/dot.h": [
        ("8-bit weights are read without their sign", "with_sign(x, w)), vf{})", "x), vf{})"),
        ("inputs are read without their sign, portable", "(x << (24 - 8 * i) >> 24)", "(x >> 8 * i & 255)",
         "portable"),
    ],
    "cpu/linear/panel_floats.h": [
        ("the high half of a byte is the low one, inputs as they are", "high = (all >> 4) & 0x0f0f0f0f;",
         "high = all & 0x0f0f0f0f;"),
        ("the upper bits of the first 16 inputs, 3 bits, inputs as they are",
         "upper >>= static_cast<int>(k % l.chunk / 4);", "upper >>= 0;"),
    ],
    "cpu/linear/packed.h": [
        ("halves of a byte in the other order, inputs as they are",
         "out[i] = static_cast<float>(byte & 15) * s + o, out[i + 1] = static_cast<float>(byte >> 4) * s + o;",
         "out[i] = static_cast<float>(byte >> 4) * s + o, out[i + 1] = static_cast<float>(byte & 15) * s + o;"),
        ("the zero point is dropped", "offset[i] *= -scale[i];", "offset[i] *= 0.0f;"),
        ("signed numbers with a minimum keep their excess", "offset[i] -= static_cast<float>(excess) * scale[i];",
         "offset[i] -= 0.0f;"),
    ],
    "cpu/linear/linear.cpp": [
        ("the gate has the weight's numbers", "few_products(a.gate, column, count, g)",
         "few_products(p.weight, column, count, g)"),
        ("every block of inputs is the first", "unpack_panel(weight, l, (column + j) / kPanelColumns, first,",
         "unpack_panel(weight, l, (column + j) / kPanelColumns, 0,"),
        ("the gate has the product's adapter", "adapted.add(a.count, row,", "adapted.add(0, row,"),
    ],
    "cpu/linear/low_rank.h": [
        ("an adapter's factor is dropped", "tile[k * kColumns + j] * static_cast<float>(factor[j])",
         "tile[k * kColumns + j]"),
        ("an adapter's products go to the first one's outputs", "+ range.from * outputs + column", "+ column"),
        ("every sequence has the first one's adapter", "ranges_[row / a_.tokens]", "ranges_[0]"),
        ("an adapter's last rows are lost", "(rank_ + kColumns - 1) / kColumns", "rank_ / kColumns"),
        ("an adapter's first row is lost", "++range.from, --range.rows;", "range.from += 2, range.rows -= 2;"),
        ("a few columns have the change of the first row", "sum[j] += n[r] * static_cast",
         "sum[j] += n[0] * static_cast"),
    ],
    "cpu/linear/amx.h": [
        ("tiles: inputs of the first block", "panel.unit(first + k, 0, v)", "panel.unit(k, 0, v)", "amx"),
        ("tiles: inputs of a pair in the other order", "_mm512_cvtne2ps_pbh((__m512)v[j + 1], (__m512)v[j])",
         "_mm512_cvtne2ps_pbh((__m512)v[j], (__m512)v[j + 1])", "amx"),
    ],
    "cpu/attention/attention.h": [
        ("new tokens have the scales of the first head", "new_scales.key + index * t,", "new_scales.key,"),
    ],
    "cpu/attention/quantized.h": [
        ("new rows are not rotated", "hadamard(wide, size);", ""),
        ("the output is not rotated back", "hadamard(from, call.value_size);", ""),
    ],
    "cpu/core/quantized.h": [
        ("numbers are cut off, not rounded", "static_cast<int>(x + 12582912.0f - 12582912.0f)", "static_cast<int>(x)"),
    ],
    "cpu/attention/decode.h": [
        ("keys have the values' scales, decode", "this->scales_of(head, head.key_scale, from",
         "this->scales_of(head, head.value_scale, from"),
    ],
    "cpu/attention/prefill.h": [
        ("values have the keys' scales, prefill", "value_scale[c], dv,", "key_scale[c], dv,"),
    ],
    "cpu/merge/merge_cache.cpp": [
        ("a slot that moves leaves its scale behind", "head.out_key_scale, from, to", "head.out_key_scale, to, to"),
    ],
}

# Bugs of the CUDA kernels: name, text, its replacement (of as many lines), key of UNITS. Bugs that exist only on a GPU
# name the call of tests/conformance/ptx_mutants.py that runs them.
CUDA: dict[str, list[tuple[str, ...]]] = {
    "cuda/core/block.h": [
        ("splits are published without a fence", "    __threadfence();  // what this thread wrote",
         "    // what this thread wrote", "attention", "Decode<float, 4>"),
        ("a ticket is read before it is drawn", "__syncthreads();  // `before` is written", "", "attention",
         "DecodeMma<Half, 128>"),
        ("the last block reads splits without a fence", "*counter = 0;\n    __threadfence();", "*counter = 0;\n",
         "attention", "DecodeMma<Half, 128>"),
        ("tickets are drawn by no atomic operation", "before = atomicAdd(counter, 1);", "before = (*counter)++;",
         "quantized", "DecodeQuantized<8, 4, 128>"),
        ("copies are waited for by their own thread alone",
         'asm volatile("cp.async.wait_group 2;" ::: "memory");\n    __syncthreads();',
         'asm volatile("cp.async.wait_group 2;" ::: "memory");\n', "attention", "Decode<float, 4>"),
        ("the end of the used slots is looked for before it is unknown",
         "block.each([&](int t, auto&) {\n    if (t < 2) ends[t] = capacity;",
         "block.each_alone([&](int t, auto&) {\n    if (t < 2) ends[t] = capacity;", "merge", "Rank"),
        ("kernels do not wait for earlier launches", "block.wait_for_earlier();\n  Kernel::run", "Kernel::run",
         "merge", "Order"),
        ("a split ends a block early", "(max_of(items, 0) + unit - 1) / unit,", "max_of(items, 0) / unit,",
         "attention"),
    ],
    "cuda/attention/prefill_mma.h": [
        ("prefill multiplies values that are on their way", "block.cp_async_wait(0);  // the values are there",
         "block.each([](int, auto&) {});  // values;", "attention", "PrefillMma<Half, 64>"),
        ("every lane counts the sink", "sinks && t % 4 == 0 ? 1.0f", "sinks ? 1.0f", "attention"),
        ("a block whose last row sees less is not masked",
         "!visible(r.position, w.first + w.tokens(w.end - 1), window)", "false", "attention"),
    ],
    "cuda/attention/prefill_mma_scores.h": [
        ("the statistics' rows are not waited for", "block.cp_async_wait(0);  // these rows are there",
         "block.each([](int, auto&) {});  // these rows;", "attention", "PrefillMma<Half, 64>"),
    ],
    "cuda/attention/prefill.h": [
        ("prefill multiplies keys that are being loaded",
         "block.each([&](int t, auto&) { tile.load_keys(head, used, from, count, t, kThreads); });",
         "block.each_alone([&](int t, auto&) { tile.load_keys(head, used, from, count, t, kThreads); });", "attention",
         "Prefill<float, 1>"),
    ],
    "cuda/merge/select.h": [
        ("counts of the radix select are added to before they are zero",
         "block.each([&](int t, auto&) { s.counts[t] = 0; });",
         "block.each_alone([&](int t, auto&) { s.counts[t] = 0; });", "merge", "Rank"),
        ("of equals the last are evicted", "equal++ < left", "equal++ >= r.count + r.scanned - left", "merge"),
        ("recent slots are one fewer", "now - head.own.recent)", "now - head.own.recent + 1)", "merge"),
        ("pooling reaches one position less", "p.pooled / 2", "(p.pooled - 1) / 2 - 1", "merge"),
        ("a slot as important as one of the pool is an upper one", "[i] > highest", "[i] >= highest", "merge"),
    ],
    "cuda/merge/positions.h": [
        ("bits of positions are set before all are zero",
         "block.each([&](int t, auto&) {\n      for (int i = t; i < kWords; i += kThreads) s.bits[i]",
         "block.each_alone([&](int t, auto&) {\n      for (int i = t; i < kWords; i += kThreads) s.bits[i]", "merge",
         "Place"),
        ("a position's own bit counts", "(1u << at % 32) - 1", "(2u << at % 32) - 1", "merge"),
    ],
    "cuda/merge/nearest_mma.h": [
        ("a stage of targets is not waited for", "block.cp_async_wait(kStages - 2);", "block.each([](int, auto&) {});",
         "merge", "NearestMma<Half, true, 2>"),
        ("targets' squares are used before they are there",
         "block.each([](int, auto&) {});\n  }\n\n  // Multiplies a warp's rows with 16 targets",
         "block.each_alone([](int, auto&) {});\n  }\n\n  // Multiplies a warp's rows with 16 targets", "merge",
         "NearestMma<Half, true, 2>"),
        ("of the rest of the pool all are of higher importance", "if (target.importance > s.row_importance",
         "if (true || target.importance > s.row_importance", "merge"),
        ("distances forget the target's square", "-INFINITY : distance ? -x : 0.0f;", "-INFINITY : 0.0f;", "merge"),
    ],
    "cuda/merge/nearest.h": [
        ("targets' squares are read before they are whole, float32",
         "block.each([&](int t, auto&) {\n        keys.target_square[t]",
         "block.each_alone([&](int t, auto&) {\n        keys.target_square[t]", "merge", "Nearest<float, false>"),
        ("of equal targets of a split the last", "candidates.place[i] < place", "candidates.place[i] > place", "merge"),
        ("the rest of the targets is forgotten", "slots = 0, rest = x.rest;", "slots = 0;", "merge"),
    ],
    "cuda/merge/sets.h": [
        ("means are taken before the weights are there", "block.each([&](int t, auto&) {\n      if (t == 0) weigh(",
         "block.each_alone([&](int t, auto&) {\n      if (t == 0) weigh(", "merge", "MergeRows<Half>"),
        ("of equal targets an upper one", "upper_near == near && upper < target", "upper_near == near", "merge"),
        ("upper slots are no targets", "upper_near > near ||", "", "merge"),
        ("a merged entry is as old as its target", "head.position(latest);", "head.position(s.member[0]);", "merge"),
        ("votes have no bound", "fminf(votes, p.votes_max)", "votes", "merge"),
    ],
    "cuda/merge/place.h": [
        ("holes are filled while entries are written",
         "block.each([&](int t, auto&) {\n      for (int row = t; row < x.in_all; row += kThreads) "
         "entry[row] = kNone;",
         "block.each_alone([&](int t, auto&) {\n      for (int row = t; row < x.in_all; row += kThreads) "
         "entry[row] = kNone;", "merge", "Place"),
        ("rows behind the budget stay", "row < end; row += kThreads", "row < end - 1; row += kThreads", "merge"),
        ("an entry that moves keeps its votes behind", "for (int k = -1; k < a.statistics; ++k)\n          column",
         "for (int k = 0; k < a.statistics; ++k)\n          column", "merge"),
    ],
    "cuda/attention/attention.h": [
        ("every sequence takes the slots of the first", "slots(static_cast<size_t>(part.batch) *",
         "slots(static_cast<size_t>(part.batch * 0) *", "attention"),
        ("a head takes the slots of the first head of its entry", "offset = heads.offset + number * capacity;",
         "offset = heads.offset;", "attention"),
        ("a window is one slot longer", "position > now - window", "position >= now - window", "attention"),
    ],
    "cuda/core/table.h": [
        ("a block finds the head before its own", "if (block >= start[entry + step]) entry += step;",
         "if (block > start[entry + step]) entry += step;", "attention"),
    ],
    "cuda/attention/plan.h": [
        ("heads of the second table are named as those of the first", "= {first, equal ?", "= {entries, equal ?",
         "attention"),
        ("averages count a group as one head", "- std::log(static_cast<float>(a.query_heads / a.heads));", "- 0.0f;",
         "attention"),
    ],
    "cuda/merge/work.h": [
        ("a head's targets have as many splits as the largest head's", "head.own.blocks / (rows",
         "head.work.entry[0].blocks / (rows", "merge"),
        ("of equal targets of two splits the last", "head.work.nearness[at] > best", "head.work.nearness[at] >= best",
         "merge"),
    ],
    "cuda/attention/decode.h": [
        ("sums of probabilities do not decay", "[slot] * statistic.decay", "[slot]", "attention"),
        ("what an idle lane leaves is stale", "args.used[2 * head.index + 1] = 0;", "(void)0;", "attention"),
        ("a sink is left out of the sum", "a.sink_logits && t % kWarp == 0 ? expf",
         "a.sink_logits && t % kWarp < 0 ? expf", "attention"),
        ("the last split is not combined", "sum[j] = split + i < splits ? sum[j] +",
         "sum[j] = split + i < splits - 1 ? sum[j] +", "attention"),
    ],
}
# fmt: on
