#include "trainer/sweep.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "config/yaml.h"
#include "core/error.h"
#include "plan/plan.h"
#include "reference/random.h"
#include "trainer/atomic_file.h"
#include "trainer/mapped_file.h"
#include "trainer/memory_report.h"
#include "trainer/telemetry.h"

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

double rank_agreement(const std::vector<double>& predicted, const std::vector<double>& measured) {
  std::int64_t pairs = 0, alike = 0;
  for (size_t i = 0; i < predicted.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      if (predicted[i] == predicted[j]) continue;
      ++pairs;
      alike += (predicted[i] < predicted[j]) == (measured[i] < measured[j]) && measured[i] != measured[j];
    }
  return pairs == 0 ? 1 : static_cast<double>(alike) / static_cast<double>(pairs);
}

namespace {

// A forward op by name: equal layers share their times.
std::string op_key(const program::Program& program, int unit, int op) {
  const model::OpList& list = *program.units()[static_cast<size_t>(unit)].list;
  const std::string& name = list.ops[static_cast<size_t>(op)].name;
  // "L1.gdn..." of a group of layers is the op of a single one.
  const bool grouped = name.size() > 2 && name[0] == 'L' && std::isdigit(static_cast<unsigned char>(name[1]));
  return grouped ? name.substr(name.find('.') + 1) : name;
}

// Whatever decides the figures of a sweep, except what is recomputed.
std::string fingerprint(const Setup& setup) {
  Setup plain = setup;
  plain.profile.run = plan::Setting{}.applied_to(plain.profile.run);
  plain.train.steps = 1;
  const std::string text = resolved_yaml(plain);
  return fmt::format("{:016x}", reference::stream_id(text.data(), text.size()));
}

// Bits of the loss and of every gradient.
std::uint64_t results_of(const StepResult& r, Parameters& parameters) {
  std::uint64_t hash = reference::stream_id(reinterpret_cast<const char*>(&r.loss), sizeof(r.loss));
  for (const ParameterSlot& slot : parameters.slots()) {
    const std::vector<float> gradient = parameters.gradient(slot.name());
    hash = hash * 0x100000001b3 ^ reference::stream_id(reinterpret_cast<const char*>(gradient.data()), gradient.size() * sizeof(float));
  }
  return hash;
}

// A hash as two numbers that a profile holds exactly, and back.
std::uint64_t joined(double high, double low) { return (static_cast<std::uint64_t>(high) << 32) | static_cast<std::uint64_t>(low); }

} // namespace

Sweep::Sweep(Session& session, const Setup& setup, const Tokens& tokens, SweepOptions options)
    : session_(session), setup_(setup), tokens_(tokens), options_(options) {
  session_.parameters().initialise(setup.train.seed);
}

