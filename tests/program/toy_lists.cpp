#include "tests/program/toy_lists.h"

#include <algorithm>

#include <fmt/format.h>

#include "model/builder.h"
#include "program/forest.h"

namespace gdn::toy {

using namespace gdn::model;

std::uint64_t Random::next() {
  std::uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

Work HashedScratch::work(const OpList&, const Op& op, int step) const {
  std::uint64_t hash = 1469598103934665603ull + static_cast<std::uint64_t>(step + 1);
  for (char c : op.name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  Random random(hash);
  Work work;
  if (op.kind == OpKind::Toy && random.chance(0.6)) work.scratch = 2 * random.between(1, 4000);
  return work;
}

const Provider& hashed_scratch() {
  static const HashedScratch provider;
  return provider;
}

namespace {

constexpr std::int64_t kRows = 4, kStream = 96; // shape of the residual stream

class Generator {
public:
  Generator(std::uint64_t seed, const Flavour& flavour)
      : random_(seed * 0x2545f4914f6cdd1dull + 77), flavour_(flavour), b_(fmt::format("toy{}", seed)) {
    case_.seed = seed;
  }

  Case run() {
    if (!flavour_.source && (flavour_.chain || random_.chance(0.85)))
      add(b_.input("x", DType::BF16, {kRows, kStream}, !flavour_.chain && random_.chance(0.3)));
    const int ops = random_.between(3, 12);
    for (int i = 0; i < ops; ++i) body_op();
    const bool loss = flavour_.sink || (!flavour_.chain && random_.chance(0.15));
    TensorId output = loss ? -1 : last_op();
    if (loss) loss_op();
    if (random_.chance(0.2)) effect_op();
    holds(output);
    keep_aliases_legal();
    case_.list = b_.finish(output, kRows);
    case_.options.input_gradient = random_.chance(0.85);
    if (!flavour_.chain) {
      case_.options.external_output_gradient = random_.chance(0.3);
      case_.options.backward = random_.chance(0.97);
    }
    spans();
    return std::move(case_);
  }

private:
  // ------------------------------------------------------------------------------- ops ----

  std::string name(const char* prefix) { return fmt::format("{}{}", prefix, count_++); }
  void add(TensorId t) { known_.push_back(t); }
  const Tensor& at(TensorId t) { return b_.at(t); }

  TensorId pick() {
    const int n = static_cast<int>(known_.size());
    TensorId t = known_[static_cast<size_t>(random_.chance(0.65) ? std::max(0, n - 1 - random_.below(3)) : random_.below(n))];
    if (!random_.chance(0.06)) return t;
    // The same bytes under another name, which no op lists as an output.
    return b_.reshape(name("r"), t, at(t).shape, GradientStorage::Slice);
  }

  TensorId fresh(bool stream) {
    const DType dtype = !stream && random_.chance(0.3) ? DType::FP32 : DType::BF16;
    const std::int64_t cols = stream ? kStream : random_.between(1, 400);
    return b_.tensor(name("t"), dtype, {kRows, cols}, random_.chance(0.05) ? Category::Logits : Category::Activations);
  }

  void body_op() {
    if (!known_.empty() && random_.chance(0.15)) return view_op();
    if (!known_.empty() && random_.chance(0.15) && residual_op()) return;
    if (!known_.empty() && random_.chance(0.06)) return effect_op();
    std::vector<TensorId> outputs;
    for (int i = random_.chance(0.25) ? 2 : 1; i > 0; --i) outputs.push_back(fresh(random_.chance(0.4)));
    compute_op(inputs(), outputs, {});
    for (TensorId t : outputs) add(t);
  }

  std::vector<TensorId> inputs() {
    std::vector<TensorId> in;
    for (int i = known_.empty() ? 0 : random_.between(1, 3); i > 0; --i)
      if (TensorId t = pick(); std::find(in.begin(), in.end(), t) == in.end()) in.push_back(t);
    return in;
  }

  // Any inputs to any outputs, with statistics, parameters, one or more backward steps and pins.
  // `unread`: the list's output, which no step may read.
  void compute_op(std::vector<TensorId> in, std::vector<TensorId> out, std::vector<TensorId> unread) {
    std::vector<TensorId> touched = in, d_in, d_out = out;
    for (int i = random_.chance(0.3) ? random_.between(1, 2) : 0; i > 0; --i)
      out.push_back(b_.statistic(name("s"), DType::FP32, {kRows, random_.between(1, 40)}));
    for (TensorId t : in)
      if (at(t).differentiable) d_in.push_back(t);
    for (TensorId t : out)
      if (std::find(unread.begin(), unread.end(), t) == unread.end()) touched.push_back(t);
    Op& op = b_.op(name("op"), OpKind::Toy, in, out);
    for (int i = random_.below(3); i > 0; --i)
      op.params.push_back({fmt::format("{}.w{}", op.name, i), 8, DType::BF16, random_.chance(0.7)});
    auto reads = [&](double p) {
      std::vector<TensorId> r;
      for (TensorId t : touched)
        if (random_.chance(at(t).differentiable ? p : 0.6)) r.push_back(t);
      return r;
    };
    std::vector<int> params;
    for (size_t i = 0; i < op.params.size(); ++i) params.push_back(static_cast<int>(i));
    switch (random_.below(3)) {
    case 0:
      op.steps.push_back({.name = "backward", .reads = reads(0.45), .grad_reads = d_out, .grad_writes = d_in, .param_grads = params});
      break;
    case 1:
      op.steps.push_back({.name = "dgrad", .reads = reads(0.3), .grad_reads = d_out, .grad_writes = d_in});
      op.steps.push_back({.name = "wgrad", .reads = reads(0.5), .grad_reads = d_out, .param_grads = params});
      if (!d_in.empty() && random_.chance(0.1)) op.steps.back().grad_reads.push_back(d_in[0]);
      break;
    default:
      for (TensorId t : d_in)
        op.steps.push_back({.name = "d_" + at(t).name, .reads = reads(0.35), .grad_reads = d_out, .grad_writes = {t}});
      op.steps.push_back({.name = "wgrad", .reads = reads(0.35), .grad_reads = d_out, .param_grads = params});
    }
    if (random_.chance(0.15)) op.pins.push_back({touched[static_cast<size_t>(random_.below(static_cast<int>(touched.size())))], "held"});
    for (TensorId t : out)
      if (!at(t).differentiable && random_.chance(0.3)) add(t); // statistics feed later ops too
  }

  void view_op() {
    const TensorId base = known_[static_cast<size_t>(random_.below(static_cast<int>(known_.size())))];
    const std::int64_t cols = at(base).cols();
    if (cols < 2) return;
    const GradientStorage gradient = random_.chance(0.5) ? GradientStorage::Own : GradientStorage::Slice;
    const std::int64_t cut = 1 + random_.below(static_cast<int>(cols) - 1);
    std::vector<TensorId> views{b_.view(name("v"), base, 0, {kRows, cut}, gradient),
                                b_.view(name("v"), base, cut, {kRows, cols - cut}, gradient)};
    Op& op = b_.op(name("split"), OpKind::View, {base}, views);
    if (gradient == GradientStorage::Own && at(base).differentiable)
      op.steps.push_back({.name = "cat", .grad_reads = views, .grad_writes = {base}});
    for (TensorId t : views)
      if (random_.chance(0.85)) add(t);
  }

  bool residual_op() {
    const TensorId x = known_[static_cast<size_t>(random_.below(static_cast<int>(known_.size())))];
    for (TensorId y : known_)
      if (y != x && can_alias(x) && can_alias(y) && at(x).shape == at(y).shape && at(x).dtype == at(y).dtype) {
        TensorId sum = b_.tensor(name("t"), at(x).dtype, at(x).shape);
        b_.op(name("add"), OpKind::ResidualAdd, {x, y}, {sum}).grad_aliases = {{x, sum}, {y, sum}};
        add(sum);
        return true;
      }
    return false;
  }
  bool can_alias(TensorId t) { return at(t).base < 0 && at(t).differentiable; }

  void effect_op() { b_.op(name("count"), OpKind::Toy, inputs(), {}).effects = true; }

  void loss_op() {
    Op& op = b_.op("loss", OpKind::Toy, inputs(), {b_.statistic("loss_value", DType::FP32, {1})});
    Step step{.name = "backward", .reads = op.inputs};
    for (TensorId t : op.inputs)
      if (at(t).differentiable) step.grad_writes.push_back(t);
    // A fused loss writes the gradient of logits that nobody else reads over them.
    for (TensorId t : op.inputs) {
      int readers = 0;
      for (const Op& o : b_.list().ops)
        for (TensorId in : o.inputs) readers += at(in).storage == at(t).storage;
      bool aliased = false; // its gradient goes on as another's
      for (const Op& o : b_.list().ops)
        for (const Op::GradAlias& a : o.grad_aliases) aliased = aliased || a.output == t;
      if (readers == 1 && !aliased && at(t).base < 0 && t != b_.list().input && random_.chance(0.5))
        b_.list().tensors[static_cast<size_t>(t)].gradient = GradientStorage::Overwrite;
    }
    op.steps.push_back(std::move(step));
  }

  TensorId last_op() {
    TensorId out = b_.tensor(name("t"), DType::BF16, {kRows, kStream});
    if (TensorId x = b_.list().input; x >= 0 && random_.chance(0.4)) { // x + f(x)
      TensorId f = fresh(true);
      compute_op({pick()}, {f}, {});
      b_.op(name("add"), OpKind::ResidualAdd, {x, f}, {out}).grad_aliases = {{x, out}, {f, out}};
    } else {
      compute_op(inputs(), {out}, {out});
    }
    add(out);
    return out;
  }

  void holds(TensorId output) {
    const int n = static_cast<int>(b_.list().ops.size());
    std::vector<StorageId> bound;
    for (int i = 0; i < n; ++i)
      for (TensorId t : std::vector<TensorId>(b_.list().ops[static_cast<size_t>(i)].outputs)) {
        if (random_.chance(0.08)) b_.hold(t, HoldKind::Frame, random_.between(i, n - 1));
        if (random_.chance(0.03) && (t != output || !flavour_.chain)) b_.hold(t, HoldKind::Caller);
        const bool taken = std::find(bound.begin(), bound.end(), at(t).storage) != bound.end();
        if (flavour_.next_forward && random_.chance(0.05) && !taken && t != output && at(t).base < 0) {
          b_.hold(t, HoldKind::NextForward);
          bound.push_back(at(t).storage);
        }
      }
    if (!flavour_.chain && output >= 0 && random_.chance(0.3)) b_.hold(output, HoldKind::Caller);
  }

  // d:x may be d:sum only while nothing has contributed to d:x: x has no later reader.
  void keep_aliases_legal() {
    if (!flavour_.legal) return;
    auto root = [&](TensorId t) {
      while (at(t).base >= 0) t = at(t).base;
      return t;
    };
    std::vector<Op>& ops = b_.list().ops;
    for (size_t i = 0; i < ops.size(); ++i) {
      bool conflict = false;
      for (const Op::GradAlias& a : ops[i].grad_aliases)
        for (size_t j = i + 1; j < ops.size(); ++j)
          for (TensorId t : ops[j].inputs) conflict = conflict || (root(t) == a.input && !ops[j].effects);
      if (!conflict) continue;
      ops[i].grad_aliases.clear();
      ops[i].steps.push_back({.name = "copy", .grad_reads = ops[i].outputs, .grad_writes = ops[i].inputs});
    }
  }

  // ----------------------------------------------------------------------------- spans ----

  void spans() {
    const int n = static_cast<int>(case_.list.ops.size());
    holds_ = random_.chance(0.6); // a stack either holds or does not
    if (!random_.chance(0.1)) level(0, n - 1);
    if (!flavour_.legal && random_.chance(0.6)) {
      const int first = random_.below(n), last = random_.between(first, n - 1);
      push(first, last, random_.chance(0.5) ? SpanKind::WholeBlock : SpanKind::DiscardOutput, random_.between(-1, n - 1));
    }
    for (size_t i = case_.spans.size(); i > 1; --i) // the order of the list means nothing
      if (random_.chance(0.5)) std::swap(case_.spans[i - 1], case_.spans[static_cast<size_t>(random_.below(static_cast<int>(i)))]);
  }

  void push(int first, int last, SpanKind kind, int hook) {
    case_.spans.push_back({fmt::format("span{}", case_.spans.size()), first, last, kind,
                           kind == SpanKind::DiscardOutput ? hook : -1,
                           random_.chance(0.6) ? ReplayExtent::All : ReplayExtent::Needed, holds_});
  }

  // Disjoint spans side by side in [first, last], each with spans inside; some share a hook.
  void level(int first, int last) {
    std::vector<size_t> discards;
    for (int op = first; op <= last && case_.spans.size() < 6; ++op) {
      if (!random_.chance(0.35)) continue;
      const int end = std::min(last, op + random_.below(5));
      const int hook = random_.chance(0.5) ? hook_of(op, end, last) : -1;
      push(op, end, hook >= 0 ? SpanKind::DiscardOutput : SpanKind::WholeBlock, hook);
      if (hook >= 0) discards.push_back(case_.spans.size() - 1);
      if (random_.chance(0.4)) level(op, end);
      op = end;
    }
    if (discards.size() > 1 && random_.chance(0.8)) { // one group
      int hook = 0;
      for (size_t i : discards) hook = std::max(hook, case_.spans[i].hook);
      for (size_t i : discards) case_.spans[i].hook = hook;
    }
  }

  // An op of [.., last] at or after the last reader of what [first, end] makes; -1: none.
  int hook_of(int first, int end, int last) {
    int hook = end + 1;
    for (TensorId t : program::span_outputs(case_.list, {"", first, end})) {
      if (t == case_.list.output) return -1;
      for (int i = end + 1; i < static_cast<int>(case_.list.ops.size()); ++i)
        for (TensorId in : case_.list.ops[static_cast<size_t>(i)].inputs)
          if (case_.list.tensor(in).storage == case_.list.tensor(t).storage) hook = std::max(hook, i);
    }
    if (hook > last) return -1;
    return random_.chance(0.7) ? hook : random_.between(hook, last);
  }

  Random random_;
  Flavour flavour_;
  Builder b_;
  Case case_;
  std::vector<TensorId> known_;
  int count_ = 0;
  bool holds_ = true;
};

} // namespace

Case random_case(std::uint64_t seed, const Flavour& flavour) { return Generator(seed, flavour).run(); }

std::string dump(const Case& c) {
  const OpList& list = c.list;
  auto names = [&](const std::vector<TensorId>& ids, const char* prefix = "") {
    std::vector<std::string> out;
    for (TensorId t : ids) out.push_back(prefix + list.tensor(t).name);
    return fmt::format("{}", fmt::join(out, ","));
  };
  std::string text = fmt::format("seed {}: input {}, output {}, input gradient {}, d:output external {}, backward {}\n", c.seed,
                                 list.input < 0 ? "-" : list.tensor(list.input).name,
                                 list.output < 0 ? "-" : list.tensor(list.output).name, c.options.input_gradient,
                                 c.options.external_output_gradient, c.options.backward);
  for (size_t t = 0; t < list.tensors.size(); ++t) {
    const Tensor& tensor = list.tensors[t];
    const Storage& storage = list.storages[static_cast<size_t>(tensor.storage)];
    text += fmt::format("  tensor {} {} B{}{}{}{}\n", tensor.name, tensor.bytes(), storage.external ? " external" : "",
                        storage.category == Category::Logits ? " logits" : "", tensor.differentiable ? "" : " statistic",
                        tensor.base < 0 ? (tensor.gradient == GradientStorage::Overwrite ? " overwritten" : "")
                                        : fmt::format(" view of {}, gradient {}", list.tensor(tensor.base).name,
                                                      tensor.gradient == GradientStorage::Own ? "own" : "slice"));
  }
  for (size_t i = 0; i < list.ops.size(); ++i) {
    const Op& op = list.ops[i];
    text += fmt::format("  [{}] {}({}) -> {}{}", i, op.name, names(op.inputs), names(op.outputs), op.effects ? " effects" : "");
    for (const ParamRef& p : op.params) text += p.trainable ? " w" : " frozen";
    text += '\n';
    for (const Step& s : op.steps)
      text += fmt::format("        {}: reads {} {} writes {}{}\n", s.name, names(s.reads), names(s.grad_reads, "d:"),
                          names(s.grad_writes, "d:"), s.param_grads.empty() ? "" : " +parameters");
    for (const Pin& p : op.pins) text += fmt::format("        pins {}\n", list.tensor(p.tensor).name);
    for (const Op::GradAlias& a : op.grad_aliases)
      text += fmt::format("        d:{} is d:{}\n", list.tensor(a.input).name, list.tensor(a.output).name);
  }
  for (const Hold& h : list.holds)
    text += fmt::format("  hold {} {}\n", list.tensor(h.tensor).name,
                        h.kind == HoldKind::Frame    ? fmt::format("frame until [{}]", h.until)
                        : h.kind == HoldKind::Caller ? "caller"
                                                     : "next forward");
  for (const Span& s : c.spans)
    text += fmt::format("  span {} [{}..{}] {}{} {}\n", s.name, s.first, s.last,
                        s.kind == SpanKind::WholeBlock ? "whole block" : fmt::format("discard, hook [{}]", s.hook),
                        s.extent == ReplayExtent::All ? "" : ", needed", s.holds ? "holds" : "");
  return text;
}

} // namespace gdn::toy
