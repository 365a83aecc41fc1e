#include "program/trace.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::program {

using model::Op;
using model::OpList;
using model::Step;
using model::StorageId;
using model::TensorId;

std::string_view name_of(Pass pass) {
  switch (pass) {
  case Pass::Forward: return "forward";
  case Pass::Replay: return "replay";
  case Pass::Backward: return "backward";
  }
  return "";
}

std::string UnitTrace::buffer_name(BufferId id) const {
  const Buffer& b = buffers[static_cast<size_t>(id)];
  return fmt::format("{}{}{}", b.gradient ? "d:" : "", list->tensor(b.tensor).name,
                     b.generation > 0 ? fmt::format(".g{}", b.generation) : "");
}

std::string UnitTrace::event_name(int event, const std::vector<Span>& spans) const {
  const Event& e = events[static_cast<size_t>(event)];
  const Op& op = list->ops[static_cast<size_t>(e.op)];
  std::string what = e.step < 0 ? op.name : op.name + "." + op.steps[static_cast<size_t>(e.step)].name;
  if (e.pass != Pass::Replay) return fmt::format("{} {}", name_of(e.pass), what);
  return fmt::format("replay({}) {}", spans[static_cast<size_t>(e.span)].name, what);
}

namespace {

// Executes the forest the way an autograd engine with checkpoints would, emitting events.
// A Context binds every storage to the buffer that code at that nesting level sees; a replay works
// in a copy of its parent's context, so new generations are visible to the span's backward only.
class Tracer {
public:
  Tracer(const OpList& list, const std::vector<Span>& spans, const model::Provider& provider,
         const TraceOptions& options)
      : list_(list), spans_(spans), provider_(provider), options_(options),
        generations_(list.storages.size(), 0), gradient_(list.tensors.size(), -1),
        written_(list.tensors.size(), false), scratch_(list.ops.size()) {
    out_.list = &list;
  }

  UnitTrace run() {
    std::vector<Node> forest = build_forest(list_, spans_);
    mark_required();
    Context context{std::vector<BufferId>(list_.storages.size(), -1)};
    if (list_.input >= 0) out_.input = bind(context, list_.input, -1);
    forward(forest, context, Pass::Forward, -1, true);
    out_.forward_end = now();
    if (list_.output >= 0) out_.output = bound(context, list_.output);
    if (options_.backward) {
      if (list_.output >= 0) {
        out_.output_gradient = gradient_of(list_.output, out_.forward_end);
        written_[static_cast<size_t>(list_.output)] = true;
        buffer(out_.output_gradient).external = options_.external_output_gradient;
      }
      backward(forest, context);
      if (list_.input >= 0) out_.input_gradient = gradient_[root(list_.input)];
    }
    finish();
    return std::move(out_);
  }

private:
  struct Context {
    std::vector<BufferId> bound; // per storage
  };

  int now() const { return static_cast<int>(out_.events.size()); }
  Buffer& buffer(BufferId id) { return out_.buffers[static_cast<size_t>(id)]; }
  const Op& op(int index) const { return list_.ops[static_cast<size_t>(index)]; }
  const Span& span(int index) const { return spans_[static_cast<size_t>(index)]; }

  // Which tensors carry a gradient: those between a trainable parameter (or a wanted input
  // gradient) and the end of the list.
  void mark_required() {
    required_.assign(list_.tensors.size(), false);
    auto need = [&](TensorId t) {
      for (; t >= 0; t = list_.tensor(t).base)
        if (required_[static_cast<size_t>(t)]) return true;
      return false;
    };
    if (list_.input >= 0) required_[static_cast<size_t>(list_.input)] = options_.input_gradient;
    for (const Op& o : list_.ops) {
      bool any = std::any_of(o.params.begin(), o.params.end(), [](const auto& p) { return p.trainable; });
      for (TensorId t : o.inputs) any = any || (list_.tensor(t).differentiable && need(t));
      for (TensorId t : o.outputs) required_[static_cast<size_t>(t)] = any && list_.tensor(t).differentiable;
    }
    for (size_t t = 0; t < required_.size(); ++t) required_[t] = need(static_cast<TensorId>(t));
  }

  // ---------------------------------------------------------------------------- buffers ----

  BufferId bind(Context& context, TensorId t, int alloc) {
    size_t s = static_cast<size_t>(list_.tensor(t).storage);
    const model::Storage& storage = list_.storages[s];
    BufferId id = static_cast<BufferId>(out_.buffers.size());
    out_.buffers.push_back({.tensor = t, .generation = generations_[s]++, .bytes = storage.bytes,
                            .category = storage.category, .external = storage.external, .alloc = alloc, .last = alloc});
    context.bound[s] = id;
    return id;
  }

