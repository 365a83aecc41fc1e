#include "trainer/sweep.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "core/error.h"
#include "kernels/describe/own.h"
#include "plan/plan.h"
#include "trainer/cpu/device.h"
#include "trainer/sweep_file.h"

namespace gdn::trainer {

std::string signature(const program::Program& program) {
  std::string s;
  for (const program::Program::Run& run : program.runs()) {
    const program::UnitInstance& u = program.units()[static_cast<size_t>(run.unit)];
    const program::Event& e = u.trace->events[static_cast<size_t>(run.event)];
    s += fmt::format("{}{}:{}.{}{}", u.prefix, u.list->ops[static_cast<size_t>(e.op)].name, e.step, static_cast<int>(e.pass), run.micro_batch);
    for (const auto* ids : {&run.allocs, &run.frees}) {
      s += '|';
      for (int id : *ids) s += program.buffer_name(id) + ",";
    }
    s += '\n';
  }
  return s;
}

// ------------------------------------------------------------------------------------ agreement ----

SweepAgreement agreement_of(const std::vector<SweepRow>& rows) {
  SweepAgreement a;
  std::vector<const SweepRow*> ran;
  auto keep_worst = [](double& worst, double off) {
    if (std::abs(off) > std::abs(worst)) worst = off;
  };
  for (const SweepRow& r : rows) {
    if (!r.same_as.empty()) continue;
    ++a.settings;
    a.exact_peaks += r.measured_peak == r.predicted_peak;
    a.identical += r.identical;
    if (r.measured_process > 0 && r.predicted_process > 0) {
      const double off = static_cast<double>(r.predicted_process) / static_cast<double>(r.measured_process) - 1;
      ++a.processes;
      a.processes_within += std::abs(off) <= 0.01;
      a.process_mean += std::abs(off);
      keep_worst(a.process_worst, off);
    }
    const double off = r.predicted_seconds / r.median_seconds - 1;
    a.time_mean += std::abs(off);
    a.time_bias += off;
    keep_worst(a.time_worst, off);
    ran.push_back(&r);
  }
  const auto n = static_cast<double>(std::max<std::int64_t>(1, a.settings));
  a.time_mean /= n;
  a.time_bias /= n;
  a.process_mean /= static_cast<double>(std::max<std::int64_t>(1, a.processes));
  for (size_t i = 0; i < ran.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const SweepRow *fast = ran[i], *slow = ran[j];
      if (fast->median_seconds > slow->median_seconds) std::swap(fast, slow);
      if (fast->predicted_seconds == slow->predicted_seconds || slow->median_seconds <= (1 + SweepAgreement::kApart) * fast->median_seconds) continue;
      ++a.pairs;
      if (fast->predicted_seconds < slow->predicted_seconds) ++a.ordered;
      else a.overlapping += fast->slowest_seconds >= slow->measured_seconds;
    }
  return a;
}

// ------------------------------------------------------------------------------------ the sweep ----

namespace {

// A forward op by name: equal layers share their times.
std::string op_key(const program::Program& program, int unit, int op) {
  const model::OpList& list = *program.units()[static_cast<size_t>(unit)].list;
  const std::string& name = list.ops[static_cast<size_t>(op)].name;
  // "L1.gdn..." of a group of layers is the op of a single one.
  const bool grouped = name.size() > 2 && name[0] == 'L' && std::isdigit(static_cast<unsigned char>(name[1]));
  return grouped ? name.substr(name.find('.') + 1) : name;
}

kernels::Fingerprint fingerprint_of(double x) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return {bits, bits};
}

// Few modules first, full recompute last: what a sweep that is stopped has measured.
std::vector<plan::Setting> in_order(std::vector<plan::Setting> settings) {
  std::stable_sort(settings.begin(), settings.end(), [](const plan::Setting& a, const plan::Setting& b) {
    const bool full_a = a.granularity == config::Granularity::Full, full_b = b.granularity == config::Granularity::Full;
    return full_a != full_b ? full_b : a.modules.size() < b.modules.size();
  });
  return settings;
}

void predict_memory(SweepRow& row, plan::Workload& workload, const plan::Setting& setting, const program::Program& program, const TimePrediction& by) {
  const Prediction p = predict(workload, setting, program);
  row.predicted_peak = p.peak_bytes;
  row.predicted_process = by.outside() > 0 ? p.total_bytes() + by.outside() : 0;
}

} // namespace

