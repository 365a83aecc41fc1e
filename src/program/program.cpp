#include "program/program.h"

#include <algorithm>
#include <map>

#include <fmt/core.h>

namespace gdn::program {

Program::Program(std::vector<UnitInstance> units, std::vector<Slot> slots, int micro_batches)
    : units_(std::move(units)), micro_batches_(micro_batches) {
  bind();
  schedule(slots);
  lifetimes();
}

int Program::buffer(int unit, int micro_batch, BufferId local) const {
  return flat_[static_cast<size_t>(unit)][static_cast<size_t>(micro_batch)][static_cast<size_t>(local)];
}

std::string Program::buffer_name(int id) const {
  const Buffer& b = buffers_[static_cast<size_t>(id)];
  const UnitInstance& u = units_[static_cast<size_t>(b.unit)];
  std::string name = u.trace->buffer_name(b.local);
  size_t generation = name.find(".g", name.size() > 4 ? name.size() - 4 : 0);
  std::string tail = generation == std::string::npos ? "" : name.substr(generation);
  if (generation != std::string::npos) name.resize(generation);
  return fmt::format("{}{}#mb{}{}", u.prefix, name, b.micro_batch, tail);
}

std::string Program::run_name(const Run& run) const {
  const UnitInstance& u = units_[static_cast<size_t>(run.unit)];
  return fmt::format("{}{} #mb{}", u.prefix, u.trace->event_name(run.event, *u.spans), run.micro_batch);
}

// Gives every (unit, micro-batch, local buffer) its flat buffer. A unit's input is the previous
// unit's output, and the gradient of that output is the gradient of its input.
void Program::bind() {
  flat_.resize(units_.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    const UnitTrace& t = *units_[u].trace;
    const bool linked = u > 0 && units_[u - 1].chunk == units_[u].chunk && t.input >= 0;
    flat_[u].resize(static_cast<size_t>(micro_batches_));
    for (int m = 0; m < micro_batches_; ++m) {
      std::vector<int>& map = flat_[u][static_cast<size_t>(m)];
      map.assign(t.buffers.size(), -1);
      if (linked) {
        const UnitTrace& before = *units_[u - 1].trace;
        map[static_cast<size_t>(t.input)] = buffer(static_cast<int>(u) - 1, m, before.output);
        if (t.input_gradient >= 0 && before.output_gradient >= 0)
          map[static_cast<size_t>(t.input_gradient)] = buffer(static_cast<int>(u) - 1, m, before.output_gradient);
      }
      for (size_t i = 0; i < t.buffers.size(); ++i) {
        const program::Buffer& b = t.buffers[i];
        if (map[i] < 0) {
          map[i] = static_cast<int>(buffers_.size());
          buffers_.push_back({static_cast<int>(u), m, static_cast<BufferId>(i), b.bytes, b.category, b.external});
        }
      }
    }
  }
}

void Program::schedule(const std::vector<Slot>& slots) {
  backward_at_.assign(units_.size(), std::vector<int>(static_cast<size_t>(micro_batches_), -1));
  for (const Slot& s : slots) {
    std::vector<int> members;
    for (size_t u = 0; u < units_.size(); ++u)
      if (units_[u].chunk == s.chunk) members.push_back(static_cast<int>(u));
    if (s.pass == Pass::Backward) std::reverse(members.begin(), members.end());
    for (int u : members) {
      const UnitTrace& t = *units_[static_cast<size_t>(u)].trace;
      if (s.pass == Pass::Backward)
        backward_at_[static_cast<size_t>(u)][static_cast<size_t>(s.micro_batch)] = static_cast<int>(runs_.size());
      const int first = s.pass == Pass::Forward ? 0 : t.forward_end;
      const int last = s.pass == Pass::Forward ? t.forward_end : static_cast<int>(t.events.size());
      for (int e = first; e < last; ++e) runs_.push_back({.unit = u, .micro_batch = s.micro_batch, .event = e});
    }
  }
}

// First run at or after the backward of a unit that belongs to the same pass; -1: none.
int Program::backward_run(int unit, int micro_batch) const {
  const int at = backward_at_[static_cast<size_t>(unit)][static_cast<size_t>(micro_batch)];
  if (at < 0 || at >= static_cast<int>(runs_.size())) return -1;
  const Run& run = runs_[static_cast<size_t>(at)];
  const UnitInstance& u = units_[static_cast<size_t>(run.unit)];
  const bool same = run.micro_batch == micro_batch && u.chunk == units_[static_cast<size_t>(unit)].chunk &&
                    run.event >= u.trace->forward_end;
  return same ? at : -1;
}

namespace {

struct Living {
  int first = -1, last = -1;
  void cover(int at) {
    if (at < 0) return; // of a pass that is not in the schedule
    if (first < 0 || at < first) first = at;
    last = std::max(last, at);
  }
};

} // namespace

// Position of every local lifetime in the flat list, attributes of the next run included, then the
// acquire and release lists and the predicted level of every run.
void Program::lifetimes() {
  // Where each (unit, micro-batch, event) runs.
  std::vector<std::vector<std::vector<int>>> at(units_.size());
  for (size_t u = 0; u < units_.size(); ++u)
    at[u].assign(static_cast<size_t>(micro_batches_), std::vector<int>(units_[u].trace->events.size(), -1));
  for (size_t r = 0; r < runs_.size(); ++r)
    at[static_cast<size_t>(runs_[r].unit)][static_cast<size_t>(runs_[r].micro_batch)][static_cast<size_t>(runs_[r].event)] =
        static_cast<int>(r);

  std::vector<std::vector<Living>> lives(buffers_.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    const UnitTrace& t = *units_[u].trace;
    for (int m = 0; m < micro_batches_; ++m) {
      const int events = static_cast<int>(t.events.size());
      auto position = [&](int event) { return at[u][static_cast<size_t>(m)][static_cast<size_t>(event)]; };
      for (size_t i = 0; i < t.buffers.size(); ++i) {
        const program::Buffer& b = t.buffers[i];
        std::vector<Living>& mine = lives[static_cast<size_t>(buffer(static_cast<int>(u), m, static_cast<BufferId>(i)))];
        if (mine.empty()) mine.emplace_back();
        // A boundary buffer is made by its producer's unit; the chunk's own input is there at entry.
        const bool entry = static_cast<BufferId>(i) == t.output_gradient && u + 1 < units_.size() &&
                           units_[u + 1].chunk == units_[u].chunk;
        if (b.alloc == events) { // d:output of a unit whose backward runs nothing
          if (static_cast<BufferId>(i) == t.input_gradient) mine[0].cover(backward_run(static_cast<int>(u), m));
          continue;
        }
        if (!entry && b.last >= 0) mine[0].cover(position(std::max(b.alloc, 0)));
        if (b.drop >= 0) {
          mine[0].cover(position(b.drop));
          if (b.refill >= 0) {
            mine.emplace_back();
            mine.back().cover(position(b.refill));
            mine.back().cover(position(b.last));
          }
        } else if (b.last == events) { // held until a backward pass that runs nothing
          mine[0].cover(backward_at_[u][static_cast<size_t>(m)] - 1);
        } else if (b.last >= 0) {
          mine[0].cover(position(b.last));
        }
      }
    }
  }
  // An attribute keeps its buffer until the op's next run, in any micro-batch; the last one to the end.
  struct Binding { int run, buffer; };
  std::map<std::pair<int, model::StorageId>, std::vector<Binding>> bindings;
  auto keep = [&](int id, int until) {
    const Buffer& b = buffers_[static_cast<size_t>(id)];
    const program::Buffer& local = units_[static_cast<size_t>(b.unit)].trace->buffers[static_cast<size_t>(b.local)];
    std::vector<Living>& mine = lives[static_cast<size_t>(id)];
    // Nothing of a dropped buffer is kept until it has been filled again.
    if (local.drop < 0 || (local.refill >= 0 && until > mine.back().first)) mine.back().cover(until);
  };
  for (size_t r = 0; r < runs_.size(); ++r) {
    const Run& run = runs_[r];
    const UnitTrace& t = *units_[static_cast<size_t>(run.unit)].trace;
    for (const auto& s : t.sticky)
      if (s.event == run.event) {
        int id = buffer(run.unit, run.micro_batch, s.buffer);
        auto& held = bindings[{run.unit, t.list->tensor(t.buffers[static_cast<size_t>(s.buffer)].tensor).storage}];
        if (!held.empty()) keep(held.back().buffer, static_cast<int>(r));
        held.push_back({static_cast<int>(r), id});
      }
  }
  for (auto& [key, held] : bindings)
    keep(held.back().buffer, static_cast<int>(runs_.size()) - 1);

  for (size_t id = 0; id < buffers_.size(); ++id)
    for (const Living& life : lives[id])
      if (life.first >= 0) {
        runs_[static_cast<size_t>(life.first)].allocs.push_back(static_cast<int>(id));
        runs_[static_cast<size_t>(life.last)].frees.push_back(static_cast<int>(id));
      }
  CategoryBytes level;
  for (Run& run : runs_) {
    for (int id : run.allocs)
      if (!buffers_[static_cast<size_t>(id)].external) level[buffers_[static_cast<size_t>(id)].category] += buffers_[static_cast<size_t>(id)].bytes;
    const Bytes scratch = units_[static_cast<size_t>(run.unit)].trace->events[static_cast<size_t>(run.event)].scratch;
    run.by = level;
    run.by[Category::Workspace] += scratch;
    run.level = run.by.total();
    for (int id : run.frees)
      if (!buffers_[static_cast<size_t>(id)].external) level[buffers_[static_cast<size_t>(id)].category] -= buffers_[static_cast<size_t>(id)].bytes;
  }
}

} // namespace gdn::program
