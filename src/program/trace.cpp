#include "program/trace.h"

#include <algorithm>
#include <map>

#include <fmt/core.h>

#include "core/error.h"
#include "program/passes.h"

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
      : list_(list), spans_(spans), provider_(provider), options_(options), passes_(list, spans, options.input_gradient, options.backward),
        generations_(list.storages.size(), 0), gradient_(list.tensors.size(), -1), scratch_(list.ops.size()) {
    out_.list = &list;
  }

  UnitTrace run() {
    std::vector<Node> forest = build_forest(list_, spans_);
    Context context{std::vector<BufferId>(list_.storages.size(), -1)};
    if (list_.input >= 0) out_.input = bind(context, list_.input, -1);
    forward(forest, context, Pass::Forward, -1);
    out_.forward_end = now();
    if (list_.output >= 0) out_.output = bound(context, list_.output);
    if (options_.backward) {
      if (list_.output >= 0 && passes_.required(list_.output)) {
        out_.output_gradient = gradient_of(list_.output, out_.forward_end);
        written_[out_.output_gradient].push_back(list_.output);
        buffer(out_.output_gradient).external = options_.external_output_gradient;
      }
      backward(forest, context);
      if (list_.input >= 0) out_.input_gradient = gradient_[passes_.root(list_.input)];
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

  BufferId gradient_of(TensorId t, int alloc) {
    size_t r = passes_.root(t);
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

  bool has_gradient(TensorId t) const { return gradient_[passes_.root(t)] >= 0; }

  // Whether the op that makes t (or introduces it as a view) has run forward in [start, now).
  bool made_since(int start, TensorId t) const {
    for (int e = start; e < now(); ++e) {
      const Event& event = out_.events[static_cast<size_t>(e)];
      if (event.step < 0 && event.op == passes_.maker(t)) return true;
    }
    return false;
  }

  bool same_storage(BufferId id, TensorId t) const {
    const Buffer& b = out_.buffers[static_cast<size_t>(id)];
    return !b.gradient && list_.tensor(b.tensor).storage == list_.tensor(t).storage;
  }

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
        if (old >= 0 && buffer(old).drop >= 0 && buffer(old).refill < 0) {
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

  // Runs the ops of `nodes`: one run, the frame of its local variables.
  void forward(const std::vector<Node>& nodes, Context& context, Pass pass, int span_index,
               const std::vector<BufferId>* refill = nullptr, const std::vector<char>* needed = nullptr) {
    start_ = now();
    run_nodes(nodes, context, pass, span_index, refill, needed);
    for (const model::Hold& h : list_.holds)
      if (h.kind == model::HoldKind::Frame && made_since(start_, h.tensor))
        touch(bound(context, h.tensor), frame_end(h));
  }

  // A frame ends once its last op has run, or with the run when that lies outside.
  int frame_end(const model::Hold& h) const {
    int end = start_;
    for (int e = start_; e < now(); ++e)
      if (out_.events[static_cast<size_t>(e)].op <= h.until) end = e;
    return end;
  }

  void run_nodes(const std::vector<Node>& nodes, Context& context, Pass pass, int span_index,
                 const std::vector<BufferId>* refill, const std::vector<char>* needed) {
    for (const Node& node : nodes) {
      if (node.span >= 0) {
        run_nodes(node.children, context, pass, span_index, refill, needed);
      } else if ((!needed || (*needed)[static_cast<size_t>(node.op)]) &&
                 !(pass == Pass::Replay && op(node.op).effects)) {
        run_forward(node.op, context, pass, span_index, refill);
      }
      if (options_.backward) drop_hooked(nodes, node, context);
    }
  }

  // After the node that contains a hook's producer has run: the hooked spans' outputs go, also
  // where the level runs inside a span that does not record.
  void drop_hooked(const std::vector<Node>& level, const Node& node, const Context& context) {
    for (const Node& n : level) {
      if (!hooked_at(n, node)) continue;
      for (TensorId t : span_outputs(list_, span(n.span))) {
        BufferId id = bound(context, t);
        if (id < 0 || !made_since(start_, t)) continue; // not made in this run
        int last = buffer(id).last;
        for (const model::Hold& h : list_.holds)
          if (h.kind == model::HoldKind::Frame && same_storage(id, h.tensor)) last = std::max(last, frame_end(h));
        if (!span(n.span).holds) drops_.push_back({id, n.span, last});
        buffer(id).drop = now() - 1;
      }
    }
  }

  // A dropped buffer that nobody referred to at the hook had gone after its last use.
  struct Drop {
    BufferId buffer;
    int span, last;
  };

  struct Pinned {
    BufferId buffer;
    int op;
  };

  bool referred_to(const Drop& d) const {
    const Span& s = span(d.span);
    const Buffer& b = out_.buffers[static_cast<size_t>(d.buffer)];
    for (const model::Hold& h : list_.holds) { // frames are in d.last
      const bool holds = h.kind == model::HoldKind::NextForward ||
                         (h.kind == model::HoldKind::Caller && b.generation == 0);
      if (holds && same_storage(d.buffer, h.tensor)) return true;
    }
    for (size_t e = static_cast<size_t>(b.drop) + 1; e < out_.events.size(); ++e) {
      const Event& event = out_.events[e];
      if (event.op >= s.first && event.op <= s.last) continue; // its own replay
      for (std::uint32_t i = event.first_access; i < event.first_access + event.access_count; ++i)
        if (out_.accesses[i].buffer == d.buffer && out_.accesses[i].mode == AccessMode::Read) return true;
    }
    return std::any_of(pinned_.begin(), pinned_.end(), [&](const Pinned& p) {
      return p.buffer == d.buffer && (p.op < s.first || p.op > s.last);
    });
  }

  bool hooked_at(const Node& candidate, const Node& at) const {
    if (candidate.span < 0 || span(candidate.span).kind != SpanKind::DiscardOutput) return false;
    int hook = span(candidate.span).hook;
    return hook >= at.first && hook <= at.last;
  }

  // --------------------------------------------------------------------------- backward ----

  void backward(const std::vector<Node>& nodes, Context& context) {
    struct Waiting { // discard spans between their replay and their backward
      const Node* node;
      Replayed replayed;
    };
    std::vector<Waiting> waiting;
    for (size_t i = nodes.size(); i-- > 0;) {
      const Node& node = nodes[i];
      for (const Node& n : nodes)
        if (hooked_at(n, node) && passes_.replays(span(n.span))) waiting.push_back({&n, replay(n, context)});
      if (node.span < 0) {
        run_backward(node.op, context);
      } else if (!passes_.replays(span(node.span))) {
        continue;
      } else if (span(node.span).kind == SpanKind::WholeBlock) {
        Replayed replayed = replay(node, context);
        backward(node.children, replayed.inner);
        hold_checkpoint(node, context, replayed);
      } else {
        auto it = std::find_if(waiting.begin(), waiting.end(), [&](auto& w) { return w.node == &node; });
        backward(node.children, it->replayed.inner);
        hold_checkpoint(node, context, it->replayed);
      }
    }
  }

  // A replay: events [start, end), what its ops are bound to, the output gradients that had arrived.
  struct Replayed {
    Context inner;
    int start = 0, end = 0;
    std::vector<BufferId> incoming = {};
    std::vector<TensorId> outputs = {}; // made again
  };

  Replayed replay(const Node& node, const Context& context) {
    const Span& s = span(node.span);
    Replayed r{context, now()};
    const std::vector<TensorId> outputs = span_outputs(list_, s);
    std::vector<BufferId> refill(list_.storages.size(), -1);
    for (TensorId t : outputs) {
      if (s.kind == SpanKind::DiscardOutput) refill[static_cast<size_t>(list_.tensor(t).storage)] = bound(context, t);
      else if (has_gradient(t)) r.incoming.push_back(gradient_[passes_.root(t)]);
    }
    // The replay sees what was made before the span; effects do not act again, so what they made stays.
    for (size_t t = 0; t < list_.tensors.size(); ++t)
      if (const int maker = passes_.maker(static_cast<TensorId>(t)); list_.tensors[t].base < 0 && maker >= s.first && maker <= s.last && !op(maker).effects)
        r.inner.bound[static_cast<size_t>(list_.tensors[t].storage)] = -1;
    const std::vector<char>& needed = passes_.needed(s);
    forward(node.children, r.inner, Pass::Replay, node.span, &refill, needed.empty() ? nullptr : &needed);
    r.end = now();
    for (TensorId t : outputs)
      if (made_since(r.start, t)) r.outputs.push_back(t);
    return r;
  }

  // What a checkpoint object refers to lives until the span's backward has ended.
  void hold_checkpoint(const Node& node, const Context& outer, const Replayed& r) {
    const Span& s = span(node.span);
    if (!s.holds) return;
    const int end = now() - 1;
    auto hold = [&](BufferId id) {
      if (id >= 0) touch(id, end);
    };
    for (BufferId id : r.incoming) hold(id);
    for (TensorId t : r.outputs) hold(bound(r.inner, t));
    if (s.kind == SpanKind::WholeBlock) return;
    for (TensorId t : span_outputs(list_, s))
      if (BufferId id = bound(outer, t); id >= 0 && buffer(id).drop >= 0) hold(id);
    for (TensorId t : span_arguments(list_, s)) hold(bound(outer, t));
    for (BufferId id : r.inner.bound) { // internals that the replay saved for its backward
      if (id < 0 || buffer(id).last < r.end) continue;
      const Buffer& b = buffer(id);
      if ((b.alloc >= r.start && b.alloc < r.end) || (b.refill >= r.start && b.refill < r.end)) hold(id);
    }
  }

  void run_backward(int index, Context& context) {
    const Op& o = op(index);
    for (size_t i = 0; i < o.steps.size(); ++i) {
      const Step& s = o.steps[i];
      if (!passes_.runs(index, i)) continue;
      begin(index, static_cast<int>(i), Pass::Backward, -1);
      const int event = now() - 1;
      for (TensorId t : s.reads) access(require(context, t, event), t, AccessMode::Read, false);
      for (TensorId t : s.grad_reads)
        if (has_gradient(t)) access(gradient_[passes_.root(t)], t, AccessMode::Read, true);
      for (TensorId t : s.grad_writes) {
        if (!passes_.required(t)) continue;
        if (passes_.overwritten(t)) gradient_[passes_.root(t)] = require(context, t, event);
        BufferId id = gradient_of(t, event);
        access(id, t, contributes(id, t) ? AccessMode::Accumulate : AccessMode::Write, true);
      }
    }
    for (const Op::GradAlias& a : o.grad_aliases) {
      if (!passes_.required(a.input) || !has_gradient(a.output)) continue;
      if (has_gradient(a.input))
        throw Error(ErrorCode::Internal,
                    fmt::format("op list '{}', {}: d:{} already has contributions and cannot alias d:{}", list_.name,
                                o.name, list_.tensor(a.input).name, list_.tensor(a.output).name));
      gradient_[passes_.root(a.input)] = gradient_[passes_.root(a.output)];
      written_[gradient_[passes_.root(a.output)]].push_back(a.input);
    }
    // Pins live until the op's last backward step has run.
    if (passes_.runs(index))
      for (const model::Pin& p : o.pins)
        if (BufferId id = bound(context, p.tensor); id >= 0) {
          touch(id, now() - 1);
          pinned_.push_back({id, index});
        }
  }

  // Whether part of d:t already has a value; from now on it has.
  bool contributes(BufferId id, TensorId t) {
    std::vector<TensorId>& written = written_[id];
    const bool before = std::any_of(written.begin(), written.end(), [&](TensorId w) { return overlap(w, t); });
    written.push_back(t);
    return before;
  }

  bool overlap(TensorId x, TensorId y) const {
    const model::Tensor &a = list_.tensor(x), &b = list_.tensor(y);
    if (a.row_stride == b.row_stride && a.row_stride > 0) { // columns of the same rows
      const std::int64_t first = a.offset % a.row_stride, second = b.offset % b.row_stride;
      return first < second + b.cols() && second < first + a.cols();
    }
    auto end = [](const model::Tensor& t) { return t.offset + (t.rows() - 1) * t.row_stride + t.cols(); };
    return a.offset < end(b) && b.offset < end(a);
  }

  // --------------------------------------------------------------------------- lifetimes ----

  void finish() {
    for (const Drop& d : drops_)
      if (!referred_to(d)) buffer(d.buffer).drop = d.last;
    // The unit hands its output and d:input over when its passes end.
    if (out_.output >= 0) touch(out_.output, out_.forward_end - 1);
    if (out_.input_gradient >= 0) touch(out_.input_gradient, now() - 1);
    const int end = options_.backward ? std::max(now() - 1, out_.forward_end) : now() - 1;
    for (const model::Hold& h : list_.holds)
      if (h.kind == model::HoldKind::Caller)
        for (size_t i = 0; i < out_.buffers.size(); ++i)
          if (same_storage(static_cast<BufferId>(i), h.tensor) && out_.buffers[i].generation == 0)
            touch(static_cast<BufferId>(i), end);
    for (Buffer& b : out_.buffers) {
      if (b.gradient || b.category != Category::Activations) continue;
      const bool boundary = &b - out_.buffers.data() == out_.input || &b - out_.buffers.data() == out_.output;
      const bool attribute = std::any_of(out_.sticky.begin(), out_.sticky.end(), [&](const auto& s) {
        return options_.backward && s.event < out_.forward_end && s.buffer == &b - out_.buffers.data();
      });
      const bool crosses = b.alloc < out_.forward_end && (b.last >= out_.forward_end || attribute) && b.drop < 0;
      if (!crosses && !boundary) b.category = Category::Transient;
    }
  }

  const OpList& list_;
  const std::vector<Span>& spans_;
  const model::Provider& provider_;
  const TraceOptions& options_;
  const Passes passes_;
  UnitTrace out_;
  std::vector<int> generations_;       // per storage: the next generation
  std::vector<BufferId> gradient_;     // per gradient root
  std::map<BufferId, std::vector<TensorId>> written_; // tensors whose d: has a value, by buffer
  std::vector<Drop> drops_;             // of spans that hold nothing
  std::vector<Pinned> pinned_;
  int start_ = 0;                       // first event of the latest forward run
  std::vector<std::vector<Bytes>> scratch_;
};

} // namespace

UnitTrace trace(const OpList& list, const std::vector<Span>& spans, const model::Provider& provider,
                const TraceOptions& options) {
  return Tracer(list, spans, provider, options).run();
}

} // namespace gdn::program