Sweep::Sweep(Session& session, const Setup& setup, const Tokens& tokens, SweepOptions options)
    : session_(session), setup_(setup), tokens_(tokens), options_(std::move(options)), time_(setup, session.device()) {
  session_.parameters().initialise(setup.train.seed);
}

// After a pause, as between settings, a GPU runs faster than it can for long.
constexpr std::int64_t kWarmUpRuns = 2;

// One run with poisoned memory and guard bands, then those that warm up and the timed ones without; all must give the
// same bits.
void Sweep::measure(SweepRow& row, const plan::Setting& setting, bool baseline) {
  session_.use(setting, Checks{.poison = true});
  const std::vector<Batch> batches = step_batches(tokens_, session_.run_settings(), 0);
  std::vector<double> seconds;
  const std::int64_t untimed = 1 + (session_.device().asynchronous() ? kWarmUpRuns : 0);
  for (std::int64_t i = 0; i < untimed + options_.repeats; ++i) {
    const StepResult r = session_.run(batches, 0, setup_.train.seed);
    if (i >= untimed) seconds.push_back(r.seconds);
    row.measured_peak = r.peak.bytes;
    row.at_peak = r.peak.by;
    note_results(row, r.loss, baseline && i == 0);
    session_.executor().set_checks({.poison = false});
  }
  row.arena = session_.arena_bytes();
  row.measured_process = session_.device().memory_now().used;
  std::sort(seconds.begin(), seconds.end());
  row.measured_seconds = seconds.front(); // the least disturbed run
  row.median_seconds = seconds[(seconds.size() - 1) / 2];
  row.slowest_seconds = seconds.back();
  if (!baseline) return;
  baseline_seconds_ = row.measured_seconds;
  Observer observe; // times op by op, which makes a device wait: runs of their own
  observe.ran = [&](size_t index, const OpCall& call, Seconds s) {
    if (call.step() >= 0) return;
    const auto [best, fresh] = forward_seconds_.try_emplace(op_key(session_.program(), session_.program().runs()[index].unit, call.op_index()), s);
    if (!fresh) best->second = std::min(best->second, s);
  };
  for (std::int64_t i = 0; i < options_.repeats; ++i) session_.run(batches, 0, setup_.train.seed, observe);
}

void Sweep::note_results(SweepRow& row, double loss, bool baseline) {
  std::vector<kernels::Fingerprint> results{fingerprint_of(loss)};
  for (const ParameterSlot& slot : session_.parameters().slots()) results.push_back(session_.parameters().gradient_fingerprint(slot));
  if (baseline) baseline_results_ = results;
  row.results = {};
  for (size_t i = 0; i < results.size(); ++i) {
    const std::uint64_t parts[] = {results[i].low, results[i].high};
    for (size_t p = 0; p < 4; ++p) row.results.add(static_cast<std::uint32_t>(parts[p / 2] >> (p % 2 * 32)), 4 * i + p);
    if (results[i] == baseline_results_[i]) continue;
    if (row.identical) row.differs = i == 0 ? "the loss" : session_.parameters().slots()[i - 1].name();
    row.identical = false;
  }
}

Seconds Sweep::replay_seconds(const program::Program& program) const {
  Seconds sum = 0;
  for (const program::Program::Run& run : program.runs()) {
    const program::Event& e = program.units()[static_cast<size_t>(run.unit)].trace->events[static_cast<size_t>(run.event)];
    if (e.pass != program::Pass::Replay) continue;
    if (auto at = forward_seconds_.find(op_key(program, run.unit, e.op)); at != forward_seconds_.end()) sum += at->second;
  }
  return sum;
}

config::Profile Sweep::identity() const {
  config::Profile p = profile_identity(setup_, session_.device(), session_.workload().provider(), options_.command);
  if (!options_.versions.empty()) p.identity.push_back({"versions", options_.versions});
  p.identity.push_back({"fingerprint", sweep_fingerprint(setup_)});
  return p;
}