  BufferId bound(const Context& context, TensorId t) const {
    return context.bound[static_cast<size_t>(list_.tensor(t).storage)];
  }

  // The tensor whose gradient storage holds d:t.
  size_t root(TensorId t) const {
    while (list_.tensor(t).base >= 0 && list_.tensor(t).gradient == model::GradientStorage::Slice)
      t = list_.tensor(t).base;
    return static_cast<size_t>(t);
  }

  BufferId gradient_of(TensorId t, int alloc) {
    size_t r = root(t);
    if (gradient_[r] < 0) {
      const model::Tensor& tensor = list_.tensors[r];
      gradient_[r] = static_cast<BufferId>(out_.buffers.size());
      out_.buffers.push_back({.tensor = static_cast<TensorId>(r), .gradient = true, .bytes = tensor.bytes(),
                              .category = list_.storages[static_cast<size_t>(tensor.storage)].category == Category::Logits
                                              ? Category::Logits
                                              : Category::Transient,
                              .alloc = alloc, .last = alloc});
    }
    return gradient_[r];
  }

  bool has_gradient(TensorId t) const { return gradient_[root(t)] >= 0; }

  void touch(BufferId id, int event) { buffer(id).last = std::max(buffer(id).last, event); }

  void access(BufferId id, TensorId t, AccessMode mode, bool gradient) {
    out_.accesses.push_back({id, t, mode, gradient});
    ++out_.events.back().access_count;
    touch(id, now() - 1);
  }

  // ----------------------------------------------------------------------------- events ----

  void begin(int op_index, int step, Pass pass, int span_index) {
    // Per op: the forward's scratch, then each step's; filled on first use.
    std::vector<Bytes>& cache = scratch_[static_cast<size_t>(op_index)];
    if (cache.empty()) cache.assign(op(op_index).steps.size() + 1, -1);
    Bytes& scratch = cache[static_cast<size_t>(step + 1)];
    if (scratch < 0) scratch = provider_.work(list_, op(op_index), step).scratch;
    out_.events.push_back({.op = op_index, .step = step, .pass = pass, .span = span_index,
                           .first_access = static_cast<std::uint32_t>(out_.accesses.size()), .scratch = scratch});
  }

  void run_forward(int index, Context& context, Pass pass, int span_index, const std::vector<BufferId>* refill) {
    const Op& o = op(index);
    begin(index, -1, pass, span_index);
    const int event = now() - 1;
    for (TensorId t : o.inputs) access(require(context, t, event), t, AccessMode::Read, false);
    for (TensorId t : o.outputs) {
      const model::Tensor& tensor = list_.tensor(t);
      if (tensor.base < 0) {
        BufferId old = refill ? (*refill)[static_cast<size_t>(tensor.storage)] : -1;
        if (old >= 0) {
          buffer(old).refill = event;
          context.bound[static_cast<size_t>(tensor.storage)] = old;
        } else {
          bind(context, t, event);
        }
      }
      access(bound(context, t), t, AccessMode::Write, false);
    }
    for (const model::Hold& h : list_.holds)
      if (h.kind == model::HoldKind::NextForward &&
          std::find(o.outputs.begin(), o.outputs.end(), h.tensor) != o.outputs.end())
        out_.sticky.push_back({event, bound(context, h.tensor)});
  }

  BufferId require(const Context& context, TensorId t, int event) const {
    BufferId id = bound(context, t);
    if (id < 0)
      throw Error(ErrorCode::Internal, fmt::format("op list '{}': tensor '{}' is not there for {}", list_.name,
                                                   list_.tensor(t).name, out_.event_name(event, spans_)));
    const Buffer& b = out_.buffers[static_cast<size_t>(id)];
    if (b.drop >= 0 && b.refill < 0)
      throw Error(ErrorCode::Config,
                  fmt::format("'{}' of '{}' is discarded after '{}' but read by {} before it is replayed",
                              list_.tensor(t).name, list_.name, op(out_.events[static_cast<size_t>(b.drop)].op).name,
                              out_.event_name(event, spans_)),
                  "hook the span on a later op, or make it a whole-block span");
    return id;
  }

  // Runs the ops of `nodes`. `recording`: spans at this level take effect (a tape is kept).
  void forward(const std::vector<Node>& nodes, Context& context, Pass pass, int span_index, bool recording,
               const std::vector<BufferId>* refill = nullptr, const std::vector<char>* needed = nullptr) {
    const int start = now();
    run_nodes(nodes, context, pass, span_index, recording, refill, needed);
    // Frames end at their last op, or with the run when it lies outside.
    for (const model::Hold& h : list_.holds) {
      if (h.kind != model::HoldKind::Frame) continue;
      BufferId id = bound(context, h.tensor);
      if (id < 0 || buffer(id).alloc < start) continue;
      int until = now() - 1;
      for (int e = start; e < now(); ++e)
        if (out_.events[static_cast<size_t>(e)].op == h.until) until = e;
      touch(id, until);
    }
  }

