#include <algorithm>
#include <functional>
#include <set>

#include <doctest/doctest.h>

#include "core/error.h"
#include "model/native/ends.h"
#include "model/native/layer.h"
#include "tests/program/compare.h"
#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::model;
using config::Build;
using config::LayerKind;
using config::MlpKind;

namespace {

class NoScratch : public Provider {
public:
  std::string_view name() const override { return "none"; }
  Work work(const OpList&, const Op&, int) const override { return {}; }
};

// x (10 bytes) -> op0 -> a (20) -> op1 -> b (30); op0's wgrad reads x, op1's backward reads a.
OpList two_ops() {
  Builder b("two");
  TensorId x = b.input("x", DType::BF16, {1, 5});
  TensorId a = b.tensor("a", DType::BF16, {1, 10}), out = b.tensor("b", DType::BF16, {1, 15});
  b.op("op0", OpKind::Toy, {x}, {a}).params = {{"w", 1}};
  b.list().ops.back().steps = {{.name = "dgrad", .grad_reads = {a}, .grad_writes = {x}},
                               {.name = "wgrad", .reads = {x}, .grad_reads = {a}, .param_grads = {0}}};
  b.op("op1", OpKind::Toy, {a}, {out}).steps = {{.name = "backward", .reads = {a}, .grad_reads = {out}, .grad_writes = {a}}};
  return b.finish(out, 1);
}

std::vector<Bytes> levels_of(const OpList& list, const std::vector<Span>& spans) {
  const NoScratch none;
  const program::UnitTrace t = program::trace(list, spans, none);
  CHECK(brute::difference(t, spans, brute::execute_alone(list, spans, none)) == "");
  return program::levels(t).at_event;
}

// A real list under modules, as a case of the comparison with the brute-force interpreter.
std::string difference(const OpList& list, const std::vector<Span>& spans, bool module_alone = false) {
  toy::Case c{0, list, spans, {}};
  c.options.external_output_gradient = module_alone;
  return brute::difference(c, upstream_provider());
}

std::string refusal(const OpList& list, const std::vector<Span>& spans) {
  try {
    program::trace(list, spans, toy::hashed_scratch());
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::Config);
    return e.what();
  }
  return "";
}

} // namespace

TEST_CASE("levels of two ops, by hand") {
  const OpList list = two_ops();
  constexpr SpanKind kWhole = SpanKind::WholeBlock, kDiscard = SpanKind::DiscardOutput;
  constexpr ReplayExtent kAll = ReplayExtent::All, kNeeded = ReplayExtent::Needed;
  using Row = std::vector<Bytes>;
  // forward op0, op1; backward op1, op0.dgrad, op0.wgrad
  CHECK(levels_of(list, {}) == Row{10 + 20, 10 + 20 + 30, 10 + 20 + 30 + 20, 10 + 20 + 10, 10 + 20 + 10});
  // Replays of op0 and op1 come first; the new b and d:b are held until the span's backward has ended.
  CHECK(levels_of(list, {{"s", 0, 1, kWhole, -1, kAll, true}}) ==
        Row{30, 60, 10 + 30 + 20, 10 + 30 + 20 + 30, 10 + 20 + 30 + 30 + 20, 10 + 30 + 30 + 20 + 10, 10 + 30 + 30 + 20 + 10});
  CHECK(levels_of(list, {{"s", 0, 1, kWhole, -1, kAll, false}}) == Row{30, 60, 60, 90, 80, 40, 40});
  // Nobody needs b again: op1 is not replayed.
  CHECK(levels_of(list, {{"s", 0, 1, kWhole, -1, kNeeded, false}}) == Row{30, 60, 60, 80, 40, 40});
  // a goes after op1 and comes back before op1's backward; a checkpoint keeps it until op0's has ended.
  CHECK(levels_of(list, {{"s", 0, 0, kDiscard, 1, kAll, true}}) == Row{30, 60, 60, 80, 10 + 20 + 20 + 10, 60});
  CHECK(levels_of(list, {{"s", 0, 0, kDiscard, 1, kAll, false}}) == Row{30, 60, 60, 80, 40, 40});
}