std::vector<SweepRow> Sweep::run(const std::filesystem::path& file, const std::function<void(const SweepRow&, size_t, size_t)>& tell,
                                 const std::function<bool()>& stop) {
  const config::Profile before = earlier_sweep(file, setup_), head = identity();
  bool first = before.sets.empty();
  const std::vector<plan::Setting> settings = in_order(plan::legal_settings(session_.workload(), options_.hypothetical));
  const int micro_batches = static_cast<int>(session_.run_settings().micro_batches());
  std::map<std::string, size_t> seen; // signature -> row that ran
  std::vector<SweepRow> rows;
  SweepRow baseline;
  measure(baseline, {}, true);
  for (size_t i = 0; i < settings.size() && !stop(); ++i) {
    const plan::Setting& setting = settings[i];
    const program::Program program = step_program(session_.workload(), setting, micro_batches);
    const auto [same, fresh] = seen.try_emplace(signature(program), rows.size());
    SweepRow row;
    if (!fresh) {
      row = rows[same->second];
      row.same_as = row.setting;
    } else if (const config::ProfileSet* old = before.find(setting.text())) {
      row = from_set(*old);
      const SweepRow now = from_set(to_set(baseline)); // a file holds a part of the bits
      row.identical = row.identical && row.results == now.results;
    } else if (setting.text() == plan::Setting{}.text()) {
      row = baseline;
    } else {
      try {
        measure(row, setting, false);
      } catch (const Error& e) {
        if (e.code() != ErrorCode::DoesNotFit) throw;
        seen.erase(same);
        too_large_.push_back(setting.text());
        continue;
      }
    }
    row.setting = setting.text();
    if (fresh) {
      predict_memory(row, session_.workload(), setting, program, time_);
      const std::optional<PredictedTime> planned = time_.of(setting);
      row.planned = planned.has_value();
      row.predicted_seconds = planned ? planned->forward_backward : baseline_seconds_ + replay_seconds(program);
    }
    rows.push_back(row);
    if (!before.find(row.setting)) append_to_sweep(file, head, row, std::exchange(first, false));
    tell(row, i + 1, settings.size());
  }
  return rows;
}

// ------------------------------------------------------------------------------- predicted again ----

namespace {

const model::Provider& provider_named(const std::string& name) {
  for (const model::Provider* p : {&kernels::own_provider(), &cpu_provider(), &model::upstream_provider()})
    if (p->name() == name) return *p;
  throw Error(ErrorCode::Config, fmt::format("provider '{}' of a measured file is not known: own, cpu or upstream", name));
}

} // namespace

std::vector<SweepRow> predict_again(const Setup& setup, const config::Profile& measured) {
  auto identity = [&](std::string_view key) -> std::string {
    for (const auto& [k, v] : measured.identity)
      if (k == key) return v;
    return {};
  };
  for (const auto& [key, mine] : {std::pair<const char*, std::string>{"model", setup.profile.model.name}, {"stack", setup.profile.run.stack}})
    if (identity(key) != mine)
      throw Error(ErrorCode::Config, fmt::format("the measured sweep is of {} '{}', the configuration of '{}'", key, identity(key), mine));
  const model::Provider& provider = provider_named(identity("provider"));
  plan::Workload workload(setup.profile.model, setup.profile.run, provider);
  TimePrediction time(setup, identity("device"), provider);
  std::map<std::string, plan::Setting> legal;
  for (plan::Setting& s : plan::legal_settings(workload, true)) legal.emplace(s.text(), std::move(s));
  std::map<std::string, std::string> seen; // signature -> setting
  std::vector<SweepRow> rows;
  for (const config::ProfileSet& set : measured.sets) {
    const auto setting = legal.find(set.modules);
    if (setting == legal.end()) throw Error(ErrorCode::Config, fmt::format("the measured setting '{}' is not a legal one of this configuration", set.modules));
    SweepRow row = from_set(set);
    if (row.median_seconds <= 0) throw Error(ErrorCode::Config, fmt::format("'{}' has no row time.forward_backward_seconds_median: not the file of a sweep", set.modules));
    const program::Program program = step_program(workload, setting->second, static_cast<int>(setup.profile.run.micro_batches()));
    const auto [same, fresh] = seen.try_emplace(signature(program), row.setting);
    if (!fresh) row.same_as = same->second;
    predict_memory(row, workload, setting->second, program, time);
    if (const std::optional<PredictedTime> planned = time.of(setting->second)) {
      row.planned = true;
      row.predicted_seconds = planned->forward_backward;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

} // namespace gdn::trainer