// Without recompute: the times of single ops as well.
void Sweep::measure(SweepRow& row, const plan::Setting& setting, bool baseline) {
  session_.use(setting);
  const std::vector<Batch> batches = step_batches(tokens_, session_.run_settings(), 0);
  std::vector<double> seconds;
  std::map<std::string, std::vector<double>> ops;
  for (std::int64_t i = 0; i <= options_.repeats; ++i) {
    const bool warm_up = i == 0;
    Observer observe;
    if (baseline && !warm_up)
      observe.ran = [&](size_t index, const OpCall& call, Seconds s) {
        const auto& run = session_.program().runs()[index];
        if (call.step() < 0) ops[op_key(session_.program(), run.unit, call.op_index())].push_back(s);
      };
    const StepResult r = session_.run(batches, 0, setup_.train.seed, observe);
    if (!warm_up) seconds.push_back(r.seconds);
    row.measured_peak = r.peak.bytes;
    row.at_peak = r.peak.by;
    row.results = results_of(r, session_.parameters());
    if (baseline && warm_up) baseline_results_ = row.results;
    row.identical = row.identical && row.results == baseline_results_;
  }
  row.arena = session_.arena_bytes();
  std::sort(seconds.begin(), seconds.end());
  row.measured_seconds = seconds.front(); // the least disturbed run
  row.median_seconds = seconds[seconds.size() / 2];
  row.slowest_seconds = seconds.back();
  if (!baseline) return;
  baseline_seconds_ = row.measured_seconds;
  for (auto& [op, times] : ops) forward_seconds_[op] = *std::min_element(times.begin(), times.end());
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

std::vector<SweepRow> Sweep::run(const std::filesystem::path& file, const std::function<void(const SweepRow&, size_t, size_t)>& tell,
                                 const std::function<bool()>& stop) {
  const config::Profile before = read(file);
  bool first = before.sets.empty();
  const std::vector<plan::Setting> settings = plan::legal_settings(session_.workload(), options_.hypothetical);
  const int micro_batches = static_cast<int>(session_.run_settings().micro_batches());
  std::map<std::string, size_t> seen; // signature -> row that ran
  std::vector<SweepRow> rows;
  SweepRow baseline;
  measure(baseline, {}, true);
  for (size_t i = 0; i < settings.size() && !stop(); ++i) {
    const plan::Setting& setting = settings[i];
    SweepRow row;
    row.setting = setting.text();
    const program::Program program = step_program(session_.workload(), setting, micro_batches);
    const auto [same, fresh] = seen.try_emplace(signature(program), rows.size());
    if (!fresh) {
      row = rows[same->second];
      row.same_as = row.setting;
      row.setting = setting.text();
    } else if (const config::ProfileSet* old = before.find(row.setting)) {
      auto value = [&](const char* key) { return old->find(key) ? old->find(key)->value : 0; };
      row.measured_peak = static_cast<Bytes>(value("memory.allocated_bytes"));
      row.arena = static_cast<Bytes>(value("memory.arena_bytes"));
      for (int c = 0; c < kCategoryCount; ++c)
        row.at_peak.by[static_cast<size_t>(c)] = static_cast<Bytes>(value(fmt::format("categories.{}", name_of(static_cast<Category>(c))).c_str()));
      row.measured_seconds = value("time.forward_backward_seconds");
      row.median_seconds = value("time.forward_backward_seconds_median");
      row.slowest_seconds = value("time.forward_backward_seconds_slowest");
      row.results = joined(value("train.results_high"), value("train.results_low"));
      row.identical = row.results == baseline_results_;
      row.resumed = true;
    } else if (setting.text() == plan::Setting{}.text()) {
      row = baseline;
      row.setting = setting.text();
    } else {
      measure(row, setting, false);
    }
    if (fresh) {
      row.predicted_peak = predict(session_.workload(), setting, program).peak_bytes;
      row.predicted_seconds = baseline_seconds_ + replay_seconds(program);
    }
    rows.push_back(row);
    if (!before.find(row.setting)) append(file, row, std::exchange(first, false));
    tell(row, i + 1, settings.size());
  }
  return rows;
}

// What an earlier sweep has left; empty if there is none.
config::Profile Sweep::read(const std::filesystem::path& file) const {
  if (!std::filesystem::exists(file)) return {};
  const MappedFile mapped(file);
  const std::string text(mapped.content());
  const std::string mark = "\nsets:\n", last_row = "predicted.time.forward_backward_seconds";
  config::Profile before;
  try { // setting by setting, as they were written: the whole may be larger than any configuration
    const size_t sets = text.find(mark);
    if (sets == std::string::npos) throw Error(ErrorCode::Config, "it has no sets");
    const size_t first = sets + mark.size();
    const std::string head = text.substr(0, first), item = "\n" + text.substr(first, text.find("modules:", first) - first) + "modules:";
    for (size_t at = first; at < text.size();) {
      const size_t next = std::min(text.find(item, at), text.size());
      config::Profile one = config::read_profile(config::parse_yaml(head + text.substr(at, next - at) + "\n", file.string()));
      if (one.sets.size() != 1 || !one.sets.front().find(last_row) || text.back() != '\n')
        throw Error(ErrorCode::Config, fmt::format("'{}' is not complete", one.sets.empty() ? "" : one.sets.front().modules));
      before.identity = one.identity;
      before.sets.push_back(std::move(one.sets.front()));
      at = next + 1;
    }
  } catch (const Error& e) {
    throw Error(ErrorCode::Config, fmt::format("{}: no whole sweep can be read from it, so none is resumed ({})", file.string(), e.what()),
                "the file was cut short or edited: remove it, or choose another folder with -o");
  }
  const auto mine = std::pair<std::string, std::string>("fingerprint", fingerprint(setup_));
  if (std::find(before.identity.begin(), before.identity.end(), mine) == before.identity.end())
    throw Error(ErrorCode::Config, fmt::format("{}: this sweep belongs to another configuration", file.string()),
                "remove it, or choose another folder with -o");
  return before;
}

// The first setting with the head of the file, later ones at its end: a list's items follow one another.
void Sweep::append(const std::filesystem::path& file, const SweepRow& row, bool first) const {
  const std::string text = config::to_yaml(to_profile(row));
  if (first) return write_atomically(file, text);
  const std::string head = "\nsets:\n";
  LineLog(file, true).write(text.substr(text.find(head) + head.size(), text.find_last_not_of('\n') + 1 - text.find(head) - head.size()));
}

config::Profile Sweep::to_profile(const SweepRow& r) const {
  config::Profile p = profile_identity(setup_, session_.device(), session_.workload().provider(), "sweep");
  p.identity.push_back({"fingerprint", fingerprint(setup_)});
  config::ProfileSet set{r.setting, {}};
  add_memory_rows(set, r.at_peak, r.arena);
  auto add = [&](const char* key, double value, const char* unit, const char* source) { set.rows.push_back({key, value, unit, source}); };
  add("time.forward_backward_seconds", r.measured_seconds, "seconds", "measured: the fastest run");
  add("time.forward_backward_seconds_median", r.median_seconds, "seconds", "measured");
  add("time.forward_backward_seconds_slowest", r.slowest_seconds, "seconds", "measured");
  add("train.identical", r.identical ? 1.0 : 0.0, "1 or 0", "measured: loss and every gradient, bit by bit, against no recompute");
  add("train.results_high", static_cast<double>(r.results >> 32), "bits", "measured: hash of loss and gradients");
  add("train.results_low", static_cast<double>(r.results & 0xffffffff), "bits", "measured: hash of loss and gradients");
  add("predicted.memory.allocated_bytes", static_cast<double>(r.predicted_peak), "bytes", "predicted");
  add("predicted.time.forward_backward_seconds", r.predicted_seconds, "seconds",
      "predicted: measured without recompute, plus replayed ops at their forward time");
  p.sets.push_back(std::move(set));
  return p;
}

} // namespace gdn::trainer