TEST_CASE("a new span on a real layer is one line of data, and its bytes follow") {
  const config::Model m = test::reference_model();
  const config::Run run = test::one_gpu(Build::Local);
  const OpList list = megatron::module_list(m, run, "gdn");
  const Bytes tokens = 8192, input = 2 * 2048; // x is the caller's
  auto measure = [&](const std::vector<Span>& spans) {
    CHECK(difference(list, spans, true) == "");
    test::Traced t = test::traced(list, spans, true);
    return std::pair{t.levels.retained / tokens - input, std::max(t.levels.backward.bytes, t.levels.replay.bytes) / tokens};
  };
  // From the user's side: --span toy=rule..gated_norm.
  const std::vector<Span> toy = spans_for(list, {}, {{"toy", "rule", "gated_norm", false}}, "megatron");
  REQUIRE(toy.size() == 1);
  const auto [none, none_peak] = measure({});
  const auto [with, peak] = measure(toy);
  CHECK(none == 86592);
  CHECK(none_peak == 189184);
  // Freed: o, g_cum, A, o_rstd. Kept for the replay alone: g. v, q, k, beta, z are kept either way.
  const Bytes v = 4096, hv = 32;
  CHECK(with == none - (2 * v + 4 * hv + 128 * hv + 4 * hv) + 4 * hv);
  // The rule's backward runs beside the span's new output and its gradient.
  CHECK(peak == none_peak + 2 * v + 2 * v);
  // A span that frees nothing: what it makes is kept by its readers, its argument already was.
  CHECK(measure(spans_for(list, {}, {{"useless", "copy_z", "copy_z", false}}, "megatron")).first == none);
}

TEST_CASE("more spans, a higher peak") {
  const config::Model m = test::reference_model();
  const OpList list = megatron::module_list(m, test::one_gpu(Build::Local, "main+gdn_qkv"), "gdn");
  auto measure = [&](const std::vector<std::string>& modules) {
    const test::Traced t = test::traced(list, modules, true);
    return std::pair{t.levels.retained / 8192 - 2 * 2048, std::max(t.levels.backward.bytes, t.levels.replay.bytes) / 8192};
  };
  // 2 V + 4 Hv above: the replay's checkpoint refers to z and g while the rule's backward runs.
  CHECK(measure({}) == std::pair<Bytes, Bytes>{86592, 189184});
  CHECK(measure({"gdn_qkv:discard"}) == std::pair<Bytes, Bytes>{20736, 197504});
  CHECK(measure({"gdn_norm_out"}).second == 189184);
  CHECK(measure({"gdn_norm_out", "gdn_qkv:discard"}) == std::pair<Bytes, Bytes>{12416, 197504});
}

TEST_CASE("illegal spans are refused by name") {
  const OpList list = megatron::module_list(test::reference_model(), test::one_gpu(Build::Local, "main", 128), "gdn");
  auto at = [&](const char* op) { return list.find_op(op); };
  auto whole = [&](const char* name, const char* first, const char* last) { return Span{name, at(first), at(last)}; };
  auto discard = [&](const char* name, const char* first, const char* last, const char* hook) {
    return Span{name, at(first), at(last), SpanKind::DiscardOutput, at(hook)};
  };
  auto says = [](const std::string& text, std::initializer_list<const char*> words) {
    CAPTURE(text);
    for (const char* word : words) CHECK(text.find(word) != std::string::npos);
  };
  says(refusal(list, {whole("left", "in_proj", "gates"), whole("right", "conv1d", "rule")}), {"left", "right", "overlap"});
  says(refusal(list, {discard("early", "rule", "gated_norm", "conv1d")}), {"early", "conv1d"});
  says(refusal(list, {whole("outer", "in_proj", "gates"), discard("inner", "conv1d", "conv1d", "out_proj")}), {"inner", "outer", "out_proj"});
  says(refusal(list, {discard("last", "rule", "out_proj", "out_proj")}), {"last"});
  // q is read by the rule, after its hook.
  says(refusal(list, {discard("soon", "expand_q", "expand_q", "copy_v")}), {"'q'", "copy_v", "rule", "before it is replayed"});
  // A view is not the span's to drop: proj is made before it.
  says(refusal(list, {discard("view", "split_qk", "split_qk", "rule")}), {"view", "which it does not make"});
  // b's replay reads what a only brings back later.
  says(refusal(list, {discard("a", "rule", "rule", "gated_norm"), discard("b", "gated_norm", "gated_norm", "out_proj")}),
       {"'o'", "replay(b)", "before it is replayed"});
  CHECK(refusal(list, {whole("one", "in_proj", "gates"), discard("two", "gated_norm", "hp2cp.transpose", "out_proj")}) == "");
  // The interpreter refuses the same.
  for (const std::vector<Span>& spans : {std::vector<Span>{whole("left", "in_proj", "gates"), whole("right", "conv1d", "rule")},
                                         {discard("soon", "expand_q", "expand_q", "copy_v")},
                                         {discard("view", "split_qk", "split_qk", "rule")}})
    CHECK(difference(list, spans, true) == "");
}

