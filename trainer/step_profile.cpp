#include "trainer/step_profile.h"

#include <algorithm>

#include <fmt/core.h>

namespace gdn::trainer {

namespace {

Bytes bytes_of(const program::UnitTrace& trace, program::BufferId id) {
  return id < 0 ? 0 : trace.buffers[static_cast<size_t>(id)].bytes;
}

} // namespace

std::string StepProfile::kind_of(int unit) const {
  std::string name = session_.program().units()[static_cast<size_t>(unit)].list->name;
  std::replace(name.begin(), name.end(), '.', '+');
  return name;
}

int StepProfile::instances(const std::string& kind) const {
  int n = 0;
  for (size_t u = 0; u < session_.program().units().size(); ++u) n += kind_of(static_cast<int>(u)) == kind;
  return n;
}

Observer StepProfile::observer() {
  now_.clear();
  before_ = session_.ledger().total();
  Observer o;
  o.ran = [this](size_t index, const OpCall& call, Seconds seconds) {
    const std::string kind = kind_of(session_.program().runs()[index].unit);
    const std::string pass(program::name_of(call.pass()));
    now_[fmt::format("layers.{}.{}_seconds", kind, pass)] += seconds;
    now_[fmt::format("ops.{}.{}.{}_seconds", kind, call.op().name, pass)] += seconds;
  };
  o.released = [this](size_t index) {
    const auto& run = session_.program().runs()[index];
    const program::UnitInstance& u = session_.program().units()[static_cast<size_t>(run.unit)];
    if (run.event + 1 != u.trace->forward_end) return; // the end of a unit's forward
    const Bytes after = session_.ledger().total();
    // The input belongs to the unit that reads it, the output to the next one.
    if (run.micro_batch == 0)
      retained_[kind_of(run.unit)] = after - before_ + bytes_of(*u.trace, u.trace->input) - bytes_of(*u.trace, u.trace->output);
    before_ = after;
  };
  return o;
}

void StepProfile::step_done(bool discard) {
  if (discard) return;
  for (const auto& [key, seconds] : now_) {
    auto [at, fresh] = best_.try_emplace(key, seconds);
    if (!fresh) at->second = std::min(at->second, seconds);
  }
}

void StepProfile::add_rows(config::ProfileSet& set) const {
  const double micro_batches = static_cast<double>(session_.run_settings().micro_batches());
  for (const auto& [kind, bytes] : retained_)
    set.rows.push_back({fmt::format("layers.{}.retained_bytes", kind), static_cast<double>(bytes), "bytes", "measured"});
  for (const auto& [key, seconds] : best_) {
    const size_t from = key.find('.') + 1;
    const std::string kind = key.substr(from, key.find('.', from) - from);
    set.rows.push_back({key, seconds / micro_batches / instances(kind), "seconds", "measured"});
  }
}

} // namespace gdn::trainer