  void run_nodes(const std::vector<Node>& nodes, Context& context, Pass pass, int span_index, bool recording,
                 const std::vector<BufferId>* refill, const std::vector<char>* needed) {
    for (const Node& node : nodes) {
      if (node.span >= 0) {
        run_nodes(node.children, context, pass, span_index, false, refill, needed);
      } else if ((!needed || (*needed)[static_cast<size_t>(node.op)]) &&
                 !(pass == Pass::Replay && op(node.op).effects)) {
        run_forward(node.op, context, pass, span_index, refill);
      }
      if (recording) drop_hooked(nodes, node, context);
    }
  }

  // After the node that contains a hook's producer has run: the hooked spans' outputs go.
  void drop_hooked(const std::vector<Node>& level, const Node& node, const Context& context) {
    for (const Node& n : level) {
      if (!hooked_at(n, node)) continue;
      for (TensorId t : span_outputs(list_, span(n.span))) {
        BufferId id = bound(context, t);
        buffer(id).drop = now() - 1;
      }
    }
  }

  bool hooked_at(const Node& candidate, const Node& at) const {
    if (candidate.span < 0 || span(candidate.span).kind != SpanKind::DiscardOutput) return false;
    int hook = span(candidate.span).hook;
    return hook >= at.first && hook <= at.last;
  }

  // --------------------------------------------------------------------------- backward ----

  void backward(const std::vector<Node>& nodes, Context& context) {
    struct Replayed { // discard spans waiting for their backward
      const Node* node;
      int start;
      Context inner;
    };
    std::vector<Replayed> replayed;
    for (size_t i = nodes.size(); i-- > 0;) {
      const Node& node = nodes[i];
      for (const Node& n : nodes) {
        if (!hooked_at(n, node)) continue;
        Context inner = context;
        std::vector<BufferId> refill(list_.storages.size(), -1);
        for (TensorId t : span_outputs(list_, span(n.span)))
          refill[static_cast<size_t>(list_.tensor(t).storage)] = bound(context, t);
        const int start = now();
        replay(n, inner, &refill);
        replayed.push_back({&n, start, std::move(inner)});
      }
      if (node.span < 0) {
        run_backward(node.op, context);
      } else if (span(node.span).kind == SpanKind::WholeBlock) {
        Context inner = context;
        const int start = now();
        replay(node, inner, nullptr);
        backward(node.children, inner);
        hold_checkpoint(node, context, inner, start);
      } else {
        auto it = std::find_if(replayed.begin(), replayed.end(), [&](auto& r) { return r.node == &node; });
        backward(node.children, it->inner);
        hold_checkpoint(node, context, it->inner, it->start);
      }
    }
  }

  void replay(const Node& node, Context& inner, const std::vector<BufferId>* refill) {
    const Span& s = span(node.span);
    if (s.extent == ReplayExtent::All) return forward(node.children, inner, Pass::Replay, node.span, true, refill);
    std::vector<char> needed = needed_ops(s);
    forward(node.children, inner, Pass::Replay, node.span, true, refill, &needed);
  }

  // Ops of the span whose outputs a backward step, an outside reader of a discarded output, or
  // another needed op of the span reads.
  std::vector<char> needed_ops(const Span& s) const {
    std::vector<char> needed(list_.ops.size(), 0), storage(list_.storages.size(), 0);
    auto want = [&](TensorId t) { storage[static_cast<size_t>(list_.tensor(t).storage)] = 1; };
    for (int i = s.first; i <= s.last; ++i) {
      for (const Step& step : op(i).steps)
        if (exists_ever(op(i), step)) std::for_each(step.reads.begin(), step.reads.end(), want);
      for (const model::Pin& p : op(i).pins) want(p.tensor);
    }
    if (s.kind == SpanKind::DiscardOutput)
      for (TensorId t : span_outputs(list_, s)) want(t);
    for (int i = s.last; i >= s.first; --i) {
      const Op& o = op(i);
      if (std::any_of(o.outputs.begin(), o.outputs.end(),
                      [&](TensorId t) { return storage[static_cast<size_t>(list_.tensor(t).storage)]; })) {
        needed[static_cast<size_t>(i)] = 1;
        std::for_each(o.inputs.begin(), o.inputs.end(), want);
      }
    }
    return needed;
  }