TEST_CASE("every module, and every pair, on Megatron's real layers: engine = brute force") {
  const config::Model m = test::reference_model();
  std::vector<std::string> modules;
  for (const SpanSpec& s : megatron_spans())
    if (std::find(modules.begin(), modules.end(), s.module) == modules.end()) modules.push_back(s.module);
  int compared = 0;
  for (Build build : {Build::Local, Build::Te})
    for (auto [mixer, mlp] : {std::pair{LayerKind::Gdn, MlpKind::Moe}, {LayerKind::Attention, MlpKind::Moe}, {LayerKind::Gdn, MlpKind::Dense}}) {
      const OpList list = megatron::decoder_layer(m, test::one_gpu(build, "main", 128), mixer, mlp);
      std::set<std::vector<int>> seen; // most pairs do not act on most layers
      for (size_t i = 0; i < modules.size(); ++i)
        for (size_t j = i; j < modules.size(); ++j) {
          const std::vector<Span> spans = spans_for(list, {modules[i], modules[j]}, {}, "megatron");
          std::vector<int> key;
          for (const Span& s : spans) key.insert(key.end(), {s.first, s.last, static_cast<int>(s.kind), s.hook});
          if (!seen.insert(key).second) continue;
          CAPTURE(list.name);
          CAPTURE(modules[i]);
          CAPTURE(modules[j]);
          CHECK(difference(list, spans) == "");
          ++compared;
        }
      CHECK(difference(list, full_spans(list, "megatron")) == "");
    }
  CHECK(compared >= 60);
}

TEST_CASE("native layers with their default spans, and under one whole block: engine = brute force") {
  const config::Model m = test::reference_model();
  config::Run run = test::one_gpu(Build::Te, "main", 128);
  run.stack = "native";
  for (auto [mixer, mlp] : {std::pair{LayerKind::Gdn, MlpKind::Moe}, {LayerKind::Attention, MlpKind::Dense}}) {
    const OpList list = native::decoder_layer(m, run, mixer, mlp);
    CAPTURE(list.name);
    CHECK(difference(list, {}) == "");
    CHECK(difference(list, spans_for(list, {}, {}, "native")) == "");
    CHECK(difference(list, full_spans(list, "native")) == "");
  }
}

namespace {

// A gradient that goes on under another name (x + y: d:x and d:y are d:out) may be added to under one
// name only once nobody reads it under the other. Names the offender; empty when sound.
std::string unsound_alias(const OpList& list) {
  const program::UnitTrace t = program::trace(list, {}, upstream_provider());
  auto root = [&](TensorId id) {
    while (list.tensor(id).base >= 0 && list.tensor(id).gradient == GradientStorage::Slice) id = list.tensor(id).base;
    return id;
  };
  // Whether d:`input` is d:`output` by one or more aliases.
  std::function<bool(TensorId, TensorId)> passes_to = [&](TensorId output, TensorId input) {
    if (output == input) return true;
    for (const Op& op : list.ops)
      for (const Op::GradAlias& a : op.grad_aliases)
        if (a.output == output && passes_to(a.input, input)) return true;
    return false;
  };
  std::vector<std::set<TensorId>> added(t.buffers.size());
  for (const program::Event& e : t.events)
    for (std::uint32_t i = e.first_access; i < e.first_access + e.access_count; ++i) {
      const program::Access& a = t.accesses[i];
      if (!a.gradient) continue;
      std::set<TensorId>& names = added[static_cast<size_t>(a.buffer)];
      if (a.mode == program::AccessMode::Read)
        for (TensorId name : names)
          if (!passes_to(name, root(a.tensor))) return list.tensor(a.tensor).name;
      if (a.mode == program::AccessMode::Accumulate) names.insert(root(a.tensor));
    }
  return "";
}

} // namespace

TEST_CASE("no gradient is added to under one name while it is still to be read under another") {
  const config::Model m = test::reference_model();
  const config::Run run = test::one_gpu(Build::Te, "main", 128);
  config::Run own = run;
  own.stack = "native";
  for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Attention})
    for (MlpKind mlp : {MlpKind::Moe, MlpKind::Dense}) {
      CHECK(unsound_alias(megatron::decoder_layer(m, run, mixer, mlp)) == "");
      CHECK(unsound_alias(native::decoder_layer(m, own, mixer, mlp)) == "");
    }
  // y = f(x) read by the sum after g has added to d:x: the check can fail.
  Builder b("unsound");
  TensorId x = b.input("x", DType::BF16, {1, 5});
  TensorId y = b.tensor("y", DType::BF16, {1, 5}), u = b.tensor("u", DType::BF16, {1, 5}), out = b.tensor("out", DType::BF16, {1, 5});
  b.op("f", OpKind::Toy, {x}, {y}).steps = {{.name = "backward", .grad_reads = {y}, .grad_writes = {x}}};
  b.op("g", OpKind::Toy, {x}, {u}).steps = {{.name = "backward", .grad_writes = {x}, .param_grads = {}}};
  b.op("sum", OpKind::ResidualAdd, {x, y}, {out}).grad_aliases = {{x, out}, {y, out}};
  CHECK(unsound_alias(b.finish(out, 1)) == "y");
}
