#include "tests/program/brute_force.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>

#include <fmt/core.h>

#include "core/error.h"
#include "tests/program/meaning.h"

namespace gdn::brute {

using namespace gdn::model;
using program::Pass;

namespace {

// ------------------------------------------------------------------------------------- memory ----

class Ledger {
public:
  struct Item {
    std::string name;
    Bytes bytes;
    Category category;
    bool counted;
  };
  int add(std::string name, Bytes bytes, Category category, bool counted) {
    items_.push_back({std::move(name), bytes, category, counted});
    return static_cast<int>(items_.size()) - 1;
  }
  void set_present(int id, bool present) {
    if (present) present_.insert(id);
    else present_.erase(id);
    if (items_[static_cast<size_t>(id)].counted) level_ += present ? items_[static_cast<size_t>(id)].bytes : -items_[static_cast<size_t>(id)].bytes;
  }
  Bytes level() const { return level_; }
  const std::set<int>& present() const { return present_; }
  Item& item(int id) { return at(items_, id); }
  const std::vector<Item>& items() const { return items_; }
  CategoryBytes by(const std::vector<int>& ids) {
    CategoryBytes sum;
    for (int id : ids)
      if (item(id).counted) sum[item(id).category] += item(id).bytes;
    return sum;
  }

private:
  std::vector<Item> items_;
  std::set<int> present_;
  Bytes level_ = 0;
};

// A storage: live from construction to destruction, except while resized to zero.
class Memory {
public:
  Memory(Ledger& ledger, std::string name, Bytes bytes, Category category, bool counted = true)
      : ledger_(ledger), id_(ledger.add(std::move(name), bytes, category, counted)) {
    refill();
  }
  ~Memory() { resize_to_zero(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void refill() { set(true); }
  void resize_to_zero() { set(false); }
  bool present() const { return present_; }
  int id() const { return id_; }

private:
  void set(bool present) {
    if (present != present_) ledger_.set_present(id_, present);
    present_ = present;
  }
  Ledger& ledger_;
  int id_;
  bool present_ = false;
};
using Ref = std::shared_ptr<Memory>;

// ------------------------------------------------------------------------- what an engine holds ----

// A gradient: made by its first writer, gone once everybody on the tape that names it has run.
struct Gradient {
  Ref memory;
  int users = 0;
  std::vector<char> covered; // columns that have a value
  bool unclear = false;      // shared by an alias before all of it had one
};

struct Entry;
using Tape = std::vector<Entry>;

// What a checkpoint object refers to.
struct Checkpoint {
  int span = -1;
  std::map<StorageId, Ref> arguments;  // what its replay reads
  std::vector<Ref> held;               // `holds`: arguments, outputs and internals
  std::vector<std::pair<StorageId, std::weak_ptr<Memory>>> outputs; // made in its run
  Tape inner;                          // after the replay of a discard span
};

// What is kept for the backward of a node: an op's saved tensors by step, or a checkpoint.
struct Entry {
  std::vector<std::vector<std::pair<TensorId, Ref>>> saved;
  std::vector<Ref> pinned;
  std::unique_ptr<Checkpoint> checkpoint;

  void collect(std::vector<Ref>& into) const {
    for (const auto& step : saved)
      for (const auto& [t, ref] : step) into.push_back(ref);
    into.insert(into.end(), pinned.begin(), pinned.end());
    if (!checkpoint) return;
    for (const auto& [s, ref] : checkpoint->arguments) into.push_back(ref);
    into.insert(into.end(), checkpoint->held.begin(), checkpoint->held.end());
  }
};

// One run of consecutive ops: the local variables of the code that runs them.
struct Frame {
  std::map<StorageId, Ref> locals;
  std::map<StorageId, int> last_use;             // op after which the local goes
  std::vector<char> executes;
  std::vector<std::pair<int, Ref>> held;         // frame holds, with the op that ends them
  std::map<StorageId, std::weak_ptr<Memory>> refill;
  std::vector<Checkpoint*> open;                 // checkpoints whose outputs are being made
  bool generation0 = false;
};

struct Machine {
  const std::vector<Unit>& units;
  const Provider& provider;
  Ledger ledger = {};
  std::vector<Sample> samples = {};
  std::vector<std::vector<int>> live = {}; // per sample
  std::vector<Bytes> scratch = {};
  // Attributes overwritten by the op's next run, per unit and hold.
  std::map<std::pair<int, int>, Ref> attributes = {};
};

// One unit running one micro-batch.
class Instance {
public:
  Instance(Machine& machine, int unit, int micro_batch, const Meaning& meaning)
      : machine_(machine), m_(meaning), list_(meaning.list), unit_(unit), micro_batch_(micro_batch) {}

  Ref forward(Ref input) {
    Frame f;
    f.generation0 = true;
    f.executes.assign(list_.ops.size(), 1);
    enter(f, m_.forest);
    if (list_.output >= 0) f.last_use[m_.storage(list_.output)] = m_.op_count(); // returned
    if (input && f.last_use.count(m_.storage(list_.input))) f.locals[m_.storage(list_.input)] = std::move(input);
    input.reset();
    level(m_.forest, f, Pass::Forward, -1, m_.options.backward ? &tape_ : nullptr);
    Ref output = list_.output >= 0 ? f.locals.at(m_.storage(list_.output)) : nullptr;
    f = Frame();
    if (!m_.options.backward) caller_.clear();
    for (const auto& weak : made_) // generation 0 that crosses
      if (Ref ref = weak.lock(); ref && ref->present() && ref != output && m_.options.backward)
        if (Category& c = machine_.ledger.item(ref->id()).category; c == Category::Transient) c = Category::Activations;
    made_.clear();
    if (output)
      if (Category& c = machine_.ledger.item(output->id()).category; c == Category::Transient) c = Category::Activations;
    return output;
  }

  bool wants_output_gradient() const { return list_.output >= 0 && at(m_.required, list_.output); }

  // Returns d:input.
  Ref backward(Ref output_gradient) {
    plan_gradients(std::move(output_gradient));
    backward(tape_, m_.forest);
    Ref out;
    if (list_.input >= 0) out = gradient(list_.input).memory;
    gradients_.clear();
    caller_.clear();
    tape_.clear();
    return out;
  }

private:
  const Span& span(int i) const { return at(m_.spans, i); }

  // ------------------------------------------------------------------------------ running ----

  // Where the run of `nodes` refers to each local last. What it records refers to more: saved
  // tensors, and the arguments of spans that will be replayed.
  void enter(Frame& f, const std::vector<Node>& nodes) const {
    for (const Node& node : nodes)
      for (int i = node.first; i <= node.last; ++i) {
        for (StorageId s : m_.touched(i, f.executes)) f.last_use[s] = i;
        if (node.op >= 0)
          for (TensorId t : m_.saved(i)) f.last_use[m_.storage(t)] = i;
        else
          for (StorageId s : m_.wanted_again(i, span(node.span))) f.last_use[s] = i;
      }
  }

  // Runs one level of nodes. `tape`: null inside a span that runs without recording.
  void level(const std::vector<Node>& nodes, Frame& f, Pass pass, int span_index, Tape* tape) {
    std::vector<std::unique_ptr<Checkpoint>> unrecorded;
    std::vector<Checkpoint*> discards;
    for (const Node& node : nodes) {
      if (node.op >= 0) {
        if (at(f.executes, node.op)) run_forward(node.op, f, pass, span_index);
        if (tape) tape->push_back(save(node.op, f));
        leave(node.op, f);
      } else {
        auto checkpoint = std::make_unique<Checkpoint>();
        checkpoint->span = node.span;
        const bool discard = span(node.span).kind == SpanKind::DiscardOutput && m_.options.backward;
        if (tape && m_.replays(span(node.span))) capture_arguments(*checkpoint, f);
        if (discard) {
          f.open.push_back(checkpoint.get());
          discards.push_back(checkpoint.get());
        }
        level(node.children, f, pass, span_index, nullptr);
        if (discard) f.open.erase(std::find(f.open.begin(), f.open.end(), checkpoint.get()));
        if (tape) {
          tape->emplace_back();
          tape->back().checkpoint = std::move(checkpoint);
        } else {
          unrecorded.push_back(std::move(checkpoint));
        }
      }
      for (Checkpoint* c : discards)
        if (hooked_in(c->span, node)) drop(*c);
    }
  }

  // At its own level a span is one op: a hook inside it is a hook on it.
  bool hooked_in(int span_index, const Node& node) const {
    return span(span_index).hook >= node.first && span(span_index).hook <= node.last;
  }

  void drop(Checkpoint& c) {
    for (auto& [s, weak] : c.outputs)
      if (Ref ref = weak.lock()) ref->resize_to_zero();
  }

  void capture_arguments(Checkpoint& c, const Frame& f) const {
    const Span& s = span(c.span);
    for (int i = s.first; i <= s.last; ++i)
      for (StorageId wanted : m_.wanted_again(i, s))
        if (auto it = f.locals.find(wanted); it != f.locals.end()) c.arguments[wanted] = it->second;
    if (s.kind != SpanKind::DiscardOutput || !s.holds) return;
    for (int i = s.first; i <= s.last; ++i)
      for (TensorId t : m_.op(i).inputs)
        if (int maker = m_.maker(t); maker < s.first)
          if (auto it = f.locals.find(m_.storage(t)); it != f.locals.end()) c.held.push_back(it->second);
  }

  Ref look_up(const Frame& f, TensorId t, const std::string& reader) const {
    auto it = f.locals.find(m_.storage(t));
    if (it == f.locals.end()) throw std::logic_error(fmt::format("'{}' is not there for {}", list_.tensor(t).name, reader));
    return it->second;
  }

  static void need(const Ref& ref, const std::string& name) {
    if (!ref->present()) throw Error(ErrorCode::Config, fmt::format("'{}' is discarded but read", name));
  }

  void run_forward(int index, Frame& f, Pass pass, int span_index) {
    const Op& o = m_.op(index);
    for (TensorId t : o.inputs) need(look_up(f, t, o.name), list_.tensor(t).name);
    const Bytes before = machine_.ledger.level();
    for (TensorId t : o.outputs) {
      if (list_.tensor(t).base < 0) f.locals[m_.storage(t)] = make(f, m_.storage(t));
      Ref ref = look_up(f, t, o.name);
      for (Checkpoint* c : f.open)
        for (TensorId out : m_.outputs(span(c->span)))
          if (m_.listed(out) == t) {
            c->outputs.emplace_back(m_.storage(t), ref);
            if (span(c->span).holds) c->held.push_back(ref);
          }
      for (size_t h = 0; h < list_.holds.size(); ++h) {
        const Hold& hold = list_.holds[h];
        if (m_.listed(hold.tensor) != t) continue;
        if (hold.kind == HoldKind::Frame) f.held.emplace_back(hold.until, ref);
        if (hold.kind == HoldKind::Caller && f.generation0) caller_.push_back(ref);
      }
    }
    sample(index, -1, pass, span_index, before);
    for (size_t h = 0; h < list_.holds.size(); ++h)
      if (list_.holds[h].kind == HoldKind::NextForward && contains(o.outputs, list_.holds[h].tensor))
        machine_.attributes[{unit_, static_cast<int>(h)}] = look_up(f, list_.holds[h].tensor, o.name);
  }

  Ref make(Frame& f, StorageId s) {
    if (auto it = f.refill.find(s); it != f.refill.end())
      if (Ref old = it->second.lock(); old && !old->present()) {
        old->refill();
        return old;
      }
    const Storage& storage = at(list_.storages, s);
    const Category category = storage.category == Category::Activations ? Category::Transient : storage.category;
    Ref ref = std::make_shared<Memory>(machine_.ledger, storage.name, storage.bytes, category, !storage.external);
    if (f.generation0) made_.push_back(ref);
    return ref;
  }

  void leave(int index, Frame& f) const {
    for (auto it = f.locals.begin(); it != f.locals.end();)
      it = f.last_use[it->first] <= index ? f.locals.erase(it) : std::next(it);
    std::erase_if(f.held, [&](const auto& h) { return h.first <= index; });
  }

  Entry save(int index, const Frame& f) const {
    Entry e;
    const Op& o = m_.op(index);
    for (size_t i = 0; i < o.steps.size(); ++i) {
      e.saved.emplace_back();
      if (at(m_.step_runs, index)[i])
        for (TensorId t : m_.read_by(o.steps[i])) e.saved.back().emplace_back(t, look_up(f, t, o.name));
    }
    if (m_.runs(index))
      for (const Pin& p : o.pins) e.pinned.push_back(look_up(f, p.tensor, o.name));
    return e;
  }

  void sample(int op, int step, Pass pass, int span_index, Bytes before, std::string writes = {}) {
    const Bytes scratch = machine_.provider.work(list_, m_.op(op), step).scratch;
    machine_.samples.push_back({.unit = unit_, .micro_batch = micro_batch_, .op = op, .step = step, .pass = pass,
                                .span = span_index, .before = before, .level = machine_.ledger.level() + scratch,
                                .writes = std::move(writes)});
    machine_.live.emplace_back(machine_.ledger.present().begin(), machine_.ledger.present().end());
    machine_.scratch.push_back(scratch);
  }

  // ----------------------------------------------------------------------------- backward ----

  Gradient& gradient(TensorId t) { return *gradients_.at(m_.gradient_root(t)); }

  // Counts who will name each gradient.
  void plan_gradients(Ref output_gradient) {
    for (size_t t = 0; t < list_.tensors.size(); ++t) gradients_[static_cast<TensorId>(t)] = std::make_shared<Gradient>();
    for (int i = 0; i < m_.op_count(); ++i) {
      for (size_t s = 0; s < m_.op(i).steps.size(); ++s) {
        for (TensorId t : at(m_.gradient_reads, i)[s]) ++gradient(t).users;
        for (TensorId t : at(m_.gradient_writes, i)[s]) ++gradient(t).users;
      }
      for (size_t a = 0; a < m_.op(i).grad_aliases.size(); ++a)
        if (at(m_.alias_runs, i)[a]) {
          ++gradient(m_.op(i).grad_aliases[a].input).users;
          ++gradient(m_.op(i).grad_aliases[a].output).users;
        }
    }
    if (list_.input >= 0) ++gradient(list_.input).users; // handed to whoever made the input
    if (output_gradient) {
      gradient(list_.output).memory = std::move(output_gradient);
      cover(list_.output);
    }
  }

  void release(TensorId t) { release(gradient(t)); }
  static void release(Gradient& g) {
    if (--g.users == 0) g.memory.reset();
  }

  static bool filled(const Gradient& g, const Tensor& root) {
    return std::count(g.covered.begin(), g.covered.end(), 1) >= root.cols();
  }

  // Marks the columns of d:t as having a value; answers what they had before.
  char cover(TensorId t) {
    const Tensor& tensor = list_.tensor(t);
    const Tensor& root = list_.tensor(m_.gradient_root(t));
    Gradient& g = gradient(t);
    g.covered.resize(static_cast<size_t>(root.cols()), 0);
    std::int64_t first = tensor.offset - root.offset, count = tensor.cols();
    if (tensor.rows() != root.rows() || tensor.row_stride != root.row_stride) { // another shape
      g.unclear = g.unclear || tensor.elements() != root.elements();
      first = 0;
      count = root.cols();
    }
    const auto begin = g.covered.begin() + first;
    const auto had = std::count(begin, begin + count, 1);
    std::fill(begin, begin + count, 1);
    return g.unclear || (had > 0 && had < count) ? '?' : had == 0 ? 'w' : 'a';
  }

  void backward(Tape& tape, const std::vector<Node>& nodes) {
    for (size_t i = nodes.size(); i-- > 0;) {
      for (size_t j = 0; j < i; ++j)
        if (nodes[j].span >= 0 && span(nodes[j].span).kind == SpanKind::DiscardOutput &&
            hooked_in(nodes[j].span, nodes[i]) && m_.replays(span(nodes[j].span)))
          refill(*tape[j].checkpoint, nodes[j]);
      if (nodes[i].op >= 0) {
        run_backward(nodes[i].op, tape[i]);
      } else if (m_.replays(span(nodes[i].span))) {
        if (span(nodes[i].span).kind == SpanKind::WholeBlock) whole_block(*tape[i].checkpoint, nodes[i]);
        else backward(tape[i].checkpoint->inner, nodes[i].children);
      }
      tape[i] = Entry();
    }
  }

  void replay(Checkpoint& c, const Node& node, Frame& f, Tape& tape) {
    f.locals = std::move(c.arguments);
    c.arguments.clear();
    f.executes = m_.executed(span(c.span));
    enter(f, node.children);
    level(node.children, f, Pass::Replay, c.span, &tape);
  }

  void refill(Checkpoint& c, const Node& node) {
    {
      Frame f;
      for (auto& [s, weak] : c.outputs) f.refill[s] = weak;
      replay(c, node, f, c.inner);
    }
    if (span(c.span).holds)
      for (const Entry& e : c.inner) e.collect(c.held);
  }

  void whole_block(Checkpoint& c, const Node& node) {
    std::vector<std::shared_ptr<Gradient>> incoming;
    if (span(c.span).holds)
      for (TensorId t : m_.outputs(span(c.span)))
        if (auto& g = gradients_.at(m_.gradient_root(t)); g->memory) {
          ++g->users;
          incoming.push_back(g);
        }
    Tape inner;
    {
      Frame f;
      f.open.push_back(&c); // new outputs
      replay(c, node, f, inner);
    }
    backward(inner, node.children);
    for (auto& g : incoming) release(*g);
  }

  void run_backward(int index, Entry& e) {
    const Op& o = m_.op(index);
    for (size_t i = 0; i < o.steps.size(); ++i) {
      if (!at(m_.step_runs, index)[i]) continue;
      for (const auto& [t, ref] : e.saved[i]) need(ref, list_.tensor(t).name);
      const Bytes before = machine_.ledger.level();
      std::string writes;
      for (TensorId t : at(m_.gradient_writes, index)[i]) {
        Gradient& g = gradient(t);
        const Tensor& root = list_.tensor(m_.gradient_root(t));
        if (list_.tensor(t).gradient == GradientStorage::Overwrite)
          for (const auto& [saved, ref] : e.saved[i])
            if (saved == t) g.memory = ref;
        if (!g.memory)
          g.memory = std::make_shared<Memory>(machine_.ledger, "d:" + root.name, root.bytes(),
                                              at(list_.storages, root.storage).category == Category::Logits ? Category::Logits : Category::Transient);
        writes += cover(t);
      }
      sample(index, static_cast<int>(i), Pass::Backward, -1, before, writes);
      e.saved[i].clear();
      for (TensorId t : at(m_.gradient_reads, index)[i]) release(t);
      for (TensorId t : at(m_.gradient_writes, index)[i]) release(t);
    }
    for (size_t a = 0; a < o.grad_aliases.size(); ++a) {
      if (!at(m_.alias_runs, index)[a]) continue;
      const TensorId input = m_.gradient_root(o.grad_aliases[a].input), output = m_.gradient_root(o.grad_aliases[a].output);
      auto &from = gradients_.at(output), &to = gradients_.at(input);
      if (to->memory) throw Error(ErrorCode::Internal, fmt::format("d:{} already has a value", list_.tensor(input).name));
      from->users += to->users;
      from->unclear = from->unclear || !filled(*from, list_.tensor(output));
      to = from;
      release(*from);
      release(*from);
    }
  }

  Machine& machine_;
  const Meaning& m_;
  const OpList& list_;
  int unit_, micro_batch_;
  Tape tape_;
  std::vector<Ref> caller_;
  std::vector<std::weak_ptr<Memory>> made_;
  std::map<TensorId, std::shared_ptr<Gradient>> gradients_;
};

Category gradient_category(const OpList& list, TensorId t) {
  return list.storage_of(t).category == Category::Logits ? Category::Logits : Category::Transient;
}

} // namespace

Execution execute(const std::vector<Unit>& units, const std::vector<program::Slot>& slots, const Provider& provider) {
  Machine machine{.units = units, .provider = provider};
  std::vector<std::unique_ptr<Meaning>> meanings;
  for (const Unit& u : units) meanings.push_back(std::make_unique<Meaning>(*u.list, *u.spans, u.options));
  std::map<std::pair<int, int>, std::unique_ptr<Instance>> instances;
  Execution out;
  for (size_t k = 0; k < slots.size(); ++k) {
    const program::Slot& slot = slots[k];
    std::vector<int> members;
    for (size_t u = 0; u < units.size(); ++u)
      if (units[u].chunk == slot.chunk) members.push_back(static_cast<int>(u));
    Ref carried; // the residual stream, or its gradient
    if (slot.pass == Pass::Forward) {
      for (int u : members) {
        const OpList& list = *at(units, u).list;
        if (list.input >= 0 && !carried)
          carried = std::make_shared<Memory>(machine.ledger, list.storage_of(list.input).name, list.storage_of(list.input).bytes, list.storage_of(list.input).category,
                                             !list.storage_of(list.input).external);
        auto& instance = instances[{u, slot.micro_batch}];
        instance = std::make_unique<Instance>(machine, u, slot.micro_batch, *at(meanings, u));
        carried = instance->forward(std::move(carried));
      }
      if (k == 0) {
        for (int id : machine.ledger.present())
          if (!carried || id != carried->id()) out.retained += machine.ledger.item(id).bytes;
      }
    } else {
      for (auto it = members.rbegin(); it != members.rend(); ++it) {
        const OpList& list = *at(units, *it).list;
        Instance& instance = *instances.at({*it, slot.micro_batch});
        if (it == members.rbegin() && instance.wants_output_gradient())
          carried = std::make_shared<Memory>(machine.ledger, "d:" + list.tensor(list.output).name, list.tensor(list.output).bytes(), gradient_category(list, list.output),
                                             !at(units, *it).options.external_output_gradient);
        carried = instance.backward(std::move(carried));
      }
    }
    carried.reset();
    out.slot_levels.push_back(machine.ledger.level());
    out.slot_ends.push_back(machine.samples.size());
  }
  out.end_level = machine.ledger.level();
  for (size_t i = 0; i < machine.samples.size(); ++i) {
    machine.samples[i].by = machine.ledger.by(machine.live[i]);
    machine.samples[i].by[Category::Workspace] += machine.scratch[i];
  }
  out.samples = std::move(machine.samples);
  out.live = std::move(machine.live);
  for (const Ledger::Item& item : machine.ledger.items()) out.names.push_back(item.counted ? item.name : "");
  return out;
}

Execution execute_alone(const OpList& list, const std::vector<Span>& spans, const Provider& provider,
                        const program::TraceOptions& options) {
  std::vector<program::Slot> slots{{Pass::Forward, 0, 0}};
  if (options.backward) slots.push_back({Pass::Backward, 0, 0});
  return execute({{&list, &spans, options, 0}}, slots, provider);
}

} // namespace gdn::brute