  void hold_checkpoint(const Node& node, const Context& outer, const Context& inner, int start) {
    const Span& s = span(node.span);
    if (!s.holds) return;
    const int end = now() - 1;
    auto hold = [&](BufferId id) {
      if (id >= 0) touch(id, end);
    };
    if (s.kind == SpanKind::DiscardOutput) { // arguments, outputs and internals
      for (TensorId t : span_arguments(list_, s)) hold(bound(outer, t));
      for (BufferId id : inner.bound)
        if (id >= 0 && (buffer(id).alloc >= start || buffer(id).refill >= start)) hold(id);
      return;
    }
    for (TensorId t : span_outputs(list_, s)) { // new outputs and output gradients
      hold(bound(inner, t));
      if (has_gradient(t)) hold(gradient_[root(t)]);
    }
  }

  // A step exists when somebody needs what it writes; decided before gradients flow.
  bool exists_ever(const Op& o, const Step& s) const {
    for (int p : s.param_grads)
      if (o.params[static_cast<size_t>(p)].trainable) return true;
    return std::any_of(s.grad_writes.begin(), s.grad_writes.end(),
                       [&](TensorId t) { return required_[static_cast<size_t>(t)]; });
  }

  bool exists_now(const Op& o, const Step& s) const {
    return exists_ever(o, s) && (s.grad_reads.empty() || std::any_of(s.grad_reads.begin(), s.grad_reads.end(),
                                                                     [&](TensorId t) { return has_gradient(t); }));
  }

  void run_backward(int index, Context& context) {
    const Op& o = op(index);
    for (size_t i = 0; i < o.steps.size(); ++i) {
      const Step& s = o.steps[i];
      if (!exists_now(o, s)) continue;
      begin(index, static_cast<int>(i), Pass::Backward, -1);
      const int event = now() - 1;
      for (TensorId t : s.reads) access(require(context, t, event), t, AccessMode::Read, false);
      for (TensorId t : s.grad_reads)
        if (has_gradient(t)) access(gradient_[root(t)], t, AccessMode::Read, true);
      for (TensorId t : s.grad_writes) {
        if (!required_[static_cast<size_t>(t)]) continue;
        const bool first = !written_[static_cast<size_t>(t)];
        if (list_.tensor(t).gradient == model::GradientStorage::Overwrite) gradient_[root(t)] = require(context, t, event);
        BufferId id = gradient_of(t, event);
        written_[static_cast<size_t>(t)] = true;
        access(id, t, first ? AccessMode::Write : AccessMode::Accumulate, true);
      }
    }
    for (const Op::GradAlias& a : o.grad_aliases) {
      if (!required_[static_cast<size_t>(a.input)] || !has_gradient(a.output)) continue;
      if (has_gradient(a.input))
        throw Error(ErrorCode::Internal,
                    fmt::format("op list '{}', {}: d:{} already has contributions and cannot alias d:{}", list_.name,
                                o.name, list_.tensor(a.input).name, list_.tensor(a.output).name));
      gradient_[root(a.input)] = gradient_[root(a.output)];
      written_[static_cast<size_t>(a.input)] = true;
    }
    // Pins live until the op's last backward step has run.
    for (const model::Pin& p : o.pins)
      if (BufferId id = bound(context, p.tensor); id >= 0 && !out_.events.empty()) touch(id, now() - 1);
  }

  // --------------------------------------------------------------------------- lifetimes ----

  void finish() {
    for (const model::Hold& h : list_.holds)
      if (h.kind == model::HoldKind::Caller)
        for (Buffer& b : out_.buffers)
          if (!b.gradient && b.generation == 0 && list_.tensor(b.tensor).storage == list_.tensor(h.tensor).storage)
            b.last = std::max(b.last, now() - 1);
    for (Buffer& b : out_.buffers) {
      if (b.gradient || b.category != Category::Activations) continue;
      const bool boundary = &b - out_.buffers.data() == out_.input || &b - out_.buffers.data() == out_.output;
      const bool crosses = b.alloc < out_.forward_end && b.last >= out_.forward_end && b.drop < 0;
      if (!crosses && !boundary) b.category = Category::Transient;
    }
  }

  const OpList& list_;
  const std::vector<Span>& spans_;
  const model::Provider& provider_;
  const TraceOptions& options_;
  UnitTrace out_;
  std::vector<int> generations_;       // per storage: the next generation
  std::vector<BufferId> gradient_;     // per gradient root
  std::vector<bool> written_;          // per tensor: d:t has a value
  std::vector<bool> required_;
  std::vector<std::vector<Bytes>> scratch_;
};

} // namespace

UnitTrace trace(const OpList& list, const std::vector<Span>& spans, const model::Provider& provider,
                const TraceOptions& options) {
  return Tracer(list, spans, provider, options).run();
}

} // namespace gdn::program
