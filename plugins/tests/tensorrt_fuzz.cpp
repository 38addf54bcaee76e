// Random fields for the creators of the TensorRT plugins, and random tensors for their plugins. Every change to a valid
// collection of fields must be refused, or must change nothing, or is random bytes, for which only memory is checked.
// The fields that an engine serializes are changed in the same way, and a plugin is created from them.
//
//   tensorrt_fuzz SEED CASES
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tensorrt_fields.h"

using namespace harness;

namespace {

enum Verdict { kSame, kRefused, kEither };

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  size_t below(size_t n) { return engine_() % n; }

 private:
  std::mt19937_64 engine_;
};

// A collection whose memory has exactly the length that its fields give.
class Collection {
 public:
  explicit Collection(const Items& items) {
    for (const Item& item : items) {
      data_.emplace_back(new char[item.bytes.size()]);
      memcpy(data_.back().get(), item.bytes.data(), item.bytes.size());
      fields_.emplace_back(item.has_name ? item.name.c_str() : nullptr, item.has_data ? data_.back().get() : nullptr,
                           item.type, item.length);
    }
    all_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  PluginFieldCollection* all() { return &all_; }

 private:
  std::vector<std::unique_ptr<char[]>> data_;
  std::vector<PluginField> fields_;
  PluginFieldCollection all_;
};

Items items_of(const PluginFieldCollection* fields) {
  Items items;
  for (const PluginField* f = fields->fields; f < fields->fields + fields->nbFields; ++f) {
    const size_t size = f->type == PluginFieldType::kCHAR ? 1 : f->type == PluginFieldType::kINT64 ? 8 : 4;
    items.push_back({f->name, f->type, f->length, std::string(static_cast<const char*>(f->data), f->length * size)});
  }
  return items;
}

// Replaces a value by one that the attribute may not have, of the right type; returns false if every value is valid.
bool spoil(Random& random, Item& item) {
  if (item.type == PluginFieldType::kFLOAT32) {
    // Attributes have bounds such as (0, 1), (0, 1], above 0, at least 0, at least 1, or none.
    std::vector<float> bad = {NAN};
    const std::string& name = item.name;
    if (name == "decay" || name == "select_decay" || name == "weigh_decay" || name == "residual") bad = {-1, 0, 2, NAN};
    if (name == "recency_weight") bad = {-1, 0};
    if (name == "softcap" || name == "tau" || name == "error_exponent" || name == "limit" || name == "epsilon")
      bad = {-1, NAN};
    if (name == "key_factor_max" || name == "votes_max") bad = {-1, 0, 0.5f, NAN};
    if (name == "inverse_frequencies") return false;
    const float x = bad[random.below(bad.size())];
    memcpy(&item.bytes[0], &x, sizeof x);
  } else if (item.type == PluginFieldType::kINT32) {
    const bool from_one =
        item.name == "budget" || item.name == "capacity" || item.name == "pooled" || item.name == "eviction_pool";
    const int32_t x = item.name == "share_pairs" ? 1 : from_one ? 0 : -1;
    memcpy(&item.bytes[0], &x, sizeof x);
  } else {
    item.bytes[random.below(item.bytes.size() - 1)] = '?';
  }
  return true;
}

// Changes the items; returns the verdict that must follow.
Verdict mutate(Random& random, Items& items) {
  const size_t at = random.below(items.size());
  Item& item = items[at];
  const bool optional = item.name == "capacity" || item.name == "inverse_frequencies" ||
                        item.name == "rotary_interleaved" || item.name == "cache_positions";
  switch (random.below(16)) {
    case 0:
      return kSame;
    case 1:
      for (size_t i = items.size() - 1; i > 0; --i) std::swap(items[i], items[random.below(i + 1)]);
      return kSame;
    case 2:
      items.push_back(real("another", {1, 2, 3}));
      return kRefused;
    case 3:
      if (item.type != PluginFieldType::kINT32) return kSame;
      {
        std::vector<int64_t> wide;
        for (int32_t i = 0; i < item.length; ++i) {
          int32_t x;
          memcpy(&x, &item.bytes[4 * i], sizeof x);
          wide.push_back(x);
        }
        item.type = PluginFieldType::kINT64, item.bytes = bytes_of(wide);
      }
      return kSame;
    case 4:
      if (item.type == PluginFieldType::kCHAR) item.bytes.pop_back(), --item.length;
      return kSame;
    case 5:
      if (optional) return kSame;
      items.erase(items.begin() + at);
      return kRefused;
    case 6: {
      const bool is_real = item.type == PluginFieldType::kFLOAT32;
      item.type = is_real ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
      item.length = static_cast<int32_t>(item.bytes.size() / 4), item.bytes.resize(4 * item.length);
      return kRefused;
    }
    case 7:
      if (item.name == "inverse_frequencies") return kSame;
      item.length = 0, item.bytes.clear();
      return kRefused;
    case 8:
      if (item.type == PluginFieldType::kCHAR || item.name == "inverse_frequencies") return kSame;
      ++item.length, item.bytes += std::string(4, '\0');
      return kRefused;
    case 9:
      return spoil(random, item) ? kRefused : kSame;
    case 10:
      items.push_back(Item(item));
      return kRefused;
    case 11:
      item.has_data = false;
      return kRefused;
    case 12:
      item.has_name = false;
      return kRefused;
    case 13: {
      const int32_t lengths[] = {-1, -2147483647 - 1, 2147483647, 1 << 20};
      item.length = lengths[random.below(4)];
      return kRefused;
    }
    case 14: {
      const int32_t types[] = {-1, 0, 2, 3, 4, 7, 8, 9, 11, 99};
      item.type = static_cast<PluginFieldType>(types[random.below(10)]);
      return kRefused;
    }
    default:
      for (size_t n = 1 + random.below(4); n > 0 && !item.bytes.empty(); --n)
        item.bytes[random.below(item.bytes.size())] = static_cast<char>(random.below(256));
      return kEither;
  }
}

struct Tested {
  const char* op;
  Items (*fields)(size_t which);
  int32_t outputs;
  std::vector<std::vector<int64_t>> inputs;  // usual shapes; a random choice leaves out the last ones
  size_t optional;
};
const std::vector<int64_t> kKey = {2, 128, 8}, kSlots = {2, 128};

const std::vector<Tested> kTested = {
    {"VoteAttention",
     [](size_t) { return vote_attention(); },
     6,
     {{2, 4, 3, 8}, {2, 2, 3, 8}, {2, 2, 3, 8}, {2, 3}, {2, 1}, kKey, kKey, kSlots, {2, 2, 128}, kSlots, {4}},
     1},
    {"MergeCache", merge_cache, 5, {kKey, kKey, kSlots, {2, 1, 128}, kSlots}, 0},
};

// Gives the plugin tensors of nearly the right shapes; any answer is allowed.
void drive(Random& random, IPluginV3* plugin, const Tested& tested) {
  const int64_t sizes[] = {-1, 0, 1, 2, 4, 8, 16, 64, 256, int64_t{1} << 33, -7};
  const size_t rarely = 2 * tested.inputs.size();  // so that many calls of many tensors pass the checks
  const auto size = [&](int64_t usual) { return random.below(rarely) ? usual : sizes[random.below(11)]; };
  const auto dims = [&](std::vector<int64_t> usual) {
    Dims d{};
    d.nbDims =
        random.below(2 * rarely) ? static_cast<int32_t>(usual.size()) : static_cast<int32_t>(random.below(11)) - 1;
    for (int32_t i = 0; i < 8; ++i) d.d[i] = size(i < static_cast<int32_t>(usual.size()) ? usual[i] : 1);
    return d;
  };
  const std::vector<std::vector<int64_t>>& usual = tested.inputs;
  const int32_t outputs = tested.outputs;
  const int32_t inputs =
      static_cast<int32_t>(usual.size() - random.below(tested.optional + 1)) - (random.below(20) == 0);
  std::vector<DynamicPluginTensorDesc> open;
  std::vector<PluginTensorDesc> fixed;
  std::vector<DataType> types;
  Expressions expressions;
  std::vector<DimsExprs> shapes(inputs), answer(outputs);
  for (int32_t i = 0; i < inputs + outputs; ++i) {
    const Dims d = dims(usual[std::min<size_t>(i, usual.size() - 1)]);
    fixed.push_back({d, static_cast<DataType>(random.below(12)), static_cast<TensorFormat>(random.below(3)), 1.0f});
    open.push_back({fixed.back(), dims({1}), random.below(4) ? d : dims({2, 2}), d});
    types.push_back(fixed.back().type);
    if (i >= inputs) continue;
    shapes[i].nbDims = d.nbDims;
    for (int32_t k = 0; k < d.nbDims && k < 8; ++k) shapes[i].d[k] = expressions.constant(d.d[k]);
  }
  IPluginV3OneBuild* build = build_of(plugin);
  build->getOutputShapes(shapes.data(), inputs, nullptr, 0, answer.data(), outputs, expressions);
  build->getOutputDataTypes(types.data(), outputs, std::vector<DataType>(types).data(), inputs);
  build->supportsFormatCombination(static_cast<int32_t>(random.below(14)) - 1, open.data(), inputs, outputs);
  build->configurePlugin(open.data(), inputs, open.data() + inputs, outputs);
  build->getWorkspaceSize(open.data(), inputs, open.data() + inputs, outputs);
  runtime_of(plugin)->onShapeChange(fixed.data(), inputs, fixed.data() + inputs, outputs);
}

struct Counts {
  size_t accepted = 0, refused = 0, wrong = 0;
};

// Returns the creator's plugin for `items`, and counts it as wrong if it contradicts the verdict. text: the timing
// cache id of the unchanged collection.
std::unique_ptr<IPluginV3> create(Verdict verdict, Items items, const char* op, TensorRTPhase phase,
                                  const std::string& text, Log& log, Counts& counts) {
  Collection collection(items);
  log.lines.clear();
  std::unique_ptr<IPluginV3> plugin(creator(op)->createPlugin("layer", collection.all(), phase));
  ++(plugin ? counts.accepted : counts.refused);
  const bool right =
      plugin ? log.lines.empty() && verdict != kRefused &&
                   (verdict == kEither || text.empty() || text == build_of(plugin.get())->getTimingCacheID())
             : verdict != kSame && log.lines.rfind(std::string("kvexport: ") + op + ": ", 0) == 0;
  if (!right) {
    ++counts.wrong;
    fprintf(stderr, "%s, %s: %s\n", op, plugin ? "accepted" : "refused", log.lines.c_str());
    for (const Item& item : items)
      fprintf(stderr, "  %s type %d length %d\n", item.name.c_str(), static_cast<int>(item.type), item.length);
  }
  return plugin;
}

void run_case(uint64_t seed, Log& log, Counts& counts) {
  Random random(seed);
  const Tested& tested = kTested[random.below(kTested.size())];
  const char* op = tested.op;
  const Items good = tested.fields(random.below(64));
  const std::unique_ptr<IPluginV3> original = create(kSame, good, op, TensorRTPhase::kBUILD, "", log, counts);
  if (!original) return;
  const std::string text = build_of(original.get())->getTimingCacheID();
  Items changed = good;
  const Verdict verdict = mutate(random, changed);
  const auto plugin = create(verdict, changed, op, TensorRTPhase::kBUILD, text, log, counts);
  IPluginV3* one = plugin ? plugin.get() : original.get();
  const std::unique_ptr<IPluginV3> clone(one->clone()), attached(runtime_of(one)->attachToContext(nullptr));
  // The serialized fields must be accepted; then they are changed.
  const Items serialized = items_of(runtime_of(clone.get())->getFieldsToSerialize());
  const std::string own = build_of(one)->getTimingCacheID();
  const auto again = create(kSame, serialized, op, TensorRTPhase::kRUNTIME, own, log, counts);
  if (again) drive(random, again.get(), tested);
  if (attached) drive(random, attached.get(), tested);
  Items mutated = items_of(runtime_of(original.get())->getFieldsToSerialize());
  const Verdict expected = mutate(random, mutated);
  create(expected, mutated, op, TensorRTPhase::kRUNTIME, text, log, counts);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    fprintf(stderr, "tensorrt_fuzz SEED CASES\n");
    return 2;
  }
  Log log;
  setLoggerFinder(&log);
  Counts counts;
  const uint64_t seed = strtoull(arguments[1], nullptr, 10), cases = strtoull(arguments[2], nullptr, 10);
  for (uint64_t i = 0; i < cases; ++i) {
    run_case(seed + i, log, counts);
    if (counts.wrong > 0) {
      fprintf(stderr, "tensorrt_fuzz %llu 1\n", static_cast<unsigned long long>(seed + i));
      return 1;
    }
  }
  // No collection, a negative count, and a collection without memory.
  PluginFieldCollection none{-1, nullptr}, nowhere{3, nullptr};
  for (const PluginFieldCollection* bad : {static_cast<PluginFieldCollection*>(nullptr), &none, &nowhere})
    for (const char* op : {"VoteAttention", "MergeCache"})
      if (creator(op)->createPlugin("layer", bad, TensorRTPhase::kBUILD)) return 1;
  printf("%zu accepted, %zu refused\n", counts.accepted, counts.refused);
  return 0;
}
